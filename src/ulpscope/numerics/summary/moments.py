# SPDX-License-Identifier: Apache-2.0
"""Turn sums and counts into a summary: the NumPy pass and the compiled one share this, so that they agree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ulpscope.model import Summary, dtype
from ulpscope.numerics.casting import real_dtype, reals, widen
from ulpscope.numerics.difference.pair_sums import LARGEST_SUM, SMALLEST_SUM

__all__ = ["Moments", "summary_of"]

_BLOCK = 1 << 15


@dataclass(slots=True)
class Moments:
    """The sums and counts of one pass. The range starts empty: minimum above maximum."""

    min: float = math.inf
    max: float = -math.inf
    sum: float = 0.0
    sum_squares: float = 0.0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0

    def add_range(self, lowest: float, highest: float) -> None:
        self.min = min(self.min, lowest)
        self.max = max(self.max, highest)


def summary_of(name: str, raw: npt.NDArray[np.uint8], moments: Moments) -> Summary:
    """Make the summary of `raw`, and read it again only where float64 sums left their range (float64 beyond 1e150 or so)."""
    numel = raw.size // dtype(real_dtype(name)).size_bytes
    finite = numel - moments.nan - moments.posinf - moments.neginf
    mean = rms = None
    if finite:
        mean, rms = moments.sum / finite, math.sqrt(moments.sum_squares / finite)
        if finite > moments.zero and not SMALLEST_SUM < moments.sum_squares < LARGEST_SUM:
            mean, rms = _scaled_mean_and_rms(name, raw, finite)
    has_range = numel > moments.nan
    return Summary(
        numel,
        moments.min + 0.0 if has_range else None,  # + 0.0 turns -0.0 into 0.0
        moments.max + 0.0 if has_range else None,
        mean,
        rms,
        moments.nan,
        moments.posinf,
        moments.neginf,
        moments.zero,
        moments.subnormal,
    )


def _scaled_mean_and_rms(name: str, raw: npt.NDArray[np.uint8], finite: int) -> tuple[float, float]:
    """Compute mean and rms with every value divided by the power of two next to the largest."""
    largest = max(float(np.abs(block).max(initial=0.0)) for block in _finite_blocks(name, raw))
    exponent = math.frexp(largest)[1]
    total = squares = 0.0
    for block in _finite_blocks(name, raw):
        scaled = np.ldexp(block, -exponent)
        total += float(scaled.sum())
        squares += float(np.square(scaled).sum())
    return math.ldexp(total / finite, exponent), math.ldexp(math.sqrt(squares / finite), exponent)


def _finite_blocks(name: str, raw: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.float64]]:
    carrier = reals(name, raw)
    for start in range(0, carrier.size, _BLOCK):
        values = widen(real_dtype(name), carrier[start : start + _BLOCK])
        yield values[np.isfinite(values)]
