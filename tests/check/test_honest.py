# SPDX-License-Identifier: Apache-2.0
"""Honest calls that a check once failed, each with a wrong call beside it that it still has to fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ulpscope import Capture
from ulpscope.model import Slot
from ulpscope.model.check.checks import Check
from ulpscope.replay import backward_program
from ulpscope.replay.calls.arguments import read_tensor
from ulpscope.replay.draws.chance import IMPOSSIBLE
from ulpscope.replay.draws.expected import surprises
from ulpscope.store import open_run
from ulpscope.workflows.check.checking import check_run

FLOATING = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long), torch.float64)


def _weighted(value: torch.Tensor) -> torch.Tensor:
    """Compute a loss whose gradient is another number for each element."""
    return (value.double() * torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape).sin()).sum()


def _checked(into: Path, program: Callable[[], Any]) -> Check:
    torch.manual_seed(0)
    with Capture(into, keep="tensors") as capture:
        made = program()
        if made is not None:
            made.backward()
        capture.step()
    return check_run(into, isolated=False)


def _failures(check: Check) -> list[str]:
    assert check.counts["passed"] > 1
    return [f"{call.call} {call.phase}: {call.reason}" for call in check.failures]


# ---------------------------------------------------------------------------------------------- dropout and what follows


def _dropped_and_more(share: float) -> torch.Tensor:
    """Follow a dropout by an operation that gives no gradient where it gets a 0."""
    x = torch.randn(40, 50, requires_grad=True)
    alpha = F.alpha_dropout(x, share, True)
    made = [F.relu(F.dropout(x, share)), F.dropout2d(x[None, :, None], share).abs(), torch.native_dropout(x, share, True)[0].sign() * x]
    return torch.stack([_weighted(one) for one in (*made, F.relu(alpha), F.dropout(x * 1, share, True, True).square())]).sum()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95])
def test_a_dropout_whose_gradient_is_zero_where_it_dropped_is_honest(tmp_path: Path, share: float) -> None:
    assert not _failures(_checked(tmp_path / "run", lambda: _dropped_and_more(share)))


def test_a_gradient_that_was_dropped_otherwise_than_its_values_is_found(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", keep="tensors") as capture:
        x = torch.randn(30, 40, requires_grad=True)
        _weighted(F.dropout(x, 0.5)).backward()
        capture.step()
    run = open_run(tmp_path / "run")
    forward, backward = (
        next(one for one in run.records(0, 0) if one.call.short == "dropout" and one.phase == phase) for phase in ("forward", "backward")
    )

    def read(content: str) -> Any:
        return run.tensor(0, 0, content)

    program = backward_program(forward, backward, read)
    given = next(value for slot, value in program.inputs.items() if slot.role == "gradient")
    [own] = [slot for slot in backward.slots if slot.slot == Slot("output", (0,))]
    recorded = read_tensor(own, read)
    assert surprises(program, {own.slot: recorded}, is_recorded=True)[own.slot][0] == 0
    other = torch.where(torch.rand(given.shape) < 0.5, 0.0, given * 2)
    assert surprises(program, {own.slot: other}, is_recorded=True)[own.slot][0] == IMPOSSIBLE
    assert surprises(program, {own.slot: other})[own.slot][0] < IMPOSSIBLE  # drawn now it would be honest


# ---------------------------------------------------------------------------------------------- results made from results


def _cells() -> torch.Tensor:
    x = torch.randn(5, 6)
    hidden, _ = nn.LSTMCell(6, 4)(x)
    again, cell = nn.LSTMCell(6, 4)(x)
    return _weighted(hidden) + _weighted(again) + _weighted(cell)


def test_a_result_that_is_made_from_another_one_counts_once(tmp_path: Path) -> None:
    assert not _failures(_checked(tmp_path / "run", _cells))


# ---------------------------------------------------------------------------------------------- rounding that no noise shows


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_norms_over_one_element_or_equal_ones_are_honest_in_every_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    def program() -> torch.Tensor:
        one, scale, shift = (torch.randn(size).to(dtype).requires_grad_() for size in ((5, 1), (1,), (1,)))
        equal = torch.full((4, 6), 3.3, dtype=dtype, requires_grad=True)
        made = [
            F.layer_norm(one, (1,), scale, shift),
            F.layer_norm(one * 1e3, (1,)),
            F.group_norm(equal[None], 2),
            F.layer_norm(equal, (6,)),
        ]
        made += [
            F.batch_norm(equal, None, None, training=True),
            equal.std(1),
            F.instance_norm(equal[None]),
            F.layer_norm(equal * 300, (6,)),
        ]
        return torch.stack([_weighted(value) for value in made]).sum()

    assert not [text for text in _failures(_checked(tmp_path / "run", program)) if not _is_the_known_layer_norm(text)]


def _is_the_known_layer_norm(text: str) -> bool:
    """Tell whether it is torch's wrong CPU kernel (pytorch#188375): layer norm over one element, where only the shift has a gradient."""
    return "layer_norm" in text and "backward: output." in text and "output.bias" not in text


