# SPDX-License-Identifier: Apache-2.0
"""How large the two sides of a slot are and how far apart: what the allowance of a call is computed from."""

from __future__ import annotations

from functools import lru_cache
from math import inf, isfinite, prod, sqrt

from ulpscope.judge.thresholds import threshold
from ulpscope.model import (
    DTYPES,
    DType,
    FingerprintMeasurement,
    Measurement,
    Metric,
    NotMeasured,
    SlotPair,
    SummaryMeasurement,
    TensorMeasurement,
    TensorRecord,
    Undefined,
    VerdictLevel,
)
from ulpscope.model.nouns import dataclass

__all__ = [
    "Size",
    "absolute_error",
    "distance",
    "dtypes_of",
    "is_coherent",
    "is_equal",
    "is_floating",
    "looks_scaled",
    "scale_apart",
    "size_of",
]


@dataclass(frozen=True, slots=True)
class Size:
    """`rms` is of the larger side, `error` the absolute difference, `distance` the difference over the reference's size."""

    rms: float
    error: float
    distance: float
    numel: int
    deviation: float = 0.0


def is_equal(measurement: Measurement) -> bool:
    return not isinstance(measurement, NotMeasured) and measurement.equal is True


def distance(measurement: Measurement) -> float | None:
    """How far apart, or None where nothing tells."""
    if isinstance(measurement, TensorMeasurement):
        return 0.0 if measurement.equal else measurement.distance
    if is_equal(measurement):
        return 0.0
    if isinstance(measurement, (NotMeasured, FingerprintMeasurement)):
        return None
    return measurement.distance


def absolute_error(measurement: Measurement) -> float:
    """The distance of two tensors before it is divided by the size of one; 0 where values were not compared."""
    if not isinstance(measurement, TensorMeasurement) or isinstance(measurement.rms_error, Undefined):
        return 0.0
    largest = 0.0 if isinstance(measurement.max_abs, Undefined) else measurement.max_abs
    return max(measurement.rms_error, largest / threshold("peak"))


def size_of(pair: SlotPair, measurement: Measurement, level: VerdictLevel, at_least: float = 0.0) -> Size | None:
    """The size of a slot that was judged `level`, or None where nothing tells.

    Integers and booleans that differ are infinitely far apart as an input, since any index is as good as another; a few that flipped
    within an allowance count as their share. A value judged honest is never farther apart than its own size; statistics give only a lower
    bound, so there it is taken to be `at_least` as far apart as honest values before it.
    """
    apart = distance(measurement)
    first, last = pair.subject or pair.reference, pair.reference or pair.subject
    if apart is None or first is None or last is None:
        return None
    rms, of_reference = _rms(measurement, pair)
    is_exact = bool(apart) and _is_exact(pair)
    if is_exact:
        apart = _flip_distance(measurement) if level == "rounding" else inf
    elif level == "rounding":
        apart = min(max(apart, at_least) if isinstance(measurement, SummaryMeasurement) else apart, 1.0)
    error = apart * (of_reference or rms) if isfinite(apart) else _absolute(measurement) if not is_exact else inf
    return Size(rms, error, apart, prod(first.shape), _deviation(last, rms))


def scale_apart(measurement: TensorMeasurement) -> float:
    """The change of scale that takes the reference nearest to the subject, relative; 0 where none is known."""
    cosine = measurement.cosine
    if isinstance(cosine, Undefined) or not measurement.rms_reference:
        return 0.0
    return abs(cosine * measurement.rms_subject / measurement.rms_reference - 1.0)


def dtypes_of(pair: SlotPair) -> tuple[DType, ...]:
    """The known dtypes of both sides."""
    subject, reference = pair.subject, pair.reference
    return _known("" if subject is None else subject.dtype, "" if reference is None else reference.dtype)


@lru_cache(maxsize=1024)
def _known(*names: str) -> tuple[DType, ...]:
    return tuple(DTYPES[name] for name in names if name in DTYPES)


def is_floating(pair: SlotPair) -> bool:
    """Whether a side has a dtype that rounds."""
    return any([one.is_floating for one in dtypes_of(pair)])


def _is_exact(pair: SlotPair) -> bool:
    return bool(dtypes_of(pair)) and not is_floating(pair)


def _flip_distance(measurement: Measurement) -> float:
    """Flipped elements, as if each had changed a value by its own size."""
    if isinstance(measurement, TensorMeasurement) and measurement.numel:
        return sqrt(measurement.num_different / measurement.numel)
    return 1.0


def _absolute(measurement: Measurement) -> float:
    """The absolute difference where the reference is all zero, so that no relative one exists; infinite for NaN and infinities."""
    if isinstance(measurement, TensorMeasurement):
        is_disagreeing = measurement.num_nan_disagree or measurement.num_inf_disagree
        return inf if is_disagreeing or isinstance(measurement.rms_error, Undefined) else absolute_error(measurement)
    if not isinstance(measurement, SummaryMeasurement) or _shows_nonfinite(measurement.differences):
        return inf
    parts = [measurement.differences.get(name, 0.0) for name in ("mean", "rms", "min", "max")]
    return max((abs(part) for part in parts if not isinstance(part, Undefined)), default=inf)


def _shows_nonfinite(differences: dict[str, Metric]) -> bool:
    counts = [differences.get(name, 0.0) for name in ("num_nan", "num_posinf", "num_neginf")]
    is_counted = any(count for count in counts if not isinstance(count, Undefined))
    return is_counted or any(isinstance(one, Undefined) and one.reason.startswith("NaN") for one in differences.values())


def _rms(measurement: Measurement, pair: SlotPair) -> tuple[float, float]:
    """The larger rms of the two sides, and the reference's."""
    if isinstance(measurement, TensorMeasurement) and (measurement.rms_subject or measurement.rms_reference):
        return max(measurement.rms_subject, measurement.rms_reference), measurement.rms_reference
    found = [_summary_rms(pair.subject), _summary_rms(pair.reference)]
    return max(found), found[1]


def _summary_rms(record: TensorRecord | None) -> float:
    rms = record.summary.rms if record is not None and record.summary is not None else None
    return rms if rms is not None and isfinite(rms) else 0.0


def _deviation(record: TensorRecord, rms: float) -> float:
    """Standard deviation as far as statistics tell; the rms where they do not."""
    summary = record.summary
    if summary is None or summary.mean is None or summary.rms is None or not isfinite(summary.mean):
        return rms
    return sqrt(max(summary.rms**2 - summary.mean**2, 0.0))


def is_coherent(pair: SlotPair, measurement: Measurement) -> bool:
    """Whether the difference is mostly a change of scale and cannot be noise, since many elements carry the size."""
    return isinstance(measurement, TensorMeasurement) and looks_scaled(measurement) and _num_carrying(pair, measurement) >= 64


def looks_scaled(measurement: TensorMeasurement) -> bool:
    """Whether the difference is mostly a change of scale, be it by chance."""
    if isinstance(measurement.cosine, Undefined) or isinstance(measurement.rel_l2, Undefined) or not measurement.rms_reference:
        return False
    scaled_by = measurement.cosine * measurement.rms_subject / measurement.rms_reference
    return abs(scaled_by - 1) >= measurement.rel_l2 / 2


def _num_carrying(pair: SlotPair, measurement: TensorMeasurement) -> float:
    """How many elements carry the size at least: all of them, or fewer where one stands out."""
    summary = pair.reference.summary if pair.reference else None
    if summary is None or not summary.abs_max or not isfinite(summary.abs_max):
        return 0.0
    return measurement.numel * (measurement.rms_reference / summary.abs_max) ** 2
