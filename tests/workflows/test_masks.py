# SPDX-License-Identifier: Apache-2.0
"""Masks by the lowest number of a dtype: in each side's own dtype one argument, other numbers are not, infinity as values tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ulpscope import Capture, compare_runs
from ulpscope.model import Comparison

Lowest = Callable[[torch.dtype], float]


def lowest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).min)


def _filled(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    return scores.masked_fill(mask, value)


def _added(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    bias = torch.zeros_like(scores).masked_fill(mask, value)
    return scores + bias


def _multiplied(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    return scores + mask.to(scores.dtype) * value


def _made(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask, torch.full([], value, dtype=scores.dtype), scores)


def _biased(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    """Add a bias in float32 with the lowest number of autocast's dtype, as T5's position bias does."""
    return scores + torch.where(~mask, torch.ones(scores.shape), value).to(scores.dtype)


WAYS = {"biased": _biased, "filled": _filled, "added": _added, "multiplied": _multiplied, "made": _made}


class Attention(nn.Module):
    def __init__(self, way: str, value: Lowest, whole_rows: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 8)
        self.way, self.value, self.whole_rows = WAYS[way], value, whole_rows

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(x).chunk(3, -1)
        scores = query @ key.mT
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mask[: self.whole_rows] = True
        scores = self.way(scores, mask, self.value(scores.dtype))
        return self.last(scores.softmax(-1).to(value.dtype) @ value)  # type: ignore[no-any-return]


def _run(into: Path, way: str, value: Lowest, dtype: torch.dtype | None, keep: str = "tensors", whole_rows: int = 0) -> Path:
    torch.manual_seed(0)
    model = Attention(way, value, whole_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(into, model=model, optimizer=optimizer, keep=keep):
        with torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext():
            found = model(torch.randn(3, 6, 8))
        found.float().square().mean().backward()
        optimizer.step()
    return into


def _compared(folder: Path, way: str, ours: Lowest, theirs: Lowest, dtype: torch.dtype | None = None, **rest: int) -> Comparison:
    return compare_runs(_run(folder / "subject", way, ours, dtype, **rest), _run(folder / "reference", way, theirs, None, **rest))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_each_side_masks_with_the_lowest_number_of_its_own_dtype(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    assert _compared(tmp_path, way, lowest, lowest, dtype).faults == ()


@pytest.mark.parametrize("way", ["filled", pytest.param("added", marks=pytest.mark.long), pytest.param("made", marks=pytest.mark.long)])
@pytest.mark.parametrize("wrong", [-5.0, 65504.0, pytest.param(float(torch.finfo(torch.float32).tiny), marks=pytest.mark.long)])
def test_another_number_is_a_fault(tmp_path: Path, way: str, wrong: float) -> None:
    (fault,) = _compared(tmp_path, way, lambda dtype: wrong, lowest).faults
    assert fault.kind == "arguments"


@pytest.mark.parametrize("way", ["filled", "added", "made"])
def test_minus_infinity_masks_as_the_lowest_number_does(tmp_path: Path, way: str) -> None:
    comparison = _compared(tmp_path, way, lambda dtype: float("-inf"), lowest)
    assert comparison.faults == ()
    assert any(one.kind == "arguments" for one in comparison.findings)


@pytest.mark.parametrize("way", ["filled", "added"])
def test_it_does_not_where_a_row_is_masked_wholly(tmp_path: Path, way: str) -> None:
    (fault,) = _compared(tmp_path, way, lambda dtype: float("-inf"), lowest, whole_rows=1).faults
    assert (fault.kind, fault.call) == ("arguments", "Tensor.masked_fill.0")
