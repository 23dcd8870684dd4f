# SPDX-License-Identifier: Apache-2.0
"""README, docs/cli.md and docs/report-json.md name the commands, options, finding kinds and exit codes that the code has, and no others."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import click
import pytest

from ulpscope.cli import cli

ROOT = Path(__file__).parents[1]
CLI_PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
COMMANDS = cli.list_commands(click.Context(cli))
# The page that lists the options of a command where docs/cli.md only introduces it.
ELSEWHERE = {
    "check": "docs/check.md",
    "check-devices": "docs/standards.md",
    "nonfinite": "docs/nonfinite.md",
    "watch": "docs/health.md",
    "compare-health": "docs/health.md",
}


def command(name: str) -> click.Command:
    module = importlib.import_module(f"ulpscope.cli.{name.replace('-', '_')}")
    found = getattr(module, name.replace("-", "_"))
    assert isinstance(found, click.Command)
    return found


def options(name: str) -> set[str]:
    return {spelling for parameter in command(name).params if isinstance(parameter, click.Option) for spelling in parameter.opts}


def section(name: str) -> str:
    """The section of docs/cli.md whose heading names a command."""
    for part in re.split(r"^## ", CLI_PAGE, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        if name in heading.split(", "):
            return body
    return ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_section(name: str) -> None:
    assert section(name), f"docs/cli.md has no section for {name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_described(name: str) -> None:
    text = section(name) + ((ROOT / ELSEWHERE[name]).read_text(encoding="utf-8") if name in ELSEWHERE else "")
    missing = [
        option for option in sorted(options(name)) if not re.search(rf"`[^`]*{re.escape(option)}\b[^`]*`|\$ .*{re.escape(option)}\b", text)
    ]
    assert not missing, f"{name}: {missing} stand in the code and not in the documentation"


def shown_commands(text: str) -> list[tuple[str, list[str]]]:
    """Every `ulpscope COMMAND` of a page, with the options that follow it on its line."""
    found = []
    for line in re.findall(r"(?:^\$ |`)(?:torchrun [^`\n]*-m )?ulpscope ([a-z][^`\n#]*)", text, flags=re.MULTILINE):
        words = line.split()
        found.append((words[0], re.findall(r"(?<=\s)--[a-z-]+", f" {line}")))
    return found


@pytest.mark.parametrize(
    "page", ["README.md", "docs/cli.md", "docs/quickstart.md", "docs/check.md", "docs/health.md", "docs/nonfinite.md", "docs/ci.md"]
)
def test_pages_show_only_what_exists(page: str) -> None:
    shown = shown_commands((ROOT / page).read_text(encoding="utf-8"))
    assert shown
    for name, given in shown:
        assert name in COMMANDS, f"{page} shows the command {name!r}"
        own = given if name != "run" else given[: next((at for at, one in enumerate(given) if one not in options("run")), len(given))]
        unknown = set(own) - options(name) - {"--help"}
        assert not unknown, f"{page} shows {sorted(unknown)} of {name}"


def finding_kinds() -> set[str]:
    """Every kind that `explain` gives to a finding of compare, read off its source: an argument of `finding_at`, or the keyword `kind`."""
    kinds: set[str] = set()
    not_of_compare = {"checks.py", "health.py", "nonfinite.py", "nonfinite_causes.py", "nonfinite_events.py", "near_misses.py"}
    for file in sorted((ROOT / "src/ulpscope/explain").rglob("*.py")):
        if file.name in not_of_compare:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assigned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and "kind" in _targets(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                given = [keyword.value for keyword in node.keywords if keyword.arg == "kind" and name != "Gap"]
                given += node.args[1:2] if name == "finding_at" else []
                given += node.args[2:3] if name == "_explain" else []
                for value in given:
                    source = assigned if isinstance(value, ast.Name) else [value]
                    kinds |= {text for one in source for text in _results(one)}
    return kinds


def _targets(node: ast.Assign) -> set[str]:
    return {target.id for target in node.targets if isinstance(target, ast.Name)}


def _results(node: ast.expr) -> set[str]:
    """The texts that an expression may have as its value."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp():
            return _results(node.body) | _results(node.orelse)
        case ast.Call(func=ast.Attribute(value=ast.Dict(values=values), attr="get"), args=[_, other]):
            return {text for value in (*values, other) for text in _results(value)}
        case ast.Subscript(value=ast.Dict(values=values)):
            return {text for value in values for text in _results(value)}
    return set()


def test_the_json_page_lists_every_kind_of_finding() -> None:
    page = (ROOT / "docs/report-json.md").read_text(encoding="utf-8")
    listed = re.search(r"`kind` is one of ([a-z,\s]+)\.", page)
    assert listed
    assert set(re.split(r",\s*", listed[1].strip())) == finding_kinds()


def test_exit_codes_are_the_same_everywhere() -> None:
    codes = re.search(r"^## Exit codes\n(.*?)^## ", CLI_PAGE, re.MULTILINE | re.DOTALL)
    assert codes
    documented = set(re.findall(r"^\| (\d+) \|", codes[1], re.MULTILINE))
    assert documented == {"0", "1", "2", "130", "141"}
    source = (ROOT / "src/ulpscope/cli/__init__.py").read_text(encoding="utf-8")
    assert all(code in source for code in ("130", "141", "return 2"))
    assert cli.help is not None
    assert re.search(r"0 nothing diverges, 1 something does, 2 the question could not be answered", cli.help)


def recording_examples() -> list[tuple[str, str]]:
    """Lines of README, pages and help that record a run for a comparison, and where they stand."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src/ulpscope/cli").glob("*.py"))]
    lines = [(page.name, line) for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    starts = re.compile(r"ulpscope run --into (?!DIR|FOLDER)\S+")
    return [
        (name, line) for name, line in lines if starts.search(line) and "--watch nonfinite" not in line and not name.startswith("check")
    ]


def test_every_example_that_records_for_a_comparison_is_seeded() -> None:
    examples = recording_examples()
    assert len(examples) > 15
    assert [(name, line) for name, line in examples if "--seed" not in line] == []
