# SPDX-License-Identifier: Apache-2.0
"""Where real machines add up more coarsely than the zoo's common limits allow, as measured on CUDA kernels (docs/zoo.md)."""

from __future__ import annotations

from ulpscope.model import DTYPES

__all__ = ["leeway"]

_ROUNDED_OPERANDS = 8.0
"""Units that round operands also drop bits of their sums: TF32 products reach 892, 82 and 41 where float32 ones reach 72, 24 and 7."""
_NARROW = {
    "scaled_dot_product_attention": 2.0,
    **dict.fromkeys("cumsum cumprod logcumsumexp index_add index_put put scatter_add scatter_reduce index_reduce embedding".split(), 8.0),
}
"""In dtypes of 16 bits and fewer: fused attention rounds its probabilities, running and scattered sums are kept in the dtype itself."""


_OPTIMIZER = 8.0
"""A fused AdamW step multiplies by reciprocals: 24 and 6.8 on an H200, where no other float32 kernel is above 3.8 and 2.1."""


def leeway(program: str, dtype: str, *, is_rounding: bool) -> float:
    if is_rounding:
        return _ROUNDED_OPERANDS
    if program.startswith("optimizer."):
        return _OPTIMIZER
    known = DTYPES.get(dtype)
    if known is None or not known.is_floating or known.mantissa >= 23:
        return 1.0
    return max((_NARROW.get(word.strip("_"), 1.0) for word in program.replace(" ", ".").split(".")), default=1.0)
