# SPDX-License-Identifier: Apache-2.0
"""Where real machines add up more coarsely, and only there."""

from __future__ import annotations

import pytest

from ulpscope.replay.coarseness import leeway, tells_by_scale


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


def test_a_running_sum_in_a_narrow_dtype_drifts_as_a_whole() -> None:
    assert not tells_by_scale("Tensor.cumsum.0 backward", "bfloat16")
    assert tells_by_scale("Tensor.cumsum.0", "float32")
    assert tells_by_scale("Tensor.sum.0", "bfloat16")
