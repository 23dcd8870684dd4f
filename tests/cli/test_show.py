# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import write_run
from tests.cli.test_group import ulpscope_command
from ulpscope.cli import cli


def show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["show", *map(str, arguments)])


def test_the_overview(runs: Path) -> None:
    result = show(runs / "good")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{runs / 'good'}: ulpscope run, format 1"
    assert "  steps       0-1" in lines
    assert "  complete    yes" in lines
    assert "  ledger      empty: everything asked for was recorded" in lines
    assert any(line.startswith("  size        ") and "bytes" not in line for line in lines)
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["call", "phase", "slot", "dtype", "shape", "min", "max", "mean", "rms", "nonfinite"]
    assert table[1] == "rank 0, step 0"
    assert table[2].split()[:6] == ["mlp.fc1/functional.linear.0", "forward", "input.0", "float32", "[16,", "32]"]
    assert table[10] == "rank 0, step 1"
    assert len(table) == 1 + 2 * (1 + 8)


@pytest.mark.parametrize("glob", ["mlp*gelu.0", "mlp/functional.gelu.0", "functional.gelu.*", "gelu", "*gelu*"])
def test_a_glob_shows_details(glob: str, runs: Path) -> None:
    result = show(runs / "good", glob)
    assert result.exit_code == 0
    assert [line for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        "mlp/functional.gelu.0  forward, step 0, rank 0, order 1",
        "mlp/functional.gelu.0  forward, step 1, rank 0, order 1",
    ]
    assert "  train.py:41 in forward: x = functional.gelu(x)\n" in result.stdout
    assert "u1:" in result.stdout


def test_a_module_glob_takes_everything_below(runs: Path) -> None:
    result = show(runs / "good", "mlp*", "--step", "0")
    assert [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        "mlp.fc1/functional.linear.0",
        "mlp/functional.gelu.0",
        "mlp.fc2/functional.linear.1",
    ]


def test_stacks_and_arguments_when_asked_for(runs: Path) -> None:
    result = show(runs / "good", "gelu", "--step", "0", "--stacks", "--arguments")
    assert "  arguments: gelu(input.0)\n" in result.stdout
    assert "    train.py:88 in main: loss = model(x)\n" in result.stdout


def test_the_values_of_a_tensor(runs: Path) -> None:
    result = show(runs / "good", "gelu", "--step", "0", "--tensor", "output.0")
    assert result.stdout.count("\n  [[") == 1
    assert "..." in result.stdout
    assert "there is no slot output.7; this call has input.0, output.0" in show(runs / "good", "gelu", "--tensor", "output.7").stdout


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [(["nosuch*"], "glob nosuch*"), (["--step", "7"], "step 7"), (["--rank", "3"], "rank 3"), (["--phase", "backward"], "phase backward")],
)
def test_nothing_found_says_what_there_is(arguments: list[str], asked: str, runs: Path) -> None:
    result = show(runs / "good", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"is recorded for {asked}; it holds ranks 0, steps 0, 1, names such as 'mlp.fc1/functional.linear.0'" in result.stderr


def test_a_screenful_unless_all(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", steps=tuple(range(10)))
    assert "and 17 more calls: --all" in show(run).stdout
    assert len(show(run, "--all").stdout.splitlines()) > 80
    assert "and 12 more: --all, or a narrower glob" in show(run, "*linear*").stdout
    assert "more" not in show(run, "*linear*", "--all").stdout


def test_a_step_that_was_cut_short_is_said_to_be(tmp_path: Path) -> None:
    run = write_run(tmp_path / "cut", is_whole=False)
    assert "  complete    no: step 1 of rank 0 was cut short\n" in show(run).stdout


def test_json_to_a_file_and_to_stdout(runs: Path, tmp_path: Path) -> None:
    assert show(runs / "good", "gelu", "--json", tmp_path / "run.json").stdout == ""
    in_file = json.loads((tmp_path / "run.json").read_text())
    assert in_file == json.loads(show(runs / "good", "gelu", "--json", "-").stdout)
    assert [record["step"] for record in in_file["records"]] == [0, 1]
    assert in_file["ranks"][0]["steps"] == [{"step": 0, "complete": True}, {"step": 1, "complete": True}]


@pytest.mark.parametrize("options", [("--all",), ("--json", "-")])
def test_a_pipe_that_closes_is_no_accident(options: tuple[str, ...], runs: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ulpscope", "show", str(runs / "good"), *options]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_that_cannot_spell_gets_escapes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "größe")
    done = ulpscope_command("show", "größe", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert run.name == "größe"
    assert done.returncode == 0
    assert done.stdout.startswith("gr\\xf6\\xdfe: ulpscope run")


def test_showing_needs_no_torch(runs: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from ulpscope.cli import cli; cli()"
    done = subprocess.run([sys.executable, "-c", code, "show", str(runs / "good")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
