# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openpyxl
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import write_run
from tests.cli.test_group import ulpscope_command
from tests.report.sample import sample_comparison
from ulpscope.cli import cli
from ulpscope.model import Comparison
from ulpscope.testing import demo


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


class Asked:
    """Stands in for the workflow: remembers what it was asked, answers with a comparison at hand."""

    def __init__(self, answer: Comparison) -> None:
        self.answer = answer
        self.words: dict[str, Any] = {}

    def compare_runs(self, subject: Path, reference: Path, **words: Any) -> Comparison:
        self.words = {"subject": subject, "reference": reference, **words}
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked(sample_comparison())
    monkeypatch.setitem(sys.modules, "ulpscope.workflows.comparing", SimpleNamespace(compare_runs=asked.compare_runs))
    return asked


def test_a_fault_is_exit_code_1(asked: Asked) -> None:
    result = compare("runs/npu", "runs/gpu")
    assert result.exit_code == 1
    assert result.stdout.startswith("diverges: runs/npu against runs/gpu")
    assert result.stderr == ""
    assert asked.words == {
        "subject": Path("runs/npu"),
        "reference": Path("runs/gpu"),
        "rules": "derived",
        "mapping": None,
        "progress": None,
    }


def test_notes_alone_are_exit_code_0(asked: Asked) -> None:
    asked.answer = replace(asked.answer, findings=asked.answer.findings[1:])
    result = compare("a", "b")
    assert result.exit_code == 0
    assert result.stdout.startswith("nothing diverges")


def test_rules_and_mapping_are_handed_on(asked: Asked) -> None:
    compare("a", "b", "--rules", "ptdbg", "--mapping", "names.txt")
    assert (asked.words["rules"], asked.words["mapping"]) == ("ptdbg", Path("names.txt"))
    assert compare("a", "b", "--rules", "folklore").exit_code == 2


def test_quiet_says_nothing(asked: Asked) -> None:
    result = compare("a", "b", "--quiet")
    assert (result.exit_code, result.output) == (1, "")


def test_every_report_is_written(asked: Asked, tmp_path: Path) -> None:
    options = [word for kind in ("json", "html", "csv", "xlsx", "parquet") for word in (f"--{kind}", tmp_path / f"report.{kind}")]
    assert compare("a", "b", *options).exit_code == 1
    num_rows = sum(len(call.slots) for call in asked.answer.calls)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "diverges"
    assert "<html" in (tmp_path / "report.html").read_text()
    assert len((tmp_path / "report.csv").read_text().splitlines()) == num_rows + 1
    assert openpyxl.load_workbook(tmp_path / "report.xlsx").worksheets[0].max_row == num_rows + 1
    assert pyarrow.parquet.read_table(tmp_path / "report.parquet").num_rows == num_rows
    assert len(list(tmp_path.iterdir())) == 5


def test_json_on_stdout_is_nothing_but_json(asked: Asked) -> None:
    result = compare("a", "b", "--json", "-")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["pairs"]) == sum(len(call.slots) for call in asked.answer.calls)


@pytest.mark.parametrize("kind", ["json", "html", "csv", "xlsx", "parquet"])
def test_a_place_that_cannot_be_written_is_said_before_the_work(kind: str, asked: Asked, tmp_path: Path) -> None:
    result = compare("a", "b", f"--{kind}", tmp_path / "missing" / "report")
    assert result.exit_code == 2
    assert "does not exist; create it first" in result.stderr
    assert asked.words == {}


@pytest.mark.parametrize(("kind", "module"), [("xlsx", "xlsxwriter"), ("parquet", "pyarrow")])
def test_a_missing_package_is_said_before_the_work(
    kind: str, module: str, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ulpscope.cli.compare.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, module, None)
    result = compare("a", "b", f"--{kind}", tmp_path / "report")
    assert result.exit_code == 2
    assert f"pip install 'ulpscope[{kind}]'" in result.stderr
    assert asked.words == {}


