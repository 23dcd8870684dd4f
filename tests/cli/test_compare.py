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
    """Stands in for the workflow: remembers its question, and answers with a comparison at hand."""

    def __init__(self, answer: Comparison) -> None:
        self.answer = answer
        self.words: dict[str, Any] = {}

    def compare_runs(self, subject: Path, reference: Path, **words: Any) -> Comparison:
        self.words = {"subject": subject, "reference": reference, **words}
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked(sample_comparison())
    monkeypatch.setitem(sys.modules, "ulpscope.workflows.compare.comparing", SimpleNamespace(compare_runs=asked.compare_runs))
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
        "replay": "needed",
        "replay_seconds": 600.0,
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


def test_how_to_replay_is_handed_on(asked: Asked) -> None:
    compare("a", "b", "--replay", "all", "--replay-limit", "2.5", "--repeat", "c")
    assert (asked.words["replay"], asked.words["replay_seconds"], asked.words["repeat"]) == ("all", 2.5, Path("c"))
    assert compare("a", "b", "--replay", "some").exit_code == 2
    assert compare("a", "b", "--replay-limit", "-1").exit_code == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a"], "give the run to compare with: REFERENCE, or --baseline FILE"),
        (["a", "b", "--baseline", "f"], "give either REFERENCE or --baseline, not both"),
        (["a", "--baseline", "f", "--repeat", "c"], "--repeat is REFERENCE recorded once more, so it needs REFERENCE"),
        (["a", "b", "--update"], "--update writes a baseline, so it needs --baseline FILE"),
        (["a", "--baseline", "f", "--update", "--html", "h"], "--update judges nothing, so there is nothing to write for --html"),
        (["a", "--baseline", "f", "--update", "--repro", "r"], "--update judges nothing, so there is nothing to write for --repro"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(words: list[str], sentence: str, asked: Asked) -> None:
    result = compare(*words)
    assert (result.exit_code, result.stdout, asked.words) == (2, "", {})
    assert f"Error: {sentence}" in result.stderr


def test_quiet_says_nothing(asked: Asked) -> None:
    result = compare("a", "b", "--quiet")
    assert (result.exit_code, result.output) == (1, "")


def test_every_report_is_written(asked: Asked, tmp_path: Path) -> None:
    kinds = ("json", "html", "csv", "xlsx", "parquet", "junit")
    options = [word for kind in kinds for word in (f"--{kind}", tmp_path / f"report.{kind}")]
    assert compare("a", "b", *options, "--github-summary", tmp_path / "report.md").exit_code == 1
    num_rows = sum(len(call.slots) for call in asked.answer.calls)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "diverges"
    assert "<html" in (tmp_path / "report.html").read_text()
    assert len((tmp_path / "report.csv").read_text().splitlines()) == num_rows + 1
    assert openpyxl.load_workbook(tmp_path / "report.xlsx").worksheets[0].max_row == num_rows + 1
    assert pyarrow.parquet.read_table(tmp_path / "report.parquet").num_rows == num_rows
    assert "<testcase" in (tmp_path / "report.junit").read_text()
    assert "diverges" in (tmp_path / "report.md").read_text()
    assert len(list(tmp_path.iterdir())) == 7


def test_json_on_stdout_is_nothing_but_json(asked: Asked) -> None:
    result = compare("a", "b", "--json", "-")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["pairs"]) == sum(len(call.slots) for call in asked.answer.calls)


@pytest.mark.parametrize("kind", ["json", "html", "csv", "xlsx", "parquet", "junit"])
def test_a_place_that_cannot_be_written_is_said_before_the_work(kind: str, asked: Asked, tmp_path: Path) -> None:
    result = compare("a", "b", f"--{kind}", tmp_path / "missing" / "report")
    assert result.exit_code == 2
    assert "does not exist; create it first" in result.stderr
    assert asked.words == {}


@pytest.mark.parametrize(
    ("kind", "module", "extra"), [("xlsx", "xlsxwriter", "xlsx"), ("parquet", "pyarrow", "parquet"), ("repro", "torch", "torch")]
)
def test_a_missing_package_is_said_before_the_work(
    kind: str, module: str, extra: str, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ulpscope.workflows.compare.driver.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, module, None)
    result = compare("a", "b", f"--{kind}", tmp_path / "report")
    assert result.exit_code == 2
    assert f"pip install 'ulpscope[{extra}]'" in result.stderr
    assert asked.words == {}