def test_a_kernel_that_is_coarser_than_float64_is_still_found(tmp_path: Path) -> None:
    """torch's CPU multiplies by a sixth in float32 there."""

    def program() -> torch.Tensor:
        return _weighted(F.hardsigmoid(torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)))

    leaf = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    [gradient] = torch.autograd.grad(F.hardsigmoid(leaf).sum(), leaf)
    is_coarse = bool((gradient - 1 / 6).abs().max() > 1e-12)
    assert bool(_failures(_checked(tmp_path / "run", program))) is is_coarse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_interpolation_rounds_where_a_pixel_lies(tmp_path: Path, dtype: torch.dtype) -> None:
    def program() -> torch.Tensor:
        x = torch.randn(2, 3, 8, 9).to(dtype).requires_grad_()
        sizes = [(5, 13), (3, 4)]
        made = [
            F.interpolate(x, size, mode=mode, align_corners=corners)
            for size in sizes
            for mode in ("bilinear", "bicubic")
            for corners in (False, True)
        ]
        made += [F.interpolate(x, scale_factor=1.7, mode="bicubic"), F.interpolate(x[0], 20, mode="linear")]
        return torch.stack([_weighted(value) for value in made]).sum()

    assert not _failures(_checked(tmp_path / "run", program))


# ---------------------------------------------------------------------------------------------- constants, limits and hidden rows


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_a_constant_that_is_rounded_once_is_no_change_of_scale(tmp_path: Path, dtype: torch.dtype) -> None:
    def program() -> torch.Tensor:
        x = torch.randn(2, 4, 9, 9).to(dtype).requires_grad_()
        causal = torch.ones(9, 9).tril().bool()
        masked = [x.masked_fill(~causal, -1e4), torch.where(causal, x, -1e4), torch.zeros(9, 9, dtype=dtype).masked_fill(~causal, -1e4)]
        return torch.stack([_weighted(one.softmax(-1)) for one in masked]).sum()

    assert not _failures(_checked(tmp_path / "run", program))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_an_attention_row_that_is_hidden_as_a_whole_is_honest(tmp_path: Path, dtype: torch.dtype) -> None:
    def program() -> torch.Tensor:
        query, key, value = (torch.randn(2, 4, 9, 8).to(dtype).requires_grad_() for _ in range(3))
        seen = torch.ones(9, 9).tril(-1).bool()
        made = [F.scaled_dot_product_attention(query, key, value, mask) for mask in (seen, seen & False)]
        return torch.stack([_weighted(one) for one in made]).sum()

    assert not _failures(_checked(tmp_path / "run", program))


def test_the_rank_of_a_matrix_is_that_of_its_own_precision(tmp_path: Path) -> None:
    """Least squares by singular values: the rank that the default driver finds hangs on memory (pytorch/pytorch#187411)."""

    def program() -> None:
        low = torch.randn(5, 2) @ torch.randn(2, 5)
        for matrix in (low, torch.diag(torch.tensor([1.0, 1e-3, 1e-6, 1e-9, 0.0]))):
            torch.linalg.matrix_rank(matrix), torch.linalg.matrix_rank(matrix, hermitian=False)
            torch.linalg.lstsq(matrix, matrix + 1, driver="gelsd")
            torch.linalg.matrix_rank(matrix, atol=0.5), torch.linalg.matrix_rank(matrix, 0.5)

    assert not _failures(_checked(tmp_path / "run", program))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_classes_after_the_last_right_one_count_in_no_loss(tmp_path: Path, dtype: torch.dtype) -> None:
    """torch's own decomposition of this loss counts them, and is no judge of its kernel."""

    def program() -> torch.Tensor:
        values = torch.randn(3, 5).to(dtype).requires_grad_()
        targets = [torch.tensor([one] * 3) for one in ([0, 2, -1, 1, 1], [3, -1, -1, -1, -1], [0, 1, 2, 3, 4], [-1] * 5)]
        made = [F.multilabel_margin_loss(values, one, reduction=how) for one in targets for how in ("mean", "sum", "none")]
        made += [F.multilabel_margin_loss(values[0], targets[0][0])]
        return torch.stack([_weighted(one) for one in made]).sum()

    assert not _failures(_checked(tmp_path / "run", program))