def test_two_real_runs_name_the_culprit(runs: Path, tmp_path: Path) -> None:
    done = ulpscope_command("compare", runs / "bad", runs / "good", "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    first = json.loads((tmp_path / "report.json").read_text())["findings"][0]
    assert (first["level"], first["module"], first["call"], first["step"]) == ("fault", "mlp", "functional.gelu.0", 0)
    assert first["source"]["line"] == 41
    assert "gelu" in done.stdout
    assert "train.py:41 in forward: x = functional.gelu(x)" in done.stdout


def test_two_equal_runs_are_exit_code_0(runs: Path) -> None:
    done = ulpscope_command("compare", runs / "same", runs / "good")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("same: ")


def test_bits_that_differ_by_an_unknown_amount_are_exit_code_2(tmp_path: Path) -> None:
    for name, scale in (("good", 1.0), ("same", 1.0), ("bad", 1.01)):
        write_run(tmp_path / name, scale=scale, keep="fingerprint")
    done = ulpscope_command("compare", "bad", "good", "--html", "report.html", "--json", "report.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("unknown: bad against good, 6 calls compared, no fault, but something differs bitwise")
    assert "first bitwise difference: mlp  gelu (call 0, forward, output 0), step 0, rank 0" in done.stdout
    assert "ulpscope run --into" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "unknown"
    assert ulpscope_command("compare", "same", "good", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_a_machine_of_reduced_precision_is_one_note_and_no_fault(keep: str, tmp_path: Path) -> None:
    """The demo's training on an emulated accelerator whose matrix unit has 10-bit mantissas, against the CPU."""
    script = Path(demo.__file__).with_name("train.py")
    for device in ("npu", "cpu"):
        words = ("run", "--into", device, "--keep", keep, "--steps", "0-1", "--seed", "1", script, "--device", device)
        assert ulpscope_command(*words, cwd=tmp_path, env={"ULPSCOPE_NPU_ARITHMETIC": "reduced", "OMP_NUM_THREADS": "1"}).returncode == 0
    done = ulpscope_command("compare", "npu", "cpu", "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "rounding"
    assert [finding["kind"] for finding in report["findings"]] == ["precision"]
    assert "about 11 significant bits (float16 or TF32 operands)" in done.stdout
    assert ulpscope_command("compare", "cpu", "cpu", cwd=tmp_path).stdout.startswith("same: ")


@pytest.mark.parametrize("paths", [("good", "missing"), ("missing", "good"), ("good", ".")])
def test_what_is_no_run_is_one_sentence(paths: tuple[str, str], runs: Path) -> None:
    done = ulpscope_command("compare", *paths, cwd=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ulpscope: ")
    assert done.stderr.count("\n") == 1


def test_a_terminal_sees_colours_and_a_pipe_does_not(runs: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "ulpscope", "compare", str(runs / "bad"), str(runs / "good")]
    assert b"\x1b[1;31mdiverges" in on_a_terminal(command, environment)
    assert b"\x1b[1;31m" not in on_a_terminal(command, environment | {"NO_COLOR": "1"})
    assert "\x1b" not in ulpscope_command("compare", runs / "bad", runs / "good", env={"TERM": "xterm-256color"}).stdout


@pytest.mark.parametrize(("patience", "is_shown"), [(-1, True), (1000, False)])
def test_a_bar_is_shown_for_long_work_only(patience: int, is_shown: bool) -> None:
    code = f"""
from ulpscope.cli import terminal
terminal._PATIENCE_S = {patience}
with terminal.showing_progress("comparing") as progress:
    progress(1, 2)
"""
    written = on_a_terminal([sys.executable, "-c", code], {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"})
    assert (b"comparing" in written, b"50%" in written) == (is_shown, is_shown)
    assert is_shown or written == b""


def on_a_terminal(command: list[str], environment: dict[str, str]) -> bytes:
    """Everything that the command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so when the last writer has left
            break
        if not part:
            break
        written += part
    os.close(ours)
    process.wait(timeout=60)
    return written
