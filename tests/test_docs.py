# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows is run: fenced blocks whose first line says so, top to bottom, in one empty folder.

```python file=NAME        written to NAME
```python run              run as a script
```console run exit=1      every line that begins with "$ " is run; the last one has to end with that code, the others with 0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+) ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]+)?\)")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("design/*.md")])


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = [target for target, _ in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not broken


def test_the_readme_names_the_commands_that_set_up() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme
    assert "make demo" in readme


def test_the_example_of_the_readme_is_short() -> None:
    example = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert example
    assert len(example[1].splitlines()) < 15
    compile(example[1], "README.md", "exec")
