# SPDX-License-Identifier: Apache-2.0
"""Measure from statistics alone: give a lower bound of the true distance.

Let n and b be the subject's and the reference's values at the m positions where both are finite, d = n - b, and D = max(rms(d), max|d| / 8)
/ rms(b) the distance from values. If NaN and infinities stand at the same places on both sides (else D is infinite and any bound holds),
the statistics of both sides are over the same positions, and:

    |mean n - mean b|  = |mean d|           <= rms(d)              the mean is at most the root mean square
    |rms n - rms b|                         <= rms(d)              triangle inequality
    |max n - max b|, |min n - min b|        <= max|d|              n_i - max b <= n_i - b_i where n_i = max n; and vice versa
    max|d|                                  <= sqrt(m) * rms(d)    one square is at most the sum of all

So each of |Δmean|, |Δrms| and max(1/8, 1/sqrt(m)) * |Δmin or Δmax|, over any upper bound of rms(b), is at most D. Upper bounds of rms(b)
are the rms itself and the largest magnitude.

Statistics are rounded, so the largest rounding error is subtracted from each difference first. Ours are float64 sums. A tool that counts
neither NaN nor infinities is a foreign one: it may have summed in float32 and rounded mean and rms to the tensor's own dtype, and squares
of small numbers underflow there. Minimum and maximum are elements, exact but for float64 and wide integers held as float32.

The lowest and the largest number of a side's own dtype stand for an infinity where the dtypes differ (`torch.finfo(x.dtype).min` as a
mask): they count as infinities. Their number follows from the rms, which they outweigh.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ulpscope.model import DTYPES, Measurement, Metric, NotMeasured, Summary, SummaryMeasurement, Undefined

__all__ = ["measure_summaries"]

_VALUES = ("min", "max", "mean", "rms")
_COUNTS = ("num_nan", "num_posinf", "num_neginf")
_FLOAT32_EPS = 2.0**-23
# How many float32 roundings, each as large as the rms, foreign reductions are allowed. Means are summed in trees; norms of torch on a CPU
# in a few lanes, one element after the other (seen there: 3 million elements, float32 6e-5 and float16 1.4e-3 off).
_MEAN_ROUNDINGS = 64
_NORM_ELEMENTS_PER_ROUNDING = 256


class _Side(NamedTuple):
    dtype: str
    summary: Summary


@lru_cache(maxsize=4096)  # a result is the next call's argument, so most statistics come twice
def measure_summaries(subject_dtype: str, left: Summary, reference_dtype: str, right: Summary, equal: bool | None) -> Measurement:
    """Measure by the statistics of both sides; `equal` is what fingerprints said."""
    if equal:
        return SummaryMeasurement(equal=True, distance=0.0, differences=dict.fromkeys(_taken_by_both(left, right), 0.0))
    left, right = _with_infinite_limits(_Side(subject_dtype, left), _Side(reference_dtype, right))
    if not _taken_by_both(left, right):
        return NotMeasured("the two sides have no statistic in common")
    if subject_dtype.startswith("complex") and _is_foreign(left) != _is_foreign(right):
        return NotMeasured("statistics of complex numbers by different tools: one takes parts, the other magnitudes")
    distance = math.inf if _nonfinite_disagree(left, right) else _lower_bound(_Side(subject_dtype, left), _Side(reference_dtype, right))
    return SummaryMeasurement(equal=equal, distance=distance, differences=_differences(left, right))


def _with_infinite_limits(subject: _Side, reference: _Side) -> tuple[Summary, Summary]:
    """Return both statistics, with the limits of both dtypes as infinities where both sides hold as many at one end."""
    if subject.dtype == reference.dtype:
        return subject.summary, reference.summary
    ends = [end for end in ("min", "max") if _is_own_limit(subject, end) and _is_own_limit(reference, end)]
    if len(ends) != 1:  # with limits at both ends, nothing tells how many stand at each
        return subject.summary, reference.summary
    sides = (_with_infinite_limit(subject, ends[0]), _with_infinite_limit(reference, ends[0]))
    return (subject.summary, reference.summary) if _nonfinite_disagree(*sides) else sides


def _is_own_limit(side: _Side, end: str) -> bool:
    """Tell whether an end of the values is the limit of their dtype, or so near that a small sum was added to it."""
    value: float | None = side.summary.min if end == "min" else side.summary.max
    dtype = DTYPES.get(side.dtype)
    if value is None or dtype is None or not dtype.is_floating or not side.summary.rms:
        return False
    outward = -value if end == "min" else value
    return dtype.max * (1 - 4 * dtype.eps) <= outward <= dtype.max


def _with_infinite_limit(side: _Side, end: str) -> Summary:
    summary = side.summary
    many = round(summary.numel * ((summary.rms or 0.0) / DTYPES[side.dtype].max) ** 2)
    if end == "min":
        num = None if summary.num_neginf is None else summary.num_neginf + many
        top = -math.inf if many == summary.numel else summary.max
        return replace(summary, min=-math.inf, max=top, mean=None, rms=None, num_neginf=num)
    num = None if summary.num_posinf is None else summary.num_posinf + many
    bottom = math.inf if many == summary.numel else summary.min
    return replace(summary, min=bottom, max=math.inf, mean=None, rms=None, num_posinf=num)


def _is_foreign(summary: Summary) -> bool:
    return summary.num_nan is None


def _taken_by_both(left: Summary, right: Summary) -> list[str]:
    return [name for name in (*_VALUES, *_COUNTS) if getattr(left, name) is not None and getattr(right, name) is not None]


def _differences(left: Summary, right: Summary) -> dict[str, Metric]:
    return {name: _difference(getattr(left, name), getattr(right, name)) for name in (*_VALUES, *_COUNTS)}


def _difference(left: float | None, right: float | None) -> Metric:
    """Subtract the reference from the subject; the same infinity on both sides is no difference."""
    if left is None or right is None:
        sides = [side for side, value in (("subject", left), ("reference", right)) if value is None]
        return Undefined(f"not taken by the {' and the '.join(sides)}")
    if math.isnan(left) or math.isnan(right):
        return Undefined("NaN on a side")
    return 0.0 if left == right else float(left - right)


def _nonfinite_disagree(left: Summary, right: Summary) -> bool:
    """Tell whether NaN or infinities cannot stand at the same places."""
    known = [(getattr(left, name), getattr(right, name)) for name in _COUNTS]
    if any(a is not None and b is not None and a != b for a, b in known):
        return True
    signs = [(sign(left), sign(right)) for sign in (_shows_nan, _shows_posinf, _shows_neginf, _shows_nonfinite)]
    return any(a is not None and b is not None and a != b for a, b in signs)


# What a side's statistics show; None where they cannot tell. Reductions of foreign tools let NaN through.


def _shows_nan(summary: Summary) -> bool | None:
    if summary.num_nan is not None:
        return summary.num_nan > 0
    taken = [value for value in (summary.max, summary.min, summary.rms) if value is not None]
    return any(map(math.isnan, taken)) if taken else None


def _shows_nonfinite(summary: Summary) -> bool | None:
    """Tell whether any element is not finite. A foreign mean is NaN also where infinities of both signs met; a finite mean has met
    neither.
    """
    if summary.num_nonfinite is not None:
        return summary.num_nonfinite > 0
    if summary.mean is None or math.isinf(summary.mean):
        return None
    return math.isnan(summary.mean)


def _shows_posinf(summary: Summary) -> bool | None:
    if summary.num_posinf is not None:
        return summary.num_posinf > 0
    return None if summary.max is None or math.isnan(summary.max) else summary.max == math.inf


def _shows_neginf(summary: Summary) -> bool | None:
    if summary.num_neginf is not None:
        return summary.num_neginf > 0
    return None if summary.min is None or math.isnan(summary.min) else summary.min == -math.inf


def _lower_bound(subject: _Side, reference: _Side) -> float:
    weight = max(1 / 8, 1 / math.sqrt(max(subject.summary.numel, reference.summary.numel, 1)))
    largest = max(
        weight * _excess("min", subject, reference),
        weight * _excess("max", subject, reference),
        _excess("mean", subject, reference),
        _excess("rms", subject, reference),
    )
    if largest == 0.0:
        return 0.0
    scale = _largest_rms(reference)
    if scale is None:
        return 0.0
    return largest / scale if scale else math.inf


def _excess(name: str, subject: _Side, reference: _Side) -> float:
    """Return how far a statistic differs beyond the rounding on both sides."""
    left: float | None = getattr(subject.summary, name)
    right: float | None = getattr(reference.summary, name)
    if left is None or right is None or not (math.isfinite(left) and math.isfinite(right)):
        return 0.0
    return max(0.0, abs(left - right) - _rounding(name, subject, reference) - _rounding(name, reference, subject))


def _rounding(name: str, side: _Side, other: _Side) -> float:
    """Bound the distance of a stored statistic from the true one. A side without a known magnitude is assumed to be as large as the other:
    if it is not, the two differ by more than any rounding.
    """
    summary = side.summary
    value: float = abs(getattr(summary, name))
    scale = _scale(summary) or _scale(other.summary)
    if name in ("min", "max"):
        return value * _FLOAT32_EPS if _is_foreign(summary) and _exceeds_float32(side.dtype) else 0.0
    if not _is_foreign(summary):
        return 2.0**-52 * (1024 + summary.numel / 512) * scale
    own = DTYPES.get(side.dtype, DTYPES["bfloat16"])
    roundings = _MEAN_ROUNDINGS + (summary.numel / _NORM_ELEMENTS_PER_ROUNDING if name == "rms" else 0)
    lost = math.sqrt(own.tiny if own.size_bytes > 4 else DTYPES["float32"].tiny) if name == "rms" else own.tiny
    return value * max(own.eps, _FLOAT32_EPS) + roundings * _FLOAT32_EPS * scale + lost


def _exceeds_float32(dtype: str) -> bool:
    return dtype not in DTYPES or DTYPES[dtype].size_bytes > 4 or dtype in ("int32", "uint32")


def _largest_rms(side: _Side) -> float | None:
    """Bound the rms of a side from above, as tightly as its statistics allow; None where they allow no bound."""
    summary = side.summary
    bounds = []
    if summary.rms is not None and math.isfinite(summary.rms) and (summary.rms > 0 or not _is_foreign(summary)):
        bounds.append(summary.rms + _rounding("rms", side, side))
    if summary.abs_max is not None and math.isfinite(summary.abs_max):
        bounds.append(summary.abs_max + max(_rounding("min", side, side), _rounding("max", side, side)))
    return min(bounds, default=None)


def _scale(summary: Summary) -> float:
    return _finite_or_zero(summary.rms) or _finite_or_zero(summary.abs_max)


def _finite_or_zero(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
