# SPDX-License-Identifier: Apache-2.0
"""Build the documentation site: lay out the pages as they lie in the repository, with the help of each command, and give them to mkdocs.

python tools/site.py [FOLDER]      the pages go to FOLDER/pages and the site to FOLDER/site; FOLDER is build by default
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
from click.testing import CliRunner

from ulpscope.cli import cli

ROOT = Path(__file__).resolve().parents[1]
WHOLE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "bench/README.md", "docs", "design")


def lay_out(pages: Path) -> None:
    """Copy the published pages to a folder that holds nothing else."""
    shutil.rmtree(pages, ignore_errors=True)
    for name in WHOLE:
        source, target = ROOT / name, pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    for page in pages.rglob("*.md"):
        page.write_text(for_mkdocs(page.read_text(encoding="utf-8")), encoding="utf-8")
    (pages / "docs/help.md").write_text(help_page(), encoding="utf-8")


def for_mkdocs(text: str) -> str:
    """Drop the directives to tests from a page's blocks, and put a docstring in place of each line that lists a public name."""
    return re.sub(r"^- `(ulpscope\.\w+)`.*$", r"::: \1", re.sub(r"^(```\w+) .+$", r"\1", text, flags=re.MULTILINE), flags=re.MULTILINE)


def help_page() -> str:
    """Return the page of every command's `--help`."""
    parts = ["# Every command's help", "What `ulpscope COMMAND --help` prints. [The command line](cli.md) explains more.", _help()]
    for name in cli.list_commands(click.Context(cli)):
        parts += [f"## {name}", _help(name)]
    return "\n\n".join(parts) + "\n"


def _help(*command: str) -> str:
    printed = CliRunner().invoke(cli, [*command, "--help"], prog_name="ulpscope", catch_exceptions=False)
    return f"```text\n{printed.output.rstrip()}\n```"


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build").resolve()
    lay_out(folder / "pages")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
        "--site-dir",
        str(folder / "site"),
    ]
    # The theme's makers announce a successor on each build.
    environment = {**os.environ, "ULPSCOPE_PAGES": str(folder / "pages"), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