def test_without_torch_there_is_an_answer_and_no_repro(runs: Path, tmp_path: Path) -> None:
    hidden = (
        "import importlib.util as u; found = u.find_spec; u.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest)"
    )
    code = f"import sys; sys.modules['torch'] = None; {hidden}; from ulpscope.cli import cli; cli()"
    words = ["compare", runs / "bad", runs / "good", "--html", tmp_path / "page.html"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert "mlp  gelu (call 0, forward, output 0)" in done.stdout
    assert not (tmp_path / "page_repro").exists()


def test_two_real_runs_name_the_culprit(runs: Path, tmp_path: Path) -> None:
    done = ulpscope_command("compare", runs / "bad", runs / "good", "--json", "report.json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    first = json.loads((tmp_path / "report.json").read_text())["findings"][0]
    assert (first["level"], first["module"], first["call"], first["step"]) == ("fault", "mlp", "functional.gelu.0", 0)
    assert first["source"]["line"] == 41
    assert "gelu" in done.stdout
    assert "train.py:41 in forward: x = functional.gelu(x)" in done.stdout


def test_a_repro_goes_beside_the_page_or_where_it_is_asked_for(runs: Path, tmp_path: Path) -> None:
    result = compare(runs / "bad", runs / "good", "--html", tmp_path / "page.html", "--json", tmp_path / "report.json")
    script = tmp_path / "page_repro" / "gelu_0.py"
    assert f"  repro: {script}\n" in result.stdout
    assert json.loads((tmp_path / "report.json").read_text())["findings"][0]["repro"] == str(script)
    assert f"repro: {script}" in (tmp_path / "page.html").read_text()
    assert subprocess.run([sys.executable, script], capture_output=True).returncode == 1
    assert "repro: " not in compare(runs / "bad", runs / "good").stdout
    assert f"repro: {tmp_path / 'there' / 'gelu_0.py'}" in compare(runs / "bad", runs / "good", "--repro", tmp_path / "there").stdout
    assert compare(runs / "same", runs / "good", "--repro", tmp_path / "none").exit_code == 0
    assert not (tmp_path / "none").exists()


def test_why_there_is_no_repro_is_said_where_one_was_asked_for(tmp_path: Path) -> None:
    for name, scale in (("good", 1.0), ("bad", 1.01)):
        write_run(tmp_path / name, scale=scale, keep="statistics")
    sides = (tmp_path / "bad", tmp_path / "good")
    assert "no repro: the values of input.0 were not kept" in compare(*sides, "--repro", tmp_path / "r").stdout
    assert "no repro" not in compare(*sides, "--html", tmp_path / "page.html").stdout


def test_two_equal_runs_are_exit_code_0(runs: Path) -> None:
    done = ulpscope_command("compare", runs / "same", runs / "good")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("same: ")


def test_bits_that_differ_by_an_unknown_amount_are_exit_code_2(tmp_path: Path) -> None:
    for name, scale in (("good", 1.0), ("same", 1.0), ("bad", 1.01)):
        write_run(tmp_path / name, scale=scale, keep="fingerprint")
    done = ulpscope_command("compare", "bad", "good", "--html", "report.html", "--json", "report.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("unknown: 6 of 16 slots were not compared (6 slots: other bits, and nothing tells by how much, first ")
    assert ": bad against good, 6 calls compared, no fault, but something differs bitwise" in done.stdout
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
    assert "about 11 significant bits" in done.stdout
    assert ulpscope_command("compare", "cpu", "cpu", cwd=tmp_path).stdout.startswith("same: ")


@pytest.mark.parametrize("paths", [("good", "missing"), ("missing", "good"), ("good", ".")])
def test_what_is_no_run_is_one_sentence(paths: tuple[str, str], runs: Path) -> None:
    done = ulpscope_command("compare", *paths, cwd=runs)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ulpscope: ")
    assert done.stderr.count("\n") == 1


def test_a_terminal_sees_colours_and_a_pipe_does_not(runs: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "ulpscope", "compare", str(runs / "bad"), str(runs / "good"), "--replay", "none"]
    assert b"\x1b[1;31mdiverges" in on_a_terminal(command, environment)
    assert b"\x1b[1;31m" not in on_a_terminal(command, environment | {"NO_COLOR": "1"})
    assert "\x1b" not in ulpscope_command(*command[3:], env={"TERM": "xterm-256color"}).stdout


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
    """Return everything that the command writes to a terminal."""
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
