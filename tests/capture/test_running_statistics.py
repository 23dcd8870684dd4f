# SPDX-License-Identifier: Apache-2.0
"""Calls write running statistics although their schema denies it: records show the values that the buffers really have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ulpscope import Capture, open_run
from ulpscope.model import CallRecord


@pytest.mark.parametrize("module", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_what_training_writes_is_a_result_and_what_evaluation_reads(tmp_path: Path, module: Any) -> None:
    module.reset_running_stats()
    seen = []
    with Capture(tmp_path / "run", model=module, keep="tensors") as capture:
        for _ in range(2):
            module.train()(torch.randn(8, 4, 3))
            seen.append(module.running_mean.clone())
            module.eval()(torch.randn(8, 4, 3))
        capture.step()
    run = open_run(tmp_path / "run")
    calls = [one for one in run.records(0, 0) if "norm" in one.call.op and one.phase == "forward"]

    def values(call: CallRecord, role: str) -> torch.Tensor:
        slot = next(one for one in call.slots if one.slot.role == role and one.slot.path[0] in (1, "running_mean"))
        return torch.frombuffer(bytearray(run.tensor(0, 0, slot.content or "").buffer), dtype=torch.float32)

    assert [sum(slot.slot.role == "mutated" for slot in call.slots) for call in calls] == [2, 0, 2, 0]
    for number, mean in enumerate(seen):
        trained, evaluated = calls[2 * number : 2 * number + 2]
        assert torch.equal(values(trained, "mutated"), mean)
        assert torch.equal(values(evaluated, "input"), mean)


def test_an_operator_writes_them_as_well(tmp_path: Path) -> None:
    module = nn.BatchNorm1d(4)
    with Capture(tmp_path / "run", model=module, keep="statistics", level="op") as capture:
        module(torch.randn(8, 4))
        capture.step()
    written = [slot for one in open_run(tmp_path / "run").records(0, 0) for slot in one.slots if slot.slot.role == "mutated"]
    assert any(slot.summary is not None and slot.summary.mean == pytest.approx(float(module.running_var.mean())) for slot in written)
