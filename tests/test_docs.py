# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows is run: fenced blocks whose first line says so, top to bottom, in one empty folder.

```python file=NAME        written to NAME
```python run              run as a script
```console run exit=1      every line that begins with "$ " is run; the last one has to end with that code, the others with 0

Of every other block the names, options and arguments have to exist. Links and anchors lead somewhere, and files that are named are there.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ulpscope

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+) ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("design/*.md"), *ROOT.glob("bench/*.md")])
GUIDES = [page for page in PAGES if page.parent.name != "design"]  # a decision names the files of its day
IMPORTABLE = {"numpy", "torch", "ulpscope"}
STAGES = ("src", "src/ulpscope", "")
FOLDERS = {path.name for stage in STAGES for path in (ROOT / stage).iterdir() if path.is_dir()} - {"build", "dist", "runs", "ulpscope"}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def play(command: list[str] | str, folder: Path) -> tuple[int, str]:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, shell=isinstance(command, str), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout


def play_block(language: str, wish: str, body: str, folder: Path) -> None:
    if wish.startswith("file="):
        (folder / wish.removeprefix("file=")).write_text(body)
    elif language == "python":
        code, output = play([sys.executable, "-W", "error", "-c", body], folder)
        assert code == 0, output
    else:
        commands = [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]
        expected = [0] * (len(commands) - 1) + [int(wish.partition("exit=")[2] or 0)]
        for command, wanted in zip(commands, expected, strict=True):
            code, output = play(command, folder)
            assert code == wanted, f"$ {command}\n{output}"


def test_the_quickstart_does_what_it_says(tmp_path: Path) -> None:
    blocks = FENCE.findall((ROOT / "docs/quickstart.md").read_text())
    assert len(blocks) > 5
    for language, wish, body in blocks:
        play_block(language, wish, body, tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(without_blocks(page)):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), f"{target}#{anchor}"


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to the headings of a page."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found[re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")] += 1
    return {anchor if not number else f"{anchor}-{number}" for anchor, count in found.items() for number in range(count)}


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    """A path from the root, from `src/ulpscope`, or beside the page; or the name alone of a source file."""
    text = without_blocks(page)
    paths = {path for path in re.findall(r"`([\w.*-]+(?:/[\w.*-]+)+/?)`", text) if path.split("/")[0] in FOLDERS}
    homes = [*(ROOT / stage for stage in STAGES), page.parent]
    assert sorted(path for path in paths if not any(any(home.glob(path.rstrip("/"))) for home in homes)) == []
    names = set(re.findall(r"`([\w-]+\.(?:py|pyx|c|cpp))`", text)) - {"gelu_1.py"}  # a repro
    assert sorted(name for name in names if not any(any((ROOT / top).rglob(name)) for top in ("src", "bench", "tests"))) == []


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for found, body in re.findall(r"^```(\w+)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            if found == language:
                yield page, body


def test_every_block_of_python_says_what_exists() -> None:
    """Modules and names that are imported, public names of ulpscope, and the keywords they are called with."""
    found = list(blocks("python"))
    assert len(found) > 10
    for page, body in found:
        for node in ast.walk(ast.parse(body, filename=named(page))):
            match node:
                case ast.Import(names=[ast.alias(name=module)]) | ast.ImportFrom(module=str(module)):
                    if module.split(".")[0] in IMPORTABLE:
                        exec(compile(ast.Module([node], []), named(page), "exec"), {})
                case ast.Attribute(value=ast.Name(id="ulpscope"), attr=name):
                    assert name in ulpscope.__all__, named(page)
                case ast.Call(func=ast.Attribute(value=ast.Name(id="ulpscope"), attr=name), keywords=keywords):
                    known = inspect.signature(getattr(ulpscope, name)).parameters
                    assert {each.arg for each in keywords if each.arg} <= set(known), f"{named(page)}: {name}"


def test_every_decision_is_listed_once_in_order() -> None:
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (ROOT / "design/README.md").read_text(encoding="utf-8"))
    assert listed == sorted(page.name for page in (ROOT / "design").glob("[0-9]*.md"))


def test_the_readme_names_the_commands_that_set_up() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme
    assert "make demo" in readme


def test_the_example_of_the_readme_is_short() -> None:
    example = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert example
    assert len(example[1].splitlines()) < 15
    compile(example[1], "README.md", "exec")


def test_the_site_and_the_list_of_pages_have_the_same_parts() -> None:
    """Tutorial, how-to, reference, explanation: each page once, under the same title; the site has the help of each command besides."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\nnot_in_nav")[0]
    on_site: dict[str, list[tuple[str, str]]] = {}
    for line in settings.splitlines():
        if part := re.fullmatch(r"  - ([\w -]+):", line):
            on_site[part[1]] = []
        elif page := re.fullmatch(r"      - (.+): (.+\.md)", line):
            on_site[list(on_site)[-1]].append((page[1], page[2]))
    del on_site["Project"]
    on_site["Reference"].remove(("Every command's help", "docs/help.md"))

    parts = re.split(r"^## (.+)$", (ROOT / "docs/index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    listed = {
        title: [
            (text, f"docs/{target}".replace("docs/../", ""))
            for text, target in re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)", body, re.MULTILINE)
        ]
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }
    assert listed == on_site
    assert {page for pages in listed.values() for _, page in pages if page.startswith("docs/")} == {
        f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name != "index.md"
    }
