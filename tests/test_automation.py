# SPDX-License-Identifier: Apache-2.0
"""Workflows, issue forms and commit hooks: what GitHub would accept, and what has to agree with other files of the project.

Nothing here can run a workflow. Schemas come with check-jsonschema, so no network is asked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML
from tools import matrix

from ulpscope import _torch_versions

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")


def schema_errors(schema: str, *files: Path) -> str:
    """What check-jsonschema complains about; empty where files fit."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr if done.returncode else ""


def read(name: str) -> Any:
    return YAML(typ="safe").load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_workflows_fit_the_schema(schema: str) -> None:
    assert len(WORKFLOWS) == 2
    assert schema_errors(schema, *WORKFLOWS) == ""


def test_issue_forms_fit_the_schema() -> None:
    assert len(FORMS) == 3
    assert schema_errors("vendor.github-issue-forms", *FORMS) == ""
    assert schema_errors("vendor.github-issue-config", ROOT / ".github/ISSUE_TEMPLATE/config.yml") == ""


def test_the_schema_check_refuses_what_github_would(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text((ROOT / ".github/workflows/ci.yml").read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in schema_errors("vendor.github-workflows", broken)


def test_the_workflow_runs_the_script_of_the_project() -> None:
    job = read(".github/workflows/ci.yml")["jobs"]["run"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


def test_the_matrix_spans_what_the_project_promises() -> None:
    """Every Python that wheels are built for; the oldest torch that pyproject.toml allows, the one of constraints.txt, and the newest."""
    cells = [
        cell for cell in read(".github/workflows/ci.yml")["jobs"]["matrix"]["strategy"]["matrix"]["include"] if not cell.get("may_fail")
    ]
    minors = re.search(r'^build = "cp3\{([\d,]+)\}-', PROJECT, re.MULTILINE)
    oldest_python = re.search(r'^requires-python = ">=(.+)"', PROJECT, re.MULTILINE)
    oldest_torch = re.search(r'^torch = \["torch>=(.+?)"\]', PROJECT, re.MULTILINE)
    pinned_torch = re.search(r"^torch==(\d+\.\d+)", CONSTRAINTS, re.MULTILINE)
    assert minors
    assert oldest_python
    assert oldest_torch
    assert pinned_torch
    assert sorted({cell["python"] for cell in cells}) == [f"3.{minor}" for minor in minors[1].split(",")]
    assert {"python": oldest_python[1], "torch": f"=={oldest_torch[1]}.*"} in cells
    assert f"=={pinned_torch[1]}.*" in {cell["torch"] for cell in cells}
    assert f">={pinned_torch[1]}" in {cell["torch"] for cell in cells}
    assert oldest_torch[1] == _torch_versions.OLDEST
    assert {f"=={version.rpartition('.')[0]}.*" for version in _torch_versions.TRIED} <= {cell["torch"] for cell in cells}


def test_the_local_matrix_runs_what_the_project_says_was_tried() -> None:
    """Three: the oldest, the one of constraints.txt, and the newest, in this order."""
    tried = list(_torch_versions.TRIED)
    assert matrix.versions_tried() == tried
    assert [newer(version) for version in tried] == sorted(newer(version) for version in tried)
    assert len(tried) == 3
    assert f"torch=={tried[1]}\n" in CONSTRAINTS
    assert f"{_torch_versions.OLDEST}." in tried[0]


def newer(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_a_run_of_the_matrix_is_counted_from_what_pytest_writes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pass\ndef test_c(): assert 0\ndef test_d(): pytest.skip('no')\n"
        "@pytest.fixture\ndef broken(): raise ValueError\ndef test_e(broken): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--junitxml=tests.xml",
        "-c",
        "/dev/null",
        "--rootdir=.",
        ".",
    ]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    assert matrix.counted(tmp_path / "tests.xml", "2.8.0", "3.11.7") == ("2.8.0", "3.11.7", 2, 2, 1)


def test_a_torch_that_cannot_be_had_is_one_sentence_and_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "HOME", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert matrix.matrix(["0.0.1"]) == 1
    sentence = "torch 0.0.1: the environment build/matrix/0.0.1 does not get torch 0.0.1; all that was said is in its install.log\n"
    assert capfd.readouterr().err == sentence
    assert "No matching distribution found for torch==0.0.1" in (tmp_path / "0.0.1" / "install.log").read_text()


def test_help_names_every_target_and_the_script_makes_those_of_a_change() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    declared = re.search(r"^\.PHONY: help (.+)", makefile, re.MULTILINE)
    assert declared
    assert re.findall(r"^\t@echo 'make ([\w-]+) ", makefile, re.MULTILINE) == declared[1].split()
    called = re.findall(r"^ *make ([\w-]+)(?: PLAIN='[\w/ -]+')?$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert called == ["check", "docs", "web-check", "test", "test-plain", "test-mindspore"]


def test_the_plain_tests_run_without_what_was_compiled() -> None:
    """And with everything that `make test` gives to pytest, but for what is left out."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (usual,) = re.findall(r"^test: .*\n\t@(.+)", makefile, re.MULTILINE)
    (plain,) = re.findall(r"^test-plain: .*\n\t@(.+)", makefile, re.MULTILINE)
    assert plain == f"ULPSCOPE_NO_KERNEL=1 {usual} $(PLAIN)"
    left_out = re.findall(r"--ignore(?:-glob)?='?([^ '\n]+)", makefile)
    assert left_out
    assert all(list(ROOT.glob(pattern)) for pattern in left_out), "a file that has moved would be tested again"


def test_commit_hooks_run_what_make_check_runs() -> None:
    target = re.search(r"^check: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert target
    commands = [line.removeprefix("\t@$(BIN)/") for line in target[1].splitlines() if "$(BIN)/" in line]
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert len(commands) == 4
    assert [hook["entry"].removeprefix(".venv/bin/") for hook in repository["hooks"]] == commands
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in repository["hooks"])


def test_every_development_dependency_is_pinned() -> None:
    """Those that pyproject.toml names, and what they depend on where they are installed; a CUDA build of torch pins its own."""
    pinned = {canonicalize_name(re.split(r"[^\w.-]", line)[0]) for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")}
    extras = re.findall(r"^(?:dev|docs|torch|dependencies) = \[((?:\n  .*)+|.*\])", PROJECT, re.MULTILINE)
    waiting = [Requirement(text) for extra in extras for text in re.findall(r'"([^"]+)"', extra)]
    assert {"pytest", "mkdocs", "torch", "click"} <= {each.name for each in waiting}
    seen: dict[str, set[str]] = {}
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in seen and wanted.extras <= seen[name]:
            continue
        seen[name] = seen.get(name, set()) | wanted.extras
        waiting += [each for each in _requirements_of(name) if _applies(each, wanted.extras)]
    assert {name for name in seen if not name.startswith(("nvidia-", "cuda-", "triton"))} <= pinned


def _requirements_of(name: str) -> list[Requirement]:
    try:
        return [Requirement(line) for line in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:  # the extra docs, before make docs
        return []


def _applies(wanted: Requirement, extras: set[str]) -> bool:
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras))
