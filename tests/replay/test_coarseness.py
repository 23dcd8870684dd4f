# SPDX-License-Identifier: Apache-2.0
"""Accept coarser sums where real machines make them, and only there."""

from __future__ import annotations

import pytest
import torch
from bench.zoo.programs import forward

from ulpscope.judge import multiple_of
from ulpscope.model import Slot, SlotReplay
from ulpscope.replay import Yardstick
from ulpscope.replay.yardstick.coarseness import leeway, tells_by_scale
from ulpscope.replay.yardstick.rounding import ROUNDINGS


@pytest.mark.parametrize(
    ("program", "dtype", "times"),
    [
        ("functional.gelu.0", "bfloat16", 1.0),
        ("Tensor.index_add_.3", "bfloat16", 2.0),
        ("Tensor.index_add_.3", "float32", 1.0),
        ("functional.scaled_dot_product_attention.0 backward", "float16", 2.0),
        ("optimizer.AdamW.0", "float32", 8.0),
    ],
)
def test_what_has_a_leeway(program: str, dtype: str, times: float) -> None:
    assert leeway(program, dtype, is_rounding=False) == times


def test_rounded_operands_have_one() -> None:
    assert leeway("functional.linear.0", "float32", is_rounding=True) == 8.0
    assert leeway("functional.linear.0", "float16", is_rounding=True) == 1.0


def test_a_running_sum_in_a_narrow_dtype_drifts_as_a_whole() -> None:
    assert not tells_by_scale("Tensor.cumsum.0 backward", "bfloat16")
    assert tells_by_scale("Tensor.cumsum.0", "float32")
    assert tells_by_scale("Tensor.sum.0", "bfloat16")


# ---- units that drop bits ----------------------------------------------------------------------------------------------------------------


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Float64 values in float32, towards zero."""
    nearest = x.to(torch.float32)
    return torch.where(nearest.double().abs() > x.abs(), torch.nextafter(nearest, torch.zeros_like(nearest)), nearest).double()


def by_a_unit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product as tensor cores make it: operands in TF32, eight terms at a time, and the last bits of the sum dropped each time."""
    a, b = (ROUNDINGS["tf32"][0](one).double() for one in (a, b))
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for at in range(0, a.shape[1], 8):
        total = dropped(total + a[:, at : at + 8] @ b[at : at + 8])
    return total.float()


def measured(scale: float) -> SlotReplay:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(shape, generator=generator).exp() for shape in ((8, 6000), (6000, 12)))
    [found] = Yardstick(forward("mm", torch.mm, (a, b)), operands="tf32").measure({Slot("output", (0,)): by_a_unit(a, b) * scale})
    return found


def test_a_long_sum_that_a_unit_shrinks_is_honest() -> None:
    found = measured(1.0)
    assert found.scale is not None
    assert -3e-5 < found.scale < -1e-5
    assert found.bias is None
    assert multiple_of(found) <= 1


@pytest.mark.parametrize("scale", [1.001, 0.999], ids=["larger", "smaller than a unit makes it"])
def test_another_change_of_scale_is_still_seen(scale: float) -> None:
    found = measured(scale)
    assert found.bias is not None
    assert multiple_of(found) > 1
