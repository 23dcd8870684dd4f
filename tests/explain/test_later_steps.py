# SPDX-License-Identifier: Apache-2.0
"""Parameters that a fault of an earlier step moved contribute nothing of their own: they are inherited."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ulpscope import Capture, compare_runs
from ulpscope.report.comparison.counts import count_calls, count_states


class Net(nn.Module):
    """Two layers and one of two gelus between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor, approximate: str) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x), approximate=approximate))
        return out


def _record(into: Path, approximate: str) -> Path:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Capture(into, model=model, optimizer=optimizer, keep="tensors") as capture:
        for step in range(3):
            kind = approximate if step == 0 else "none"
            model(torch.randn(16, 32), kind).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return into


def test_parameters_that_an_earlier_fault_moved_are_inherited(tmp_path: Path) -> None:
    comparison = compare_runs(_record(tmp_path / "a", "tanh"), _record(tmp_path / "b", "none"))
    [fault] = comparison.faults
    assert (fault.step, fault.call) == (0, "functional.gelu.0")
    parameters = [call for call in comparison.calls if call.pair.record.call.op == "state.parameters"]
    assert [(call.pair.record.step, call.level, call.contribution) for call in parameters] == [
        (0, "same", "clean"),
        (1, "differs", "inherited"),
        (2, "differs", "inherited"),
    ]
    assert count_calls(comparison).contributed == 1
    assert count_states(comparison)["contributed"] == 1
