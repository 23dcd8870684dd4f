# SPDX-License-Identifier: Apache-2.0
"""Programs that compute the same in another way are no fault where everything agrees in the end, and are where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ulpscope import Capture, compare_runs
from ulpscope.model import Comparison

Body = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def mean_of_squares(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


def record(into: Path, body: Body, loss: Loss = F.cross_entropy, *, keep: str = "tensors") -> Path:
    torch.manual_seed(0)
    first, last = nn.Linear(16, 32), nn.Linear(32, 8)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    with Capture(into, keep=keep) as capture:  # type: ignore[arg-type]
        for step in range(2):
            x = torch.linspace(-1, 1, 8 * 16).reshape(8, 16).sin() * (step + 1)
            loss(last(body(F.gelu(first(x)))), torch.arange(8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return into


def compared(tmp_path: Path, subject: Body, reference: Body, **options: object) -> Comparison:
    return compare_runs(record(tmp_path / "a", subject, **options), record(tmp_path / "b", reference, **options))  # type: ignore[arg-type]


SAME: dict[str, tuple[Body, Body]] = {
    "rsqrt": (lambda h: h * torch.rsqrt(mean_of_squares(h)), lambda h: h / torch.sqrt(mean_of_squares(h))),
    "subtracted the other way": (lambda h: 1 - h, lambda h: -(h - 1)),
    "logarithm": (lambda h: h.log_softmax(-1), lambda h: h.softmax(-1).log()),
    "mean by parts": (lambda h: h * h.view(8, 4, 8).mean((1, 2))[:, None], lambda h: h * h.view(8, 4, 8).mean(1).mean(1)[:, None]),
    "scaled before": (lambda h: (h @ h.t() * 0.25).softmax(-1) @ h, lambda h: ((h * 0.25) @ h.t()).softmax(-1) @ h),
    "another large number": (
        lambda h: h.masked_fill(torch.arange(32) > 20, -1e9).softmax(-1),
        lambda h: h.masked_fill(torch.arange(32) > 20, torch.finfo(h.dtype).min).softmax(-1),
    ),
    "padding": (lambda h: F.pad(h, (0, 0, 0, 4)).tanh()[:8], lambda h: F.pad(h, (0, 0, 0, 8)).tanh()[:8]),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_mathematics_is_a_note(name: str, tmp_path: Path) -> None:
    comparison = compared(tmp_path, *SAME[name])
    assert (comparison.verdict, comparison.coverage.is_whole) == ("rounding", True)
    assert any(finding.kind in ("arguments", "calls") for finding in comparison.findings)


def test_a_loss_that_is_averaged_by_hand_is_a_note(tmp_path: Path) -> None:
    by_hand = record(tmp_path / "a", torch.tanh, lambda y, t: F.cross_entropy(y, t, reduction="sum") / 8)
    assert compare_runs(by_hand, record(tmp_path / "b", torch.tanh)).verdict in ("same", "rounding")


OTHER: dict[str, tuple[Body, Body]] = {
    "epsilon": (lambda h: h * torch.rsqrt(mean_of_squares(h) + 1e-4), lambda h: h / torch.sqrt(mean_of_squares(h))),
    "a sign": (lambda h: 1 - h, lambda h: h - 1),
    "another part": (lambda h: F.pad(h, (0, 0, 0, 4)).tanh()[1:9], lambda h: F.pad(h, (0, 0, 0, 8)).tanh()[:8]),
    "a mask too small": (
        lambda h: h.masked_fill(torch.arange(32) > 20, -4.0).softmax(-1),
        lambda h: h.masked_fill(torch.arange(32) > 20, -1e9).softmax(-1),
    ),
    "another order of rows": (lambda h: h.roll(1, 0), lambda h: h.roll(2, 0)),
}


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize("name", OTHER)
def test_other_mathematics_is_a_fault(name: str, keep: str, tmp_path: Path) -> None:
    assert compared(tmp_path, *OTHER[name], keep=keep).verdict == "diverges"


def test_a_result_that_nothing_takes_is_not_excused(tmp_path: Path) -> None:
    def run(into: Path, *, is_root: bool) -> Path:
        with Capture(into, keep="tensors") as capture:
            x = torch.linspace(1, 2, 64)
            torch.sqrt(x) if is_root else torch.rsqrt(x)
            x.exp().sum()
            capture.step()
        return into

    assert compare_runs(run(tmp_path / "a", is_root=True), run(tmp_path / "b", is_root=False)).verdict == "diverges"
