# SPDX-License-Identifier: Apache-2.0
"""Machines that round the operands of matrix products, and single products that are wrong on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.replay.test_yardstick import HEADS, Call, backward, forward
from ulpscope.model import OperandFormat, Slot
from ulpscope.replay.yardstick.operands import effective_operands
from ulpscope.replay.yardstick.rounding import FORMATS, ROUNDINGS, RoundedOperands
from ulpscope.replay.yardstick.yardstick import Yardstick

OUT = Slot("output", (0,))
Recorded = Mapping[Slot, Tensor]


def _family(count: int = 2, scale: float = 1.0) -> list[Call]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 8 * k, 12) for k in range(2, 2 + count)]
    drawn = [(scale * torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)) for m, k, n in shapes]
    return [forward(F.linear, *values) for values in drawn] + [backward(F.linear, *values) for values in drawn]


def _on_machine(call: Call, operands: OperandFormat, variant: int = 0) -> Recorded:
    with RoundedOperands(ROUNDINGS[operands][variant]):
        return call(call.inputs)


def test_every_format_is_known() -> None:
    assert set(FORMATS) == set(get_args(OperandFormat)) == set(ROUNDINGS)


@pytest.mark.parametrize("operands", FORMATS)
def test_the_format_of_a_machine_is_found(operands: OperandFormat) -> None:
    found = effective_operands([(call, _on_machine(call, operands)) for call in _family()])
    assert found == "bfloat16" if operands == "bfloat16" else found in ("float16", "tf32")


def test_truncation_to_tf32_is_found_too() -> None:
    assert effective_operands([(call, _on_machine(call, "tf32", 1)) for call in _family()]) == "tf32"


def test_range_tells_float16_from_tf32() -> None:
    """Products of 1e-6 lose digits in float16 only, which has no numbers so small."""
    family = _family(scale=1e-6)
    assert effective_operands([(call, _on_machine(call, "float16")) for call in family]) == "float16"
    assert effective_operands([(call, _on_machine(call, "tf32")) for call in family]) == "tf32"


def test_full_precision_has_no_format() -> None:
    assert effective_operands([(call, call(call.inputs)) for call in _family()]) is None
    assert effective_operands([]) is None


def test_a_family_that_is_wrong_otherwise_has_no_format() -> None:
    scaled = [(call, {slot: one * 1.01 for slot, one in call(call.inputs).items()}) for call in _family()]
    assert effective_operands(scaled) is None


@pytest.mark.parametrize("operands", FORMATS)
def test_a_small_fault_shows_on_such_a_machine(operands: OperandFormat) -> None:
    for call in _family(2):
        recorded = _on_machine(call, operands)
        for factor, is_seen in ((1.0, False), (1.0001, True)):
            found = Yardstick(call, operands=operands).measure({slot: one * factor for slot, one in recorded.items()})
            assert all((one.rms_ratio > 64) == is_seen for one in found)
            assert all((one.rms_ratio < 4) == (not is_seen) for one in found)


@pytest.mark.parametrize("kernel", ["fused", "formula"])
def test_attention_may_round_or_not(kernel: str) -> None:
    call = forward(F.scaled_dot_product_attention, *HEADS)
    formula = forward(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) @ v, *HEADS)
    recorded = call(call.inputs) if kernel == "fused" else _on_machine(formula, "float16")
    assert Yardstick(call, operands="float16").measure(recorded)[0].max_ratio < 64
    assert Yardstick(call, operands="float16").measure({OUT: recorded[OUT] * 1.05})[0].rms_ratio > 16


def test_what_is_not_finite_stays_as_it_is() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1 + 2.0**-11, 3.4e38])
    for rounding in ROUNDINGS["tf32"]:
        assert torch.equal(rounding(values)[:2], values[:2])
        assert rounding(values)[2].isnan()
        assert rounding(values)[3] == 1.0
