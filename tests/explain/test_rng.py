# SPDX-License-Identifier: Apache-2.0
"""Random calls: another stream is a note, other settings and other distributions are faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.explain.programs import compared, views_of
from tests.match.building import Recorder
from ulpscope.explain.rng import explain_rng, remark_on_draws
from ulpscope.store import MemoryRun
from ulpscope.workflows.comparing import compare_runs


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_another_stream_is_a_note(keep: str) -> None:
    comparison = compared({"seed": 1}, {"seed": 2}, mode="*dropout", keep=keep)
    assert comparison.faults == ()
    [note] = [one for one in comparison.findings if one.kind == "rng"]
    assert note.headline == "other random numbers were drawn: first.drop  dropout (call 0, forward, output 0), step 0, rank 0"
    assert "seed 1 against 2" in note.evidence


@pytest.mark.parametrize("level", ["module", "both"])
def test_another_stream_inside_modules_is_a_note_too(level: str) -> None:
    comparison = compared({"seed": 1}, {"seed": 2}, mode="*dropout", level=level)
    assert comparison.faults == ()
    assert "rng" in {one.kind for one in comparison.findings}


def test_dropout_that_is_switched_off_on_one_side_is_a_fault() -> None:
    [found] = compared("*dropout evaluating", "*dropout").faults
    assert (found.level, found.kind, found.call) == ("fault", "arguments", "functional.dropout.0")
    assert "training: False against True" in found.evidence


@pytest.mark.parametrize("share", [0.3, 0.33, 0.6])
def test_numbers_of_another_distribution_are_a_fault(share: float) -> None:
    """The arguments agree; what the kernel does with them does not."""
    views = views_of(compare_runs(dropped(share, seed=1), dropped(0.3, seed=2), replay="none"))
    found = explain_rng(views[0])
    if share < 0.4:
        assert (found, len(remark_on_draws(views))) == (None, 1)
    else:
        assert found is not None
        assert (found.level, found.kind, found.call) == ("fault", "rng", "functional.dropout.0")
        assert any(line.startswith("zeros: ") for line in found.evidence)


def dropped(share: float, seed: int) -> MemoryRun:
    run = MemoryRun()
    recorder = Recorder(run, 0, "tensors", lambda where, value: value)
    recorder.begin(0)
    x = np.linspace(1, 2, 1000, dtype="f4")
    mask = np.random.default_rng(seed).random(x.shape) >= share
    recorder.write("forward", "drop", "functional.dropout", {"input.0": x, "output.0": (x * mask / np.float32(1 - share)).astype("f4")})
    recorder.sink.close()
    return run


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"autocast": True}])
def test_a_dropout_of_nothing_in_another_precision_draws_nothing(options: dict[str, Any]) -> None:
    subject = {name: getattr(torch, value) if name == "dtype" else value for name, value in options.items()}
    views = views_of(compared(subject, {}))
    assert [explain_rng(view) for view in views] == [None] * 3
    assert remark_on_draws(views) == []
