# SPDX-License-Identifier: Apache-2.0
"""Hold limits for machines that add up more coarsely than the zoo's common limits allow, as measured on CUDA kernels (docs/zoo.md)."""

from __future__ import annotations

from ulpscope.model import DTYPES

__all__ = ["is_dropped", "leeway", "tells_by_scale"]

_ROUNDED_OPERANDS = 8.0
"""Units that round operands also drop bits of their sums: TF32 products reach 892, 82 and 41 where float32 ones reach 72, 24 and 7. A
result of 16 bits has no such digits to lose."""
_NARROW = {
    name: 2.0 for name in "scaled_dot_product_attention index_add index_put put scatter_add scatter_reduce index_reduce embedding".split()
}
"""In dtypes of 16 bits and fewer: fused attention rounds its probabilities, scattered sums are kept in the dtype itself."""
_RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp"})
"""In such dtypes an error here stays in all that follows, so that honest CUDA kernels show a change of scale of up to 1.7."""


_DROPPED_PER_TERM = 2.0**-26
"""Units that round operands add up a few terms at a time and drop, not round, what is beyond their accumulator. So a long sum shrinks as a
whole: a product of an H200 by 2.3e-9 of itself for each of its terms, a convolution by up to 1.2e-8 for each that its sizes show."""
_OPTIMIZER = 8.0
"""A fused AdamW step multiplies by reciprocals: 24 and 6.8 on an H200, where no other float32 kernel is above 3.8 and 2.1."""


def leeway(program: str, dtype: str, *, is_rounding: bool) -> float:
    if is_rounding and not _is_narrow(dtype):
        return _ROUNDED_OPERANDS
    if program.startswith("optimizer."):
        return _OPTIMIZER
    return max((_NARROW.get(word, 1.0) for word in _words(program)), default=1.0) if _is_narrow(dtype) else 1.0


def is_dropped(scale: float | None, num_terms: float) -> bool:
    """Tell whether a unit that rounds operands may shrink sums of so many terms by this scale; it never makes them larger."""
    return scale is not None and -_DROPPED_PER_TERM * num_terms <= scale <= 0


def tells_by_scale(program: str, dtype: str) -> bool:
    """Tell whether a change of scale that all elements share says anything about a kernel."""
    return not (_is_narrow(dtype) and _RUNNING.intersection(_words(program)))


def _words(program: str) -> list[str]:
    return [word.strip("_") for word in program.replace(" ", ".").split(".")]


def _is_narrow(dtype: str) -> bool:
    known = DTYPES.get(dtype)
    return known is not None and known.is_floating and known.mantissa < 23
