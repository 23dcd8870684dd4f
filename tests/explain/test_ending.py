# SPDX-License-Identifier: Apache-2.0
"""Buffers that differ at the end of a step are results of it: a fault, unless something before explains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ulpscope
from ulpscope.model import Comparison


class Average(nn.Module):
    """Keeps a running mean of what it sees, where no recorded call tells."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data[:] = (1 - self.momentum) * self.mean + self.momentum * x.detach().mean(0)
        return x * 1.0


def record(path: Path, *, momentum: float = 0.1, shift: float = 0.0, noise: float = 0.0, draws: int = 0, level: Any = "module") -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Average(momentum), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].momentum = momentum
    x = (torch.randn(16, 4) + 3) * (1 + noise) + shift
    with ulpscope.Capture(path, model, level=level) as capture:
        model(x).square().mean().backward()
        if draws:
            torch.rand(draws)
        capture.step()
    return path


def faults(comparison: Comparison) -> list[Any]:
    return [finding for finding in comparison.findings if finding.level == "fault"]


def test_another_momentum_is_a_fault_that_names_module_and_buffer(tmp_path: Path) -> None:
    comparison = ulpscope.compare_runs(record(tmp_path / "a", momentum=0.01), record(tmp_path / "b"))
    (fault,) = faults(comparison)
    assert (fault.kind, fault.phase, fault.call, fault.step) == ("parameters", "end", "state.end.0", 0)
    assert fault.module in ("1", "2")
    assert fault.slot in ("buffer.1.mean", "buffer.2.running_mean")
    assert any("running_var" in line and "buffer 1.mean" in line for line in fault.evidence)
    assert "momentum" in fault.next


def test_at_the_level_of_calls_the_call_is_to_blame(tmp_path: Path) -> None:
    comparison = ulpscope.compare_runs(record(tmp_path / "a", momentum=0.01, level="api"), record(tmp_path / "b", level="api"))
    (fault,) = faults(comparison)
    assert fault.kind == "arguments"
    assert fault.call.startswith(("Tensor.mul", "functional.batch_norm"))


@pytest.mark.parametrize("level", ["module", "api"])
@pytest.mark.parametrize("options", [{}, {"noise": 2.0**-22}], ids=["the same", "rounding"])
def test_what_the_inputs_explain_is_no_fault(options: Any, level: Any, tmp_path: Path) -> None:
    """The second normalisation sees means that are nothing but rounding, and so is what it keeps of them."""
    comparison = ulpscope.compare_runs(record(tmp_path / "a", level=level), record(tmp_path / "b", level=level, **options))
    assert [fault for fault in faults(comparison) if fault.phase == "end"] == []


def test_where_the_batch_differs_that_is_the_cause(tmp_path: Path) -> None:
    comparison = ulpscope.compare_runs(record(tmp_path / "a", shift=1.0), record(tmp_path / "b"))
    (fault,) = faults(comparison)
    assert fault.kind == "batch"


def test_generators_that_differ_only_at_the_end_are_told(tmp_path: Path) -> None:
    comparison = ulpscope.compare_runs(record(tmp_path / "a", draws=3), record(tmp_path / "b", draws=2))
    told = [finding.headline for finding in comparison.findings if finding.kind == "rng"]
    assert any("differ at the end of step 0" in headline and "torch" in headline for headline in told) or any(
        "drawn" in headline for headline in told
    )


