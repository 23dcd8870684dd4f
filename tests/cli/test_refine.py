# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import write_run
from ulpscope.cli import cli


def refine(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["refine", *map(str, arguments)])


@pytest.mark.parametrize("keep", ["statistics", "fingerprint"])
def test_a_file_and_two_commands(keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "good", keep=keep)
    write_run(tmp_path / "bad", keep=keep, scale=1.01)
    result = refine("bad", "good")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "gelu (call 0, forward, output 0), step 0, rank 0" in lines[0]
    assert lines[1].startswith("'closer.txt' selects 3 calls of step 0: about ")
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("  ulpscope run")]
    assert [command[:9] for command in commands] == [
        ["ulpscope", "run", "--into", f"{side}-closer", "--keep", "tensors", "--steps", "0", "--level"][:8] + command[8:9]
        for side, command in zip(("bad", "good"), commands, strict=True)
    ]
    assert all("@closer.txt" in command for command in commands)
    assert lines[-1] == "then: ulpscope compare bad-closer good-closer"
    patterns = [line for line in (tmp_path / "closer.txt").read_text().splitlines() if not line.startswith("#")]
    assert patterns == [
        "phase:forward",
        "phase:backward",
        "mlp.fc1/functional.linear.0",
        "mlp/functional.gelu.0",
        "mlp.fc2/functional.linear.1",
    ]


def test_quiet_prints_the_commands_alone(tmp_path: Path) -> None:
    for name, scale in (("good", 1.0), ("bad", 1.01)):
        write_run(tmp_path / name, keep="statistics", scale=scale)
    result = refine(tmp_path / "bad", tmp_path / "good", "--into", tmp_path / "there.txt", "--quiet")
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["ulpscope", "run"]] * 2
    assert f"@{tmp_path / 'there.txt'}" in result.stdout


def test_where_nothing_is_open_no_file_is_written(runs: Path, tmp_path: Path) -> None:
    result = refine(runs / "same", runs / "good", "--into", tmp_path / "closer.txt")
    assert (result.exit_code, result.stdout) == (0, "nothing to record again: the runs agree bitwise\n")
    result = refine(runs / "bad", runs / "good", "--into", tmp_path / "closer.txt")
    assert result.stdout.startswith("nothing to record again: both runs keep the values already: first contributed error: mlp  gelu")
    assert not (tmp_path / "closer.txt").exists()


def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    result = refine("missing", "missing", "--into", tmp_path / "no" / "closer.txt")
    assert result.exit_code == 2
    assert "does not exist; create it first" in result.stderr
