# SPDX-License-Identifier: Apache-2.0
"""`make release` in a repository of its own, with the files of this one: what it makes, and what it refuses without a change."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("Makefile", "CHANGELOG.md", "tools/release.py", "src/ulpscope/__init__.py")
NOTES = "### Added\n\n- A thing that users notice.\n- Another."


class Repository:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.git("init", "--quiet")
        self.write_changes(NOTES)

    def git(self, *arguments: str) -> str:
        return self._run("git", *arguments).stdout

    def release(self, version: str) -> subprocess.CompletedProcess[str]:
        return self._run("make", "release", f"VERSION={version}", f"PYTHON={sys.executable}", check=False)

    def write_changes(self, text: str) -> None:
        self.write("CHANGELOG.md", f"# Changelog\n\n## [Unreleased]\n\n{text}\n\n## [0.0.9] - 2026-01-01\n\n- Older.\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")

    @property
    def state(self) -> tuple[str, str, str]:
        return self.git("rev-parse", "HEAD"), self.git("status", "--porcelain"), self.git("tag", "--list")

    def _run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        who = {f"GIT_{role}_{what}": "somebody" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
        environment |= who | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=check)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_release_is_a_commit_and_a_tag_with_the_notes(repository: Repository) -> None:
    before = repository.git("rev-parse", "HEAD")
    done = repository.release("1.2.0")
    assert done.returncode == 0, done.stderr
    assert "v1.2.0" in done.stdout

    assert repository.git("rev-parse", "HEAD~1") == before
    assert repository.git("show", "--format=%s", "--name-only", "HEAD").split("\n")[0] == "release: 1.2.0"
    assert repository.git("diff", "--name-only", "HEAD~1").split() == ["CHANGELOG.md", "src/ulpscope/__init__.py"]
    assert re.findall(r'^__version__ = "(.+)"$', (repository.folder / FILES[-1]).read_text(), re.MULTILINE) == ["1.2.0"]
    changelog = (repository.folder / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE) == ["Unreleased", "1.2.0", "0.0.9"]
    assert re.search(r"^## \[1\.2\.0\] - \d{4}-\d\d-\d\d\n\n### Added\n\n- A thing", changelog, re.MULTILINE)

    assert repository.git("cat-file", "-t", "v1.2.0").strip() == "tag"
    assert repository.git("tag", "--list", "--format=%(contents)", "v1.2.0").strip() == f"ulpscope 1.2.0\n\n{NOTES}"
    assert repository.git("status", "--porcelain") == ""


def test_the_next_release_needs_something_new(repository: Repository) -> None:
    assert repository.release("1.2.0").returncode == 0
    refused = repository.release("1.2.1")
    assert refused.returncode
    assert "nothing under '## [Unreleased]'" in refused.stderr


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("", "is no version"),
        ("1.2", "is no version"),
        ("v1.2.0", "is no version"),
        ("1.02.0", "is no version"),
        ("0.0.9", "not newer than 0.0.9"),
        ("0.0.8", "not newer than 0.0.9"),
    ],
)
def test_a_version_that_cannot_be_is_refused(repository: Repository, version: str, sentence: str) -> None:
    _is_refused(repository, version, sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# Changelog\n\n## [Unreleased]\n\n## [0.0.9] - 2026-01-01\n\n- Older.\n", "nothing under"),
        ("# Changelog\n\n## [Unreleased]\n\n### Added\n", "nothing under"),
        ("# Changelog\n\n## [0.0.9] - 2026-01-01\n\n- Older.\n", "has no line '## [Unreleased]'"),
        ("# Changelog\n\n## [0.0.9] - 2026-01-01\n\n- Older.\n\n## [Unreleased]\n\n- New.\n", "below a released version"),
    ],
)
def test_a_changelog_that_says_nothing_is_refused(repository: Repository, text: str, sentence: str) -> None:
    repository.write("CHANGELOG.md", text)
    _is_refused(repository, "1.2.0", sentence)


def test_a_tree_with_changes_is_refused(repository: Repository) -> None:
    (repository.folder / "left-over.txt").write_text("not committed")
    _is_refused(repository, "1.2.0", "left-over.txt")


def test_a_tag_that_exists_is_refused(repository: Repository) -> None:
    repository.git("tag", "v1.2.0")
    _is_refused(repository, "1.2.0", "the tag v1.2.0 exists")


def test_a_commit_that_a_hook_refuses_leaves_everything_as_it_was(repository: Repository) -> None:
    hook = repository.folder / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'the checks fail' >&2\nexit 1\n")
    hook.chmod(0o755)
    _is_refused(repository, "1.2.0", "the checks fail")


def _is_refused(repository: Repository, version: str, sentence: str) -> None:
    before = repository.state
    done = repository.release(version)
    assert done.returncode
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert repository.state == before
