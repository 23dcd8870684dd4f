# SPDX-License-Identifier: Apache-2.0
"""Whatever a program computes, it computes bitwise the same while it is recorded, at every level."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

import ulpscope.mindspore
from tests.mindspore_live.programs import PROGRAMS
from ulpscope.store import MemoryRun


def bare(name: str) -> list[bytes]:
    ms.set_seed(3)
    ms.manual_seed(3)
    np.random.seed(3)
    return PROGRAMS[name](lambda: None)


def recorded(name: str, level: str, keep: str) -> tuple[list[bytes], MemoryRun]:
    ms.set_seed(3)
    ms.manual_seed(3)
    np.random.seed(3)
    run = MemoryRun()
    with ulpscope.mindspore.Capture.into_sink(run.sink, level=level, keep=keep) as capture:
        return PROGRAMS[name](capture.step), run


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_that_a_program_computes_changes(name: str) -> None:
    expected = bare(name)
    assert expected == bare(name), "a program that differs from itself shows nothing"
    for level, keep in (("api", "statistics"), ("module", "fingerprint"), ("both", "tensors")):
        found, run = recorded(name, level, keep)
        assert found == expected, (level, keep)
        failures = [entry for entry in run.ledger(0) if entry.what.startswith("record")]
        assert failures == [], level
    assert sum(record.phase == "forward" for step in run.steps(0) for record in run.records(0, step)) >= 3
    assert bare(name) == expected
