# SPDX-License-Identifier: Apache-2.0
"""Make a release: set the version, close the changelog's section, commit, and tag with the notes. Pushes nothing.

    python tools/release.py 1.2.0

The version stands in one place, `src/ulpscope/__init__.py`. The notes are what CHANGELOG.md has under `## [Unreleased]`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

VERSION_FILE = Path("src/ulpscope/__init__.py")
CHANGELOG = Path("CHANGELOG.md")
HEADING = "## [Unreleased]"
_VERSION_LINE = re.compile(r'^__version__ = ".+"$', re.MULTILINE)
_RELEASED = re.compile(r"^## \[(\d+\.\d+\.\d+)\]", re.MULTILINE)


class Refused(Exception):
    """Raised for a release that cannot be made; the message is one sentence."""


def release(version: str) -> str:
    """Release HEAD as `version` and return the tag. Refuse before anything changes."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise Refused(f"VERSION={version!r} is no version; give three numbers, as in make release VERSION=1.2.0")
    tag = f"v{version}"
    if changed := git("status", "--porcelain"):
        raise Refused(f"the working tree has changes, the first is {changed.splitlines()[0].strip()!r}; commit or stash them")
    if git("tag", "--list", tag):
        raise Refused(f"the tag {tag} exists, at {git('rev-parse', '--short', tag + '^{commit}')}; choose a newer version")
    text = CHANGELOG.read_text(encoding="utf-8")
    notes = unreleased(text)
    newest = max((numbers(found) for found in _RELEASED.findall(text)), default=None)
    if newest is not None and numbers(version) <= newest:
        raise Refused(f"{version} is not newer than {'.'.join(map(str, newest))}, which {CHANGELOG} has; choose a newer version")

    source = VERSION_FILE.read_text(encoding="utf-8")
    if len(_VERSION_LINE.findall(source)) != 1:
        raise Refused(f'{VERSION_FILE} does not have one line __version__ = "..."; put the version there')
    before = git("rev-parse", "HEAD")
    today = datetime.now(timezone.utc).date().isoformat()
    VERSION_FILE.write_text(_VERSION_LINE.sub(f'__version__ = "{version}"', source), encoding="utf-8")
    CHANGELOG.write_text(text.replace(HEADING, f"{HEADING}\n\n## [{version}] - {today}", 1), encoding="utf-8")
    try:
        git("commit", "--quiet", "--message", f"release: {version}", "--", str(VERSION_FILE), str(CHANGELOG))
        # Headings of the notes begin with #, which git takes for comments unless it is told to leave the text alone.
        git("tag", "--annotate", "--cleanup=whitespace", "--file=-", tag, text=f"ulpscope {version}\n\n{notes}\n")
    except Refused:
        git("reset", "--quiet", "--hard", before)  # there was nothing else to lose: the tree was clean
        raise
    return tag


def unreleased(text: str) -> str:
    """Return the notes under the heading of unreleased changes."""
    before, heading, after = text.partition(f"{HEADING}\n")
    if not heading:
        raise Refused(f"{CHANGELOG} has no line {HEADING!r}; write what changed under it")
    if _RELEASED.search(before):
        raise Refused(f"{CHANGELOG} has {HEADING!r} below a released version; the newest changes come first")
    notes = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not re.search(r"^- \S", notes, re.MULTILINE):
        raise Refused(f"{CHANGELOG} has nothing under {HEADING!r}; write what changed, one line each")
    return notes


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def git(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(["git", *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"git {arguments[0]} said: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    try:
        made = release(sys.argv[1] if len(sys.argv) == 2 else "")
    except Refused as refusal:
        sys.exit(f"make release: {refusal}")
    print(
        f"make release: committed and tagged as {made}; look at it with 'git show {made}', and push it with 'git push origin HEAD {made}'"
    )
