# SPDX-License-Identifier: Apache-2.0
"""Compare two tensors in plain NumPy, block by block: of any dtypes, also of two different ones.

This is the tested fallback of the compiled pass; counts, maxima and indices are the same, sums agree to about twelve digits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ulpscope.model import DType, dtype
from ulpscope.numerics.casting import real_dtype, reals, widen
from ulpscope.numerics.difference.pair_sums import BUCKETS, Difference
from ulpscope.numerics.difference.ulp import bucket_counts, code_places, common_dtype, distances, places, places_of_bits

__all__ = ["THRESHOLDS", "difference_blocks", "largest_finite"]

THRESHOLDS = (1e-4, 1e-3, 5e-3)
_BLOCK = 1 << 13


def difference_blocks(
    subject_dtype: str, subject: npt.NDArray[np.uint8], reference_dtype: str, reference: npt.NDArray[np.uint8], exponent: int = 0
) -> Difference:
    """Compare raw bytes of the same number of elements."""
    unit = common_dtype(subject_dtype, reference_dtype)
    left_dtype, right_dtype = real_dtype(subject_dtype), real_dtype(reference_dtype)
    left, right = reals(subject_dtype, subject), reals(reference_dtype, reference)
    result = Difference(left.size, ulp_counts=None if unit is None else np.zeros(BUCKETS, np.int64), exponent=exponent)
    with np.errstate(all="ignore"):
        for start in range(0, left.size, _BLOCK):
            x_carrier, y_carrier = left[start : start + _BLOCK], right[start : start + _BLOCK]
            x, y = widen(left_dtype, x_carrier), widen(right_dtype, y_carrier)
            finite = np.isfinite(x) & np.isfinite(y)
            if not finite.all():
                _add_nonfinite(result, x, y, finite, start)
                x[~finite] = y[~finite] = 0.0
            _add_places(result, unit, (left_dtype, x_carrier, x), (right_dtype, y_carrier, y), finite)
            if exponent:
                x, y = np.ldexp(x, -exponent), np.ldexp(y, -exponent)
            _add_values(result, x, y, finite, start)
    return result


def _add_nonfinite(
    result: Difference, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], finite: npt.NDArray[np.bool_], start: int
) -> None:
    nan = np.isnan(x) != np.isnan(y)
    inf = ~finite & ~nan & ~np.isnan(x) & (x != y)
    result.nonfinite += int(np.count_nonzero(~finite))
    result.nan_disagree += int(np.count_nonzero(nan))
    result.inf_disagree += int(np.count_nonzero(inf))
    disagree = np.flatnonzero(nan | inf)
    if disagree.size and result.first_disagree is None:
        result.first_disagree = start + int(disagree[0])


def _add_values(
    result: Difference, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], finite: npt.NDArray[np.bool_], start: int
) -> None:
    difference = np.abs(x - y)
    scale = np.abs(y)
    excluded = x.size - int(np.count_nonzero(finite))
    largest = float(difference.max())
    if largest > result.max_abs:
        result.max_abs = largest
        result.worst = start + int(difference.argmax())
    nonzero = scale != 0
    result.max_rel = max(result.max_rel, float((difference[nonzero] / scale[nonzero]).max(initial=0.0)))
    for i, threshold in enumerate(THRESHOLDS):
        result.within[i] += int(np.count_nonzero(difference <= scale * threshold)) - excluded
    result.sign_flips += int(np.count_nonzero((np.signbit(x) != np.signbit(y)) & (x != 0) & nonzero))
    result.sum_abs += float(difference.sum())
    result.sum_squares += float(np.square(difference).sum())
    result.sum_squares_subject += float(np.square(x).sum())
    result.sum_squares_reference += float(np.square(y).sum())
    result.sum_products += float((x * y).sum())


_Side = tuple[str, npt.NDArray[Any], npt.NDArray[np.float64]]


def _add_places(result: Difference, unit: DType | None, left: _Side, right: _Side, finite: npt.NDArray[np.bool_]) -> None:
    if unit is None or result.ulp_counts is None:
        result.different += int(np.count_nonzero((left[2] != right[2]) & finite))
        return
    same_dtype = left[0] == right[0]
    distance = distances(_places(unit, left, same_dtype), _places(unit, right, same_dtype))
    distance[~finite] = 0
    if same_dtype or not unit.is_floating:
        result.different += int(np.count_nonzero(distance))
    else:  # two numbers of the finer dtype may round to the same place
        result.different += int(np.count_nonzero((left[2] != right[2]) & finite))
    result.ulp_max = max(result.ulp_max, int(distance.max()))
    counts = bucket_counts(distance)
    counts[0] -= finite.size - int(np.count_nonzero(finite))
    result.ulp_counts += counts


def _places(unit: DType, side: _Side, same_dtype: bool) -> npt.NDArray[Any]:
    name, carrier, values = side
    if dtype(name).size_bytes == 1 and (same_dtype or not unit.is_floating):
        return code_places(name)[carrier.view(np.uint8)]
    if not unit.is_floating:
        return carrier if name == "uint64" else carrier.astype(np.int64)
    return places_of_bits(carrier.view(f"<i{unit.size_bytes}")) if same_dtype else places(unit, values)


def largest_finite(name: str, raw: npt.NDArray[np.uint8]) -> float:
    """Return the largest magnitude among the finite values."""
    carrier, largest = reals(name, raw), 0.0
    for start in range(0, carrier.size, _BLOCK):
        values = widen(real_dtype(name), carrier[start : start + _BLOCK])
        finite = np.abs(values[np.isfinite(values)])
        largest = max(largest, float(finite.max(initial=0.0)))
    return 0.0 if math.isnan(largest) else largest