class Counter(nn.Module):
    """Writes to a buffer in one of two programs, where no recorded call tells; a buffer with no other use."""

    def __init__(self, raised: str = "") -> None:
        super().__init__()
        self.raised = raised
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("other", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raised:
            self.get_buffer(self.raised).data.numpy()[:] += 1
        return self.linear(x)


def count_up(path: Path, raised: str = "", *, draws: int = 0, level: Any = "api") -> Path:
    torch.manual_seed(0)
    model = Counter(raised)
    with ulpscope.Capture(path, model, level=level, keep="tensors") as capture:
        model(torch.ones(3, 4)).square().sum().backward()
        if draws:
            torch.rand(draws)
        capture.step()
    return path


@pytest.mark.parametrize("level", ["api", "module", "op"])
@pytest.mark.parametrize("other", ["", "other"])
def test_a_buffer_that_only_one_side_writes_to_is_a_fault(other: str, level: Any, tmp_path: Path) -> None:
    """A run tells at the end of a step only what changed in it: what it does not tell stayed as it was."""
    raising, other_run = count_up(tmp_path / "a", "seen", level=level), count_up(tmp_path / "b", other, level=level)
    for sides in ((raising, other_run), (other_run, raising)):
        (fault,) = faults(ulpscope.compare_runs(*sides))
        assert (fault.kind, fault.phase) == ("parameters", "end")
        assert any("leaves it as it was" in line for line in fault.evidence)


@pytest.mark.parametrize("level", ["api", "module"])
def test_generators_that_only_one_side_uses_are_a_fault(level: Any, tmp_path: Path) -> None:
    """Nothing else differs; the next dropout will."""
    comparison = ulpscope.compare_runs(count_up(tmp_path / "a", draws=2, level=level), count_up(tmp_path / "b", level=level))
    (fault,) = faults(comparison)
    assert (fault.kind, fault.headline) == ("rng", "random generators differ at the end of step 0, rank 0: torch")
    drawn = "only the subject calls rand" if level == "api" else "no recorded call drew on one side only"
    assert any(drawn in line for line in fault.evidence)


def test_a_fault_of_a_later_step_is_told_before_generators_that_lead_to_nothing(tmp_path: Path) -> None:
    def run(into: Path, *, is_other: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        with ulpscope.Capture(into, model, keep="tensors") as capture:
            for step in range(2):
                model(torch.ones(3, 4)).mul(2 if is_other and step == 1 else 1).sum().backward()
                if is_other and step == 0:
                    torch.rand(2)
                capture.step()
        return into

    (fault,) = faults(ulpscope.compare_runs(run(tmp_path / "a", is_other=True), run(tmp_path / "b", is_other=False)))
    assert (fault.kind, fault.step) == ("arguments", 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_generators_that_draws_in_another_dtype_leave_otherwise_are_no_fault(dtype: torch.dtype, tmp_path: Path) -> None:
    def run(into: Path, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        with ulpscope.Capture(into, keep="tensors") as capture:
            for _ in range(3):
                torch.rand(5000, dtype=dtype).cos().max()
                capture.step()
        return into

    comparison = ulpscope.compare_runs(run(tmp_path / "a", dtype), run(tmp_path / "b", torch.float32))
    assert (faults(comparison), comparison.verdict) == ([], "unknown" if dtype == torch.float64 else "rounding")


class Normalised(nn.Module):
    """The bias before a normalisation has a gradient of pure rounding, by which Adam moves it a whole learning rate."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = (x[:, None] * self.linear.weight).sum(-1) + self.linear.bias if self.by_hand else self.linear(x)
        out: torch.Tensor = self.norm(made)
        return out


def _trained(into: Path, *, by_hand: bool) -> Path:
    torch.manual_seed(0)
    model = Normalised(by_hand=by_hand)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with ulpscope.Capture(into, model, optimizer=optimizer, keep="tensors") as capture:
        for _ in range(3):
            model(torch.randn(24, 16)).square().softmax(-1)[:, 0].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return into


def test_what_an_honest_step_left_in_a_buffer_is_honest_at_the_start_of_the_next(tmp_path: Path) -> None:
    comparison = ulpscope.compare_runs(_trained(tmp_path / "a", by_hand=True), _trained(tmp_path / "b", by_hand=False))
    assert faults(comparison) == []
    starts = [call for call in comparison.calls if call.pair.record.call.op == "state.parameters"]
    assert [call.level for call in starts] == ["same", "rounding", "rounding"]
