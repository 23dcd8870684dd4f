# SPDX-License-Identifier: Apache-2.0
"""Test the rules for every command: names, options, help, and exit codes of errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
import torch
from click.testing import CliRunner

import ulpscope
from ulpscope import _torch_versions
from ulpscope.capture.native.building import TABLE
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.cli import cli
from ulpscope.errors import MissingDependencyError, NotARunError
from ulpscope.numerics.kernel import kernel_name

OPTIONS = {
    "run": [
        "--into",
        "--keep",
        "--level",
        "--steps",
        "--ranks",
        "--select",
        "--max-bytes",
        "--nonfinite",
        "--health",
        "--watch",
        "--watch-limit",
        "--watch-raise",
        "--watch-calls",
        "--seed",
        "--deterministic",
        "-m",
        "script",
        "arguments",
    ],
    "build": [],
    "migrate": ["config"],
    "demo": ["--into", "--open"],
    "compare": [
        "subject",
        "reference",
        "--json",
        "--html",
        "--csv",
        "--xlsx",
        "--parquet",
        "--junit",
        "--github-summary",
        "--repro",
        "--rules",
        "--mapping",
        "--replay",
        "--replay-limit",
        "--repeat",
        "--baseline",
        "--update",
        "--partial",
        "--quiet",
    ],
    "refine": ["subject", "reference", "--into", "--mapping", "--quiet"],
    "check": [
        "run",
        "--device",
        "--reference-precision",
        "--jobs",
        "--select",
        "--rules",
        "--edition",
        "--save-failures",
        "--resume",
        "--overflow",
        "--seed",
        "--timeout",
        "--import",
        "--csv",
        "--xlsx",
        "--json",
        "--html",
        "--quiet",
    ],
    "check-devices": ["subject", "reference", "--csv", "--json", "--edition", "--quiet"],
    "nonfinite": ["run", "--json", "--html", "--quiet"],
    "health": ["run", "--rank", "--interval", "--once"],
    "watch": ["run", "--rank", "--interval", "--once"],
    "compare-health": ["subject", "reference", "--json", "--html", "--png", "--csv", "--quiet"],
    "show": ["run", "glob", "--step", "--rank", "--phase", "--stacks", "--arguments", "--tensor", "--json", "--all"],
}


def command_named(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def ulpscope_command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "ulpscope", *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120, **options
    )


def test_the_commands() -> None:
    assert cli.list_commands(click.Context(cli)) == [
        *("run", "compare", "refine", "check", "check-devices", "nonfinite", "show"),
        *("health", "watch", "compare-health", "build", "migrate", "demo"),
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_a_command(name: str) -> None:
    assert [parameter.opts[-1] for parameter in command_named(name).params] == OPTIONS[name]


@pytest.mark.parametrize("arguments", [[], *([name] for name in OPTIONS)], ids=lambda arguments: arguments[0] if arguments else "top")
def test_help_has_an_example(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, [*arguments, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert "  ulpscope " in result.stdout


def test_help_names_every_command_without_importing_one() -> None:
    code = "import sys; from ulpscope.cli import cli; cli(['--help'], standalone_mode=False)"
    check = "import atexit; atexit.register(lambda: print(sorted(name for name in sys.modules if name.startswith('ulpscope.cli.'))))"
    done = subprocess.run([sys.executable, "-c", f"import sys; {check}; {code}"], capture_output=True, text=True, check=True)
    assert "Compare two runs and name the first divergence." in done.stdout
    assert done.stdout.endswith("\n[]\n")


def test_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    recorder = "compiled recorder" if COMPILED is not None else "recorder in Python"
    if TABLE is not None:
        recorder += f", built for torch {torch.__version__}"
    assert (result.exit_code, result.stdout) == (0, f"ulpscope {ulpscope.__version__} ({kernel_name()}; {recorder})\n")


def test_a_torch_newer_than_any_tried_is_one_line_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "__version__", "99.1.0")
    lines = CliRunner().invoke(cli, ["--version"]).stdout.splitlines()
    newest = _torch_versions.TRIED[-1]
    said = f"torch 99.1.0 is newer than {newest}, the newest that ulpscope was tried with: what it lacks is said where it is missed"
    assert lines[1:] == [said]


@pytest.mark.parametrize("version", ["", "2.4.0", "2.13.0+cpu", f"{_torch_versions.TRIED[-1].rpartition('.')[0]}.7"])
def test_no_other_torch_is(version: str) -> None:
    assert _torch_versions.newer_than_tried(version) == ""


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["compare"], ["compare", "a"], ["show", "a", "--nonsense"], ["show", "a", "--step", "x"]]
)
def test_a_command_line_that_makes_no_sense_is_exit_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def raising(error: BaseException) -> Any:
    def open_run(path: Path) -> NoReturn:
        raise error

    return open_run


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (NotARunError("'a' holds no run; give another path"), 2, "ulpscope: 'a' holds no run; give another path\n"),
        (NotARunError("two\nlines \x1b[31m"), 2, "ulpscope: two lines \\x1b[31m\n"),
        (MissingDependencyError("it needs 'x': pip install x"), 2, "ulpscope: it needs 'x': pip install x\n"),
        (PermissionError(13, "Permission denied", "runs/a"), 2, "ulpscope: cannot read or write 'runs/a': Permission denied\n"),
        (OSError("the disk is gone"), 2, "ulpscope: the disk is gone\n"),
        (KeyboardInterrupt(), 130, "ulpscope: interrupted\n"),
    ],
)
def test_what_goes_wrong_is_one_line(error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulpscope.store.open_run", raising(error))
    result = CliRunner().invoke(cli, ["show", "a"])
    assert (result.exit_code, result.stderr.lstrip("\n"), result.stdout) == (code, sentence, "")


def test_what_nobody_foresaw_shows_where_and_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulpscope.store.open_run", raising(ZeroDivisionError("oh")))
    result = CliRunner().invoke(cli, ["show", "a"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError: oh" in result.stderr


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = ulpscope_command("show", "missing", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ulpscope: missing does not exist")
    assert done.stderr.count("\n") == 1
