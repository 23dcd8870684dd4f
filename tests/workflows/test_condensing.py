# SPDX-License-Identifier: Apache-2.0
"""Long comparisons: the answer is that of a comparison that kept everything, and the tables hold every pair."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.synthetic import write_run

from ulpscope.model import Comparison
from ulpscope.report.comparison.counts import count_calls
from ulpscope.report.comparison.json_ import write_json
from ulpscope.report.comparison.rows import num_rows, pair_rows
from ulpscope.report.comparison.table import write_csv
from ulpscope.workflows.compare import condensing
from ulpscope.workflows.compare.comparing import compare_runs

STEPS, A_STEP = 12, 40


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a reference, the same with rounding, the same on two ranks, and one whose outputs leave it at step 6."""
    folder = tmp_path_factory.mktemp("runs")
    many = STEPS * A_STEP
    write_run(folder / "reference", records=many, steps=STEPS)
    write_run(folder / "rounding", records=many, steps=STEPS, off=1e-7)
    write_run(folder / "broken", records=many, steps=STEPS, off=1e-7, broken_from=6)
    for name, off in (("reference-2", 0.0), ("rounding-2", 1e-7)):
        write_run(folder / name, records=2 * many, steps=STEPS, ranks=2, off=off)
    return folder


def compared(runs: Path, subject: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> Comparison:
    monkeypatch.setattr(condensing.kept_calls, "__defaults__", (kept,))
    reference = "reference-2" if subject.endswith("-2") else "reference"
    return dataclasses.replace(compare_runs(runs / subject, runs / reference), elapsed_s=0.0)


@pytest.mark.parametrize("subject", ["reference", "rounding", "broken", "rounding-2"])
@pytest.mark.parametrize("kept", [0, 3 * A_STEP])
def test_condensing_changes_no_answer(runs: Path, subject: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compared(runs, subject, 10**9, monkeypatch)
    short = compared(runs, subject, kept, monkeypatch)
    assert whole.condensed is None
    assert short.condensed is not None
    assert len(short.calls) < len(whole.calls)
    assert (short.verdict, short.findings) == (whole.verdict, whole.findings)
    assert count_calls(short) == count_calls(whole)
    assert list(pair_rows(short)) == list(pair_rows(whole))
    assert num_rows(short) == num_rows(whole) == sum(1 for _ in pair_rows(whole))


def test_a_step_that_diverges_is_kept_with_the_one_before(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = compared(runs, "broken", 0, monkeypatch)
    assert short.verdict == "diverges"
    assert {5, 6} <= {call.pair.record.step for call in short.calls}
    assert short.condensed is not None
    assert set(short.condensed.steps) >= {0, 1, 8, 9}


def test_tables_hold_every_pair(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = compared(runs, "rounding", 0, monkeypatch)
    write_csv(short, tmp_path / "pairs.csv")
    write_json(short, tmp_path / "report.json")
    with (tmp_path / "pairs.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == sorted(steps)
    assert len(steps) == num_rows(short)
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["counts"]["calls"] == STEPS * A_STEP
    assert len(told["pairs"]) == num_rows(short)


def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    """Four times the steps must not need even twice the memory that the first quarter added."""
    peaks = []
    for steps in (1, 5, 20):
        for side, off in (("subject", 1e-7), ("reference", 0.0)):
            write_run(tmp_path / f"{steps}" / side, records=steps * 100, steps=steps, off=off)
        code = (
            "import resource, sys; from ulpscope.workflows.compare import comparing, condensing; "
            "condensing.kept_calls.__defaults__ = (200,); "
            "comparing.compare_runs(*sys.argv[1:], replay='none'); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        sides = [str(tmp_path / f"{steps}" / side) for side in ("subject", "reference")]
        done = subprocess.run([sys.executable, "-c", code, *sides], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[2] - peaks[1] < max(2 * (peaks[1] - peaks[0]), 4096)
