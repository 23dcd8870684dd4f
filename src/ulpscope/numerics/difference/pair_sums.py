# SPDX-License-Identifier: Apache-2.0
"""Hold the sums of one pass over two tensors, and the meaning of its distance buckets, without NumPy.

Comparing two runs with the compiled kernel needs no NumPy, whose import alone takes as long as comparing a small run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import field
from itertools import accumulate
from typing import Any

from ulpscope.model.nouns import dataclass
from ulpscope.numerics.layouts import BUCKETS

__all__ = ["BUCKETS", "LARGEST_SUM", "SMALLEST_SUM", "Difference", "bucket_top", "distance_in", "quantiles"]

# Between these a float64 sum of squares neither overflowed nor lost digits to underflow.
SMALLEST_SUM, LARGEST_SUM = 1e-270, 1e300


def _no_counts() -> list[int]:
    return [0] * BUCKETS


@dataclass(slots=True)
class Difference:
    """The sums, maxima and counts of one pass over two tensors.

    Sums, maxima and `within` are over the positions where both sides are finite (`numel - nonfinite` of them). Sums and `max_abs` are of
    values divided by 2**exponent, which is not 0 only where float64 would have overflowed. `worst` is the position of `max_abs`,
    `first_disagree` the first position where NaN or infinities disagree. `ulp_counts` counts the distances in each of the BUCKETS, None
    where the dtypes share no unit. A pass that keeps no counts gives `ulp_buckets` instead: the buckets of the median and of 99 %.
    """

    numel: int
    max_abs: float = 0.0
    max_rel: float = 0.0
    sum_abs: float = 0.0
    sum_squares: float = 0.0
    sum_squares_subject: float = 0.0
    sum_squares_reference: float = 0.0
    sum_products: float = 0.0
    within: list[int] = field(default_factory=lambda: [0, 0, 0])
    different: int = 0
    sign_flips: int = 0
    nan_disagree: int = 0
    inf_disagree: int = 0
    nonfinite: int = 0
    worst: int | None = None
    first_disagree: int | None = None
    ulp_max: int = 0
    ulp_counts: Any = field(default_factory=_no_counts)
    exponent: int = 0
    ulp_buckets: tuple[int, int] | None = None

    @property
    def worst_place(self) -> int | None:
        """Return the position where NaN or infinities disagree, else where the difference is largest."""
        return self.worst if self.first_disagree is None else self.first_disagree


def bucket_top(bucket: int) -> int:
    """Return the largest distance that falls into a bucket: one for each distance below 16, then eight for each power of two."""
    if bucket < 16:
        return bucket
    shift = bucket // 8 - 1
    return ((bucket - 8 * shift + 1) << shift) - 1


def quantiles(counts: Iterable[int], shares: Iterable[float], largest: int) -> list[float]:
    """Return the distances that at least these shares of the elements do not exceed: exact below 16, else at most an eighth too large."""
    reached = list(accumulate(counts))
    needed = (max(math.ceil(share * reached[-1]), 1) for share in shares)
    return [distance_in(bisect_left(reached, many), largest) for many in needed]


def distance_in(bucket: int, largest: int) -> float:
    """Return the largest distance in a bucket, at most `largest`."""
    return float(min(bucket_top(bucket), largest))
