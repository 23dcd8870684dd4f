# SPDX-License-Identifier: Apache-2.0
"""README, docs/cli.md and docs/report-json.md name the commands, options, finding kinds and exit codes that the code has, and no others."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path

import click
import pytest

from ulpscope.cli import cli

ROOT = Path(__file__).parents[1]
CLI_PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
COMMANDS = cli.list_commands(click.Context(cli))
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
MUST_SHOW = {"README.md", "docs/cli.md", "docs/quickstart.md", "docs/check.md", "docs/health.md", "docs/nonfinite.md", "docs/ci.md"}
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


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_only_what_exists(page: str) -> None:
    shown = shown_commands((ROOT / page).read_text(encoding="utf-8"))
    assert shown or page not in MUST_SHOW
    for name, given in shown:
        assert name in COMMANDS, f"{page} shows the command {name!r}"
        own = given if name != "run" else given[: next((at for at, one in enumerate(given) if one not in options("run")), len(given))]
        unknown = set(own) - options(name) - {"--help"}
        assert not unknown, f"{page} shows {sorted(unknown)} of {name}"


def console_commands() -> Iterator[tuple[str, list[str]]]:
    """Every use of ulpscope in a console block of a page: the page, and the words of the command without those of the shell."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for body in re.findall(r"^```console[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for line in re.findall(r"^\$ (.*)$", body.replace("\\\n", " "), re.MULTILINE):
                for words in shell_commands(line):
                    if "ulpscope" in words:
                        yield page.name, words[words.index("ulpscope") + 1 :]


def shell_commands(line: str) -> Iterator[list[str]]:
    """The commands of a line of shell, each as its words; what is redirected is left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters = "#"
    lexer.whitespace_split = True
    for is_operator, words in groupby(lexer, key=lambda word: set(word) <= set("();|&")):
        if not is_operator:
            yield list(takewhile(lambda word: not word.startswith((">", "<")), words))


def test_every_command_in_a_block_is_one_that_click_takes() -> None:
    shown = list(console_commands())
    assert len(shown) > 50
    assert len({words[0] for _, words in shown}) > 10
    for page, words in shown:
        problem = why_not(words)
        assert not problem, f"{page} shows `ulpscope {shlex.join(words)}`: {problem}"


def why_not(words: list[str]) -> str:
    """Why click would refuse these words; files are not looked for."""
    if words in (["--version"], ["--help"]):
        return ""
    name, *rest = words
    if name not in COMMANDS:
        return "there is no such command"
    try:
        given = command(name).make_context(name, list(rest)).params
    except click.UsageError as error:
        return error.format_message()
    return "an option that run does not have" if str(given.get("script", "")).startswith("-") else ""


def test_what_click_would_refuse_is_seen() -> None:
    assert why_not(["compare", "a", "b", "--html", "x.html"]) == ""
    assert why_not(["compares"])
    assert why_not(["compare", "a", "b", "c"])
    assert why_not(["compare", "a", "b", "--htm"])
    assert why_not(["compare", "a", "b", "--rules", "x"])
    assert why_not(["run", "train.py"])
    assert why_not(["run", "--into", "a", "--keeps", "tensors", "train.py"])
    assert list(shell_commands("GELU=tanh ulpscope show runs 'a b' > x && b | c  # d")) == [
        ["GELU=tanh", "ulpscope", "show", "runs", "a b"],
        ["b"],
        ["c"],
    ]


def finding_kinds() -> set[str]:
    """Every kind that `explain` gives to a finding of compare, read off its source: an argument of `finding_at`, or the keyword `kind`."""
    kinds: set[str] = set()
    not_of_compare = {"checks.py", "health.py"}
    for file in sorted((ROOT / "src/ulpscope/explain").rglob("*.py")):
        if file.name in not_of_compare or file.parent.name == "nonfinite":
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
        (name, line)
        for name, line in lines
        if starts.search(line) and not re.search("--watch nonfinite|--nonfinite", line) and not name.startswith("check")
    ]


def test_every_example_that_records_for_a_comparison_is_seeded() -> None:
    examples = recording_examples()
    assert len(examples) > 15
    assert [(name, line) for name, line in examples if "--seed" not in line] == []


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "bench/README.md"])
def test_every_target_and_every_script_that_is_shown_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    modules = [name.replace(".", "/") for name in re.findall(r"python3? -m ((?:bench|tests|ulpscope)[\w.]*)", text)]
    homes = [home / name for home in (ROOT, ROOT / "src") for name in ("{}", "{}.py")]
    assert [name for name in modules if not any(Path(str(home).format(name)).exists() for home in homes)] == []
    assert [name for name in re.findall(r"python3? ((?:bench|tests|tools)/[\w/]+\.py)", text) if not (ROOT / name).is_file()] == []
