# SPDX-License-Identifier: Apache-2.0
"""The committed runs of `tests/mindspore_runs/recorded` are what these programs record today, but for the last bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mindspore_live.examples import EXAMPLES, ROWS
from ulpscope.model import CallRecord, Run
from ulpscope.store import open_run

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "mindspore_runs" / "recorded"


def made_again(program: str, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", f"tests.mindspore_live.{program}", str(folder)], cwd=ROOT, check=True, timeout=300, capture_output=True
    )
    return folder


def facts(record: CallRecord) -> Any:
    slots = [(slot.slot, slot.dtype, slot.shape, slot.requires_grad) for slot in record.slots]
    return record.call, record.phase, record.module, record.recorded_as, record.arguments, slots


def assert_alike(ours: Run, theirs: Run) -> None:
    assert ours.steps(0) == theirs.steps(0)
    for step in ours.steps(0):
        pairs = list(zip(ours.records(0, step), theirs.records(0, step), strict=True))
        assert len(pairs) > 50
        for one, other in pairs:
            assert facts(one) == facts(other)
            if "dropout" in one.call.op:
                continue
            for slot, there in zip(one.slots, other.slots, strict=True):
                found, expected = ours.tensor(0, step, str(slot.content)), theirs.tensor(0, step, str(there.content))
                values = [np.frombuffer(data.buffer, data.dtype).astype(np.float64) for data in (found, expected)]
                np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5, err_msg=f"{one.name} {slot.slot}")


@pytest.mark.parametrize(("program", "run"), [("record_names", "names/run"), ("record_transformer", "transformer")])
def test_a_committed_run_is_what_is_recorded_today(program: str, run: str, tmp_path: Path) -> None:
    folder = made_again(program, tmp_path / "made")
    assert_alike(open_run(folder / "run" if program == "record_names" else folder), open_run(RECORDED / run))
    if program == "record_names":
        lacking = [set(json.loads((place / "missing.json").read_text())) for place in (folder, RECORDED / "names")]
        assert lacking[0] == lacking[1]


def test_every_example_is_one_of_a_row() -> None:
    assert {line.split(": ", 1)[0] for line in EXAMPLES.splitlines() if line} <= set(ROWS)
