# SPDX-License-Identifier: Apache-2.0
"""Measure distances in units in the last place: how many representable numbers lie between two values.

Every finite number of a dtype has a place among all of them, counted from zero outwards: 0 and -0 are 0, the smallest subnormal number is
1, its negative is -1. The distance is the difference of the places. Between two dtypes it is counted in the coarser one (fewer fraction
bits): the finer value is rounded to it first. Integers count in steps of one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ulpscope.model import DType, dtype
from ulpscope.numerics.casting import byte_values, real_dtype
from ulpscope.numerics.difference.pair_sums import BUCKETS

__all__ = ["bucket_counts", "code_places", "common_dtype", "distances", "places", "places_of_bits"]


def common_dtype(subject: str, reference: str) -> DType | None:
    """Return the dtype whose units count between two dtypes; None where they share no unit.

    No unit is shared between an integer and a floating dtype, and between uint64 and another integer (no type holds both).
    """
    left, right = dtype(real_dtype(subject)), dtype(real_dtype(reference))
    if left.is_floating != right.is_floating:
        return None
    if not left.is_floating:
        if "uint64" in (left.name, right.name) and left != right:
            return None
        return left if left.size_bytes >= right.size_bytes else right
    return left if left.mantissa <= right.mantissa else right


def places(entry: DType, values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the place of each finite value after rounding to a floating dtype (nearest, ties to even).

    Each binade holds 2**mantissa places, and the significand, implicit bit included, counts the places within it. A significand that rounds
    up to a whole binade carries into the next by itself. Beyond the largest number the places go on.
    """
    if entry.mantissa == 52:
        return places_of_bits(values.view(np.int64))
    magnitude = np.abs(values)
    smallest = math.frexp(entry.tiny)[1]
    exponent = np.where(magnitude < entry.tiny, smallest, np.frexp(magnitude)[1]).astype(np.int64)
    place = ((exponent - smallest) << entry.mantissa) + np.rint(np.ldexp(magnitude, entry.mantissa + 1 - exponent)).astype(np.int64)
    return np.where(np.signbit(values), -place, place)


def places_of_bits(bits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the place of each value of an IEEE-like dtype, from its bits as signed integers of its width."""
    magnitude = (bits & np.iinfo(bits.dtype).max).astype(np.int64)
    return np.where(bits < 0, -magnitude, magnitude)


@cache
def code_places(name: str) -> npt.NDArray[np.int64]:
    """Return the place of each of the 256 codes of a one-byte dtype; the places of NaN and infinity are meaningless zeros."""
    values = byte_values(name)
    if not dtype(name).is_floating:
        return values.astype(np.int64)
    result = np.zeros(256, np.int64)
    finite = np.isfinite(values)
    result[finite] = places(dtype(name), values[finite])
    result.flags.writeable = False
    return result


def distances(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return the distances of places; unsigned, since two float64 of opposite sign can be more than 2**63 apart."""
    high, low = np.maximum(left, right), np.minimum(left, right)
    difference: npt.NDArray[np.uint64] = high.view(np.uint64) - low.view(np.uint64)
    return difference


def bucket_counts(distance: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Count the distances in each bucket: one bucket for each distance below 16, then eight for each power of two."""
    shift = np.maximum(_bit_length(distance) - 4, 0) if int(distance.max(initial=0)) >= 16 else np.zeros(distance.size, np.int64)
    index: npt.NDArray[np.int64] = 8 * shift + (distance >> shift.astype(np.uint64)).astype(np.int64)
    counts: npt.NDArray[np.int64] = np.bincount(index, minlength=BUCKETS)
    return counts


def _bit_length(distance: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the bit lengths, computed in two halves: a float64 would round a long distance up to the next power of two."""
    high, low = distance >> np.uint64(32), distance & np.uint64(0xFFFFFFFF)
    exponent_high = np.frexp(high.astype(np.float64))[1].astype(np.int64)
    exponent_low = np.frexp(low.astype(np.float64))[1].astype(np.int64)
    bits: npt.NDArray[np.int64] = np.where(high > 0, exponent_high + 32, exponent_low)
    return bits
