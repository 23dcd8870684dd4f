# SPDX-License-Identifier: Apache-2.0
"""Measure from values. One pass adds everything up (`numerics.difference`); this file turns the sums into metrics.

Means, maxima, cosine and units in the last place are over the positions where both sides are finite. The shares `within_*` are over all
elements: the same NaN or infinity on both sides counts as within, a disagreement does not. A complex number counts as two reals.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ulpscope.measure.metrics import METRICS
from ulpscope.model import DTYPES, Metric, Summary, TensorData, TensorMeasurement, TensorRecord, Undefined
from ulpscope.numerics.buffers import flat_view, real_dtype, value_at
from ulpscope.numerics.difference.difference import difference
from ulpscope.numerics.difference.pair_sums import BUCKETS, Difference, distance_in, quantiles

__all__ = ["measure_equal", "measure_sums", "measure_tensors", "with_shape"]

_ZERO_REFERENCE = Undefined("the reference is all zero")
_FINITE_METRICS = tuple(
    name for name, entry in METRICS.items() if entry.format != "d" and name not in ("distance", "rms_subject", "rms_reference")
)


def measure_tensors(subject: TensorData, reference: TensorData) -> TensorMeasurement:
    """Measure two tensors of the same shape; their dtypes may differ."""
    left, right = flat_view(subject), flat_view(reference)
    found = difference(subject.dtype, left, reference.dtype, right)
    worst = found.worst_place
    values = (0.0, 0.0) if worst is None else (value_at(subject.dtype, left, worst), value_at(reference.dtype, right, worst))
    return measure_sums(subject.dtype, subject.shape, found, *values)


def measure_sums(dtype: str, shape: tuple[int, ...], found: Difference, worst_subject: float, worst_reference: float) -> TensorMeasurement:
    """Turn the sums of a pass over two tensors into a measurement; the dtype is the subject's, the values are those at the worst place."""
    if not DTYPES[dtype].is_floating and found.ulp_counts is not None:
        found.max_abs = float(found.ulp_max)  # between integers the same, and exact where float64 is not
    worst = found.worst_place
    if worst is None:
        return _measurement(found)
    parts = 2 if dtype != real_dtype(dtype) else 1
    return _measurement(found, _index(worst // parts, shape), worst_subject, worst_reference)


def measure_equal(record: TensorRecord, summary: Summary | None) -> TensorMeasurement:
    """Measure two tensors that are known to be equal from the statistics of either, without reading their values."""
    numel = math.prod(record.shape) * (2 if record.dtype.startswith("complex") else 1)
    if summary is None:
        found = _measurement(_no_difference(numel, 0, 1.0))
        unknown = Undefined("no statistics were kept, and the values were not read")
        return replace(found, cosine=unknown, max_rel=0.0, rms_subject=0.0, rms_reference=0.0)
    return _measurement(_no_difference(numel, summary.num_nonfinite or 0, summary.rms or 0.0))


def with_shape(found: TensorMeasurement, shape: tuple[int, ...], other: tuple[int, ...]) -> TensorMeasurement:
    """Turn a measurement in one shape into the measurement of the same values in another."""
    if found.worst_index is None:
        return found
    position = 0
    for at, size in zip(found.worst_index, shape, strict=True):
        position = position * size + at
    return replace(found, worst_index=_index(position, other))


def _no_difference(numel: int, nonfinite: int, rms: float) -> Difference:
    finite = numel - nonfinite
    fraction, exponent = math.frexp(rms)
    squares = fraction * fraction * finite
    counts = [finite] + [0] * (BUCKETS - 1)
    return Difference(
        numel=numel,
        sum_squares_subject=squares,
        sum_squares_reference=squares,
        sum_products=squares,
        within=[finite] * 3,
        nonfinite=nonfinite,
        ulp_counts=counts,
        exponent=exponent,
    )


def _measurement(
    found: Difference,
    worst_index: tuple[int, ...] | None = None,
    worst_subject: float | None = None,
    worst_reference: float | None = None,
) -> TensorMeasurement:
    finite = found.numel - found.nonfinite
    disagree = found.nan_disagree + found.inf_disagree
    different = found.different + disagree
    rms_subject, rms_reference = (_root_mean(total, found) for total in (found.sum_squares_subject, found.sum_squares_reference))
    metrics = _metrics(found, finite) if finite else dict.fromkeys(_FINITE_METRICS, _nothing_finite(found))
    return TensorMeasurement(
        numel=found.numel,
        equal=different == 0,
        distance=math.inf if disagree else _distance(found, finite),
        **metrics,
        num_different=different,
        num_sign_flips=found.sign_flips,
        num_nan_disagree=found.nan_disagree,
        num_inf_disagree=found.inf_disagree,
        worst_index=worst_index,
        worst_subject=worst_subject,
        worst_reference=worst_reference,
        rms_subject=rms_subject,
        rms_reference=rms_reference,
    )


def _metrics(found: Difference, finite: int) -> dict[str, Metric]:
    agreeing = found.nonfinite - found.nan_disagree - found.inf_disagree
    within = [(count + agreeing) / found.numel for count in found.within]
    return {
        "max_abs": _unscaled(found.max_abs, found),
        "max_rel": found.max_rel if found.sum_squares_reference else _ZERO_REFERENCE,
        "mean_abs": _unscaled(found.sum_abs / finite, found),
        "rms_error": _unscaled(_rms_error(found, finite), found),
        "rel_l2": _relative_length(found, finite),
        "cosine": _cosine(found, finite),
        "snr_db": _signal_to_noise(found, finite),
        "within_1e4": within[0],
        "within_1e3": within[1],
        "within_5e3": within[2],
        **_ulp_metrics(found),
    }


def _nothing_finite(found: Difference) -> Undefined:
    return Undefined("no position is finite on both sides" if found.numel else "the tensors are empty")


def _rms_error(found: Difference, finite: int) -> float:
    """Return the rms error, at least the largest error over the root of n: a sum of squares that underflows, or loses an integer, would be
    smaller.
    """
    return max(math.sqrt(found.sum_squares / finite), found.max_abs / math.sqrt(finite))


def _distance(found: Difference, finite: int) -> float:
    if not found.max_abs:
        return 0.0
    if not found.sum_squares_reference:
        return math.inf
    return max(_rms_error(found, finite), found.max_abs / 8) / math.sqrt(found.sum_squares_reference / finite)


def _relative_length(found: Difference, finite: int) -> Metric:
    if not found.max_abs:
        return 0.0
    if not found.sum_squares_reference:
        return _ZERO_REFERENCE
    return _rms_error(found, finite) / math.sqrt(found.sum_squares_reference / finite)


def _signal_to_noise(found: Difference, finite: int) -> Metric:
    if not found.max_abs:
        return Undefined("the values agree, so there is no noise")
    if not found.sum_squares_reference:
        return _ZERO_REFERENCE
    return 20 * math.log10(math.sqrt(found.sum_squares_reference / finite) / _rms_error(found, finite))


def _cosine(found: Difference, finite: int) -> Metric:
    if finite == 1:
        return Undefined("a single element has no direction")
    if not found.sum_squares_subject or not found.sum_squares_reference:
        return Undefined("one side is all zero")
    if not found.max_abs:
        return 1.0
    lengths = math.sqrt(found.sum_squares_subject) * math.sqrt(found.sum_squares_reference)
    return max(-1.0, min(1.0, found.sum_products / lengths))


def _ulp_metrics(found: Difference) -> dict[str, Metric]:
    if found.ulp_counts is None:
        return dict.fromkeys(("ulp_max", "ulp_p50", "ulp_p99"), Undefined("the two dtypes share no unit in the last place"))
    if found.ulp_buckets is not None:
        middle, high = (distance_in(bucket, found.ulp_max) for bucket in found.ulp_buckets)
    else:
        middle, high = quantiles(found.ulp_counts, (0.5, 0.99), found.ulp_max)
    return {"ulp_max": float(found.ulp_max), "ulp_p50": middle, "ulp_p99": high}


def _root_mean(total: float, found: Difference) -> float:
    finite = found.numel - found.nonfinite
    return _unscaled(math.sqrt(total / finite), found) if finite else 0.0


def _unscaled(value: float, found: Difference) -> float:
    try:
        return math.ldexp(value, found.exponent)
    except OverflowError:
        return math.inf


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of a position in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        index.append(at)
    return tuple(reversed(index))
