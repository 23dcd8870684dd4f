# SPDX-License-Identifier: Apache-2.0
"""Pictures sampled at given places: the formula is torch's, rounded places are honest, and faults still show."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.replay.test_yardstick import Call, backward, forward
from ulpscope.judge.checks import check_multiple
from ulpscope.model import Phase
from ulpscope.replay.formulas.decompositions import Decomposed
from ulpscope.replay.formulas.sampling import sampled, sampled_backward
from ulpscope.replay.yardstick.independent import Independent
from ulpscope.replay.yardstick.yardstick import Yardstick

MODES, PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
WAYS = [
    (num_dims, mode, padding, align)
    for num_dims, mode, padding, align in itertools.product((2, 3), range(3), range(3), (False, True))
    if num_dims == 2 or MODES[mode] != "bicubic"
]
PHASES: tuple[Phase, ...] = ("forward", "backward")


def _given(sizes: tuple[int, ...], places: tuple[int, ...], dtype: torch.dtype, reach: float = 1.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, *sizes, generator=generator)
    return values.to(dtype), ((torch.rand(2, *places, len(sizes), generator=generator) * 2 - 1) * reach).to(dtype)


@pytest.mark.parametrize(("num_dims", "mode", "padding", "align"), WAYS)
def test_the_formula_is_that_of_torch(num_dims: int, mode: int, padding: int, align: bool) -> None:
    for sizes in ((5, 6, 7), (1, 2, 3)):
        values, grid = (one.requires_grad_() for one in _given(sizes[:num_dims], (4, 3, 5)[:num_dims], torch.float64))
        result = F.grid_sample(values, grid, MODES[mode], PADDINGS[padding], align)
        entering = torch.randn(result.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(result, (values, grid), entering)
        torch.testing.assert_close(sampled(values, grid, mode, padding, align), result, rtol=1e-12, atol=1e-12)
        found = sampled_backward(entering, values, grid, mode, padding, align)
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_dims", [2, 3])
def test_forward_and_backward_have_an_independent_judge(num_dims: int) -> None:
    values, grid = _given((4,) * num_dims, (3,) * num_dims, torch.float32)
    for mode in (Decomposed, Independent):
        with mode() as running:
            result = torch.grid_sampler(values, grid, 0, 0, False)
            getattr(torch.ops.aten, f"grid_sampler_{num_dims}d_backward")(result, values, grid, 0, 0, False, [True, True])
        assert running.is_covered


def _sampling(mode: str, padding: str, align: bool, phase: Phase, dtype: torch.dtype, num_dims: int = 2) -> Call:
    values, grid = _given((12,) * num_dims, (24,) * num_dims, dtype, reach=1.0)
    make = forward if phase == "forward" else backward
    return make(lambda x, places: F.grid_sample(x, places, mode, padding, align), values, grid)


def _multiples(call: Call, phase: Phase, made: Call | None = None, factor: float = 1.0) -> list[float]:
    recorded = {slot: one * factor for slot, one in (made or call)(call.inputs).items()}
    return [check_multiple(found, phase) for found in Yardstick(call).measure(recorded)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_places_are_honest_and_other_corners_are_not(dtype: torch.dtype, mode: str, phase: Phase) -> None:
    right, other = (_sampling(mode, "border", align, phase, dtype) for align in (False, True))
    assert max(_multiples(right, phase)) < 0.5
    assert min(_multiples(right, phase, other)) > 2


@pytest.mark.parametrize("padding", PADDINGS)
def test_so_it_is_in_volumes(padding: str) -> None:
    values, grid = _given((5, 6, 4), (4, 4, 4), torch.bfloat16)
    right, other = (forward(lambda x, y, a=align: F.grid_sample(x, y, "bilinear", padding, a), values, grid) for align in (False, True))
    assert max(_multiples(right, "forward")) < 0.5
    assert min(_multiples(right, "forward", other)) > 2


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_weights_that_are_2_percent_off_fail(mode: str, phase: Phase) -> None:
    call = _sampling(mode, "zeros", False, phase, torch.float32)
    assert min(_multiples(call, phase, factor=1.02)) > 100


def test_they_do_in_bfloat16_where_rounding_is_less_than_that() -> None:
    """An honest bicubic kernel is off by 3 % of its results there, of which 2 % in common are no news."""
    call = _sampling("bilinear", "border", False, "forward", torch.bfloat16)
    assert min(_multiples(call, "forward", factor=1.02)) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_choices_and_whole_numbers_are_rounded_by_nobody(dtype: torch.dtype) -> None:
    """Noise on a whole number would take another pixel, and excuse every fault that is as large as pixels differ."""
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    for seed in range(3):
        with Decomposed(seed, is_narrow=True):
            found = [
                values.floor(),
                values.clamp(-3, 3),
                values.abs(),
                values.round(),
                torch.fmod(values, 2),
                values.maximum(-values),
                -values,
            ]
        plain = [values.floor(), values.clamp(-3, 3), values.abs(), values.round(), torch.fmod(values, 2), values.maximum(-values), -values]
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
