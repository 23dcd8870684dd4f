# SPDX-License-Identifier: Apache-2.0
"""Make docs/legacy.md from the tests: `python -m tests.legacy.table` writes the page anew.

A promise is kept when a test carries its number as a `promise`; otherwise `INSTEAD` says why not and what happens instead. Neither, or
both, is an error. A test that shows a refusal carries the number as `refused`: the promise is not kept, and its reason names that test.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "legacy.md"
OWN_WAYS = HERE / "old_doors.md"  # the last section, which no test can make

_HEAD = """# What the older tools promised

Scripts written for ptdbg_ascend, api_accuracy_checker or msprobe run unchanged: `pip install ulpscope-legacy` carries their import names.
Scripts for torch_npu.hooks need two more lines at their top, `from ulpscope.compat import npu_hooks` and `npu_hooks.install()`.
[Moving on](migrating.md) shows the new call for each old one.

This page is made from the tests (`python -m tests.legacy.table`). **kept** means: the test named beside it goes through the old
name and looks at the file, column or text that a user of the old tool would look at. What is not kept says why, and what happens instead;
a test that shows a refusal is named there and never counts as kept.
Nothing here was run on an Ascend NPU: `npu` in the tests is the [stand-in](fake-npu.md), whose arithmetic can round operands as that
hardware does.
"""


def promises() -> dict[str, dict[str, str]]:
    """Return the wording of every promise by its number, tool by tool."""
    tools: dict[str, dict[str, str]] = {}
    for module in _modules():
        tools.setdefault(module.TITLE, {}).update(module.PROMISES)
    return tools


def instead() -> dict[str, str]:
    """Return why a promise has no test, and what happens instead."""
    return {number: reason for module in _modules() for number, reason in module.INSTEAD.items()}


def kept() -> dict[str, list[str]]:
    """Find the tests that carry each number as a promise."""
    return _tests("promise")


def refused() -> dict[str, list[str]]:
    """Find the tests that show how each of these numbers is refused."""
    return _tests("refused")


def _tests(mark: str) -> dict[str, list[str]]:
    tests: dict[str, list[str]] = {}
    for file, node in _functions():
        is_long = any(isinstance(part, ast.Attribute) and part.attr == "long" for part in node.decorator_list)
        for number in _numbers(node, mark):
            tests.setdefault(number, []).append(f"{file.stem}.{node.name}" + (" (long)" if is_long else ""))
    return tests


def disguised() -> list[str]:
    """Find tests that carry a promise and show that the promised thing is missing here."""
    return [
        f"{file.stem}.{node.name} shows a refusal and carries {', '.join(numbers)} as kept"
        for file, node in _functions()
        if (numbers := _numbers(node, "promise")) and _shows_refusal(node)
    ]


def _shows_refusal(node: ast.FunctionDef) -> bool:
    is_missing = any(isinstance(part, ast.Name) and part.id == "MissingDependencyError" for part in ast.walk(node))
    return is_missing or re.search(r"is_missing|not_there|says_so", node.name) is not None


def faults() -> list[str]:
    """List the contradictions that would make the page a lie."""
    worded = {number for promised in promises().values() for number in promised}
    tested, excused, denied = kept(), instead(), refused()
    found = [f"{number} is on a test and has no wording" for number in sorted({*tested, *denied} - worded)]
    found += [f"{number} is refused and has no reason" for number in sorted(set(denied) - set(excused))]
    found += disguised()
    found += [f"{number} has neither a test nor a reason" for number in sorted(worded - set(tested) - set(excused))]
    return found + [f"{number} has both a test and a reason" for number in sorted(set(tested) & set(excused))]


def page() -> str:
    tested, excused, denied = kept(), instead(), refused()
    parts = [_HEAD]
    for tool, promised in promises().items():
        count = sum(number in tested for number in promised)
        rows = [
            f"| {number} | {text} | {_state(number, tested, excused, denied)} |"
            for number, text in sorted(promised.items(), key=lambda item: _key(item[0]))
        ]
        head = f"## {tool}\n\n{count} of {len(promised)} kept.\n\n| number | promise | state |\n|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join([*parts, OWN_WAYS.read_text(encoding="utf-8")])


def _state(number: str, tested: dict[str, list[str]], excused: dict[str, str], denied: dict[str, list[str]]) -> str:
    if number in tested:
        return "**kept**: " + ", ".join(f"`{name}`" for name in tested[number][:3])
    reason = excused.get(number, "no test yet")
    if number in denied:
        return f"**refused**: {reason} ({', '.join(f'`{name}`' for name in denied[number][:3])})"
    return f"instead: {reason}"


def _key(number: str) -> tuple[str, int, str]:
    match = re.fullmatch(r"([A-Z]+)(\d+)(\w*)", number)
    if match is None:
        raise ValueError(f"{number!r} is not the number of a promise")
    return match[1], int(match[2]), match[3]


def _modules() -> Iterator[object]:
    for file in sorted(HERE.glob("promises_*.py")):
        yield importlib.import_module(f"tests.legacy.{file.stem}")


def _functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for file in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield file, node


def _numbers(node: ast.FunctionDef, mark: str) -> list[str]:
    """Return the numbers that a mark puts on a test, also on single cases of a parametrized one."""
    calls = [call for decorator in node.decorator_list for call in ast.walk(decorator) if isinstance(call, ast.Call)]
    marks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == mark]
    return [str(part.value) for call in marks for part in call.args if isinstance(part, ast.Constant)]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(faults()) or f"{PAGE.name} is written")
