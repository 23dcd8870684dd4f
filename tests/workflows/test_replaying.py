# SPDX-License-Identifier: Apache-2.0
"""Test which calls of a comparison are run again, what it says when they are not, and what a repeat of the reference excuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.explain.programs import recorded
from ulpscope import Capture, Comparison, compare_runs


class Spoiling(TorchDispatchMode):
    """A machine whose softplus is off by a factor, or whose products are noisy."""

    def __init__(self, slope: float, noise: float) -> None:
        super().__init__()
        self.slope, self.noise = slope, noise
        self.generator = torch.Generator().manual_seed(int(noise * 1e9))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.softplus.default:
            return result * self.slope
        if func is torch.ops.aten.addmm.default and self.noise:
            return result * (1 + self.noise * torch.randn(result.shape, generator=self.generator))
        return result


def record(into: Path, *, slope: float = 1.0, noise: float = 0.0, nudge: float = 0.0) -> Path:
    """Two steps of a tiny model, forward only."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Softplus(), torch.nn.Linear(32, 16))
    batch = torch.randn(64, 16) * (1 + nudge)
    with torch.no_grad(), Capture(into, model=model, keep="tensors") as capture:
        for _ in range(2):
            with Spoiling(slope, noise):
                F.mse_loss(model(batch), batch)
            capture.step()
    return into


def notes(comparison: Comparison) -> str:
    return "\n".join(finding.headline for finding in comparison.findings if finding.kind == "coverage")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return record(folder / "subject", slope=1.0001, nudge=1e-6), record(folder / "reference")


def test_the_culprit_errs_by_its_own_inputs(runs: tuple[Path, Path]) -> None:
    [fault] = compare_runs(*runs).faults
    assert fault.call == "functional.softplus.0"
    assert "the subject errs" in fault.evidence[0]
    assert any("times the exact ones" in line for line in fault.evidence)


def test_all_goes_on_after_the_cause(runs: tuple[Path, Path]) -> None:
    needed, everything = (compare_runs(*runs, replay=mode) for mode in ("needed", "all"))
    count = [sum(slot.subject is not None for call in one.calls for slot in call.slots) for one in (needed, everything)]
    assert 0 < count[0] < count[1]
    assert [fault.headline for fault in needed.faults] == [fault.headline for fault in everything.faults]


def test_what_is_not_run_again_is_said(runs: tuple[Path, Path]) -> None:
    assert "replay is switched off" in notes(compare_runs(*runs, replay="none"))
    assert "replay stopped after 0 s" in notes(compare_runs(*runs, replay_seconds=0.0))


def test_a_repeat_excuses_what_the_reference_does_not_repeat(tmp_path: Path) -> None:
    subject, reference, repeat = (record(tmp_path / name, noise=size) for name, size in (("s", 3e-5), ("r", 2e-5), ("again", 2.5e-5)))
    assert compare_runs(subject, reference, replay="none").faults
    excused = compare_runs(subject, reference, replay="none", repeat=repeat)
    assert excused.faults == ()
    assert "nondeterministic" in {finding.kind for finding in excused.findings}


class Scaled(TorchDispatchMode):
    """A kernel that errs by a factor, rounded as its dtype asks."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return (result.double() * self.factor).to(result.dtype) if func is torch.ops.aten.tanh.default else result


@pytest.mark.parametrize("factor", [0.9972, 1.006])
def test_a_scale_error_within_the_rounding_of_bfloat16_is_replayed_by_default(factor: float) -> None:
    def program(done: Callable[[], None], mode: str) -> None:
        torch.manual_seed(0)
        with Scaled(factor) if mode else contextlib.nullcontext():
            torch.randn(64, 64).to(torch.bfloat16).sin().tanh().cos()
        done()

    honest, wrong = recorded(program=program), recorded("scaled", program=program)
    fault = compare_runs(wrong, honest).faults[0]
    assert (fault.kind, fault.call) == ("contributed", "Tensor.tanh.0")
    assert any("times the exact ones" in line for line in fault.evidence)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        (lambda x, is_other: torch.bucketize(x, torch.tensor([1.0, 2.0, 4.0]), right=is_other), "torch.bucketize.0"),
        (
            lambda x, is_other: torch.searchsorted(torch.tensor([1.0, 2.0, 4.0]), x, side="right" if is_other else "left"),
            "torch.searchsorted.0",
        ),
        (lambda x, is_other: torch.isclose(x, x + 1, rtol=0, atol=1 if is_other else 0), "torch.isclose.0"),
    ],
)
def test_another_argument_is_no_near_tie(op: Callable[[torch.Tensor, bool], torch.Tensor], call: str) -> None:
    """On equal inputs nothing was rounded: only the argument makes integers differ, also where every element lies on an edge."""

    def program(done: Callable[[], None], mode: str) -> None:
        places = op(torch.arange(6.0), bool(mode)).long()
        torch.arange(8.0).reshape(4, 2)[places].sum(0)
        done()

    comparison = compare_runs(recorded("other", program=program), recorded(program=program))
    assert [(fault.kind, fault.call) for fault in comparison.faults] == [("arguments", call)]


def test_numbers_that_each_side_computed_may_tip_a_near_tie() -> None:
    def program(done: Callable[[], None], mode: str) -> None:
        (torch.arange(6.0) / 10 >= (0.30000001 if mode else 0.3000001)).sum()
        done()

    comparison = compare_runs(recorded("other", program=program), recorded(program=program))
    assert next(finding.kind for finding in comparison.findings if finding.level == "note") == "fork"
    assert not comparison.faults
