# SPDX-License-Identifier: Apache-2.0
"""Systemic precision: a side whose matrix products round their operands to a narrower format, in every call.

That is a property of the machine and one finding, not a fault in a thousand calls. It is recognised where products on
inputs that agree differ by what such operands give (0.8 units of the format, as noise: neither a scale nor a few elements), and
no such product agrees. Only matrix products and convolutions qualify: a wrong kernel that errs alike in every call does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, sqrt

from ulpscope.judge.allowance.conditioning import COMPOSITES, CONTRACTIONS, plain_name
from ulpscope.judge.allowance.sizes import dtypes_of, is_equal, looks_scaled
from ulpscope.judge.thresholds import threshold
from ulpscope.model import DTYPES, DType, JudgedCall, JudgedSlot, SummaryMeasurement, TensorMeasurement, Undefined

__all__ = ["FORMATS", "likely_format", "operand_format"]

FORMATS = (DTYPES["float16"], DTYPES["bfloat16"])
"""Formats of operands, finest first. TF32 has float16's precision and a wider range."""


def operand_format(calls: Sequence[JudgedCall]) -> DType | None:
    """The finest format that explains how matrix products differ; None where they agree or differ otherwise."""
    for narrow in FORMATS:
        results = _telling_results(calls, narrow)
        like = [slot for slot in results if _errs_like(slot, narrow)]
        beyond = sum(slot.verdict.level == "differs" for slot in like)
        if beyond and len(like) >= threshold("systemic_share") * len(results):
            return narrow
    return None


def likely_format(calls: Sequence[JudgedCall], finest: DType) -> DType:
    """Which format it is: statistics bound errors from below, so the finest that explains them may be too fine; their noise tells."""
    noise = [_noise(slot) for slot in _telling_results(calls, finest) if isinstance(slot.measurement, SummaryMeasurement)]
    from statistics import median  # rarely needed

    size = median(one for one in noise if one) if any(noise) else finest.eps / 2
    return min((one for one in FORMATS if one.eps >= finest.eps), key=lambda one: abs(log(size / (one.eps / 2))))


def _telling_results(calls: Sequence[JudgedCall], narrow: DType) -> list[JudgedSlot]:
    """Statistics that all moved by one factor tell nothing of a format: a wrong scale does that, and noise by chance."""
    results = [slot for call in calls if _is_telling(call, narrow) for slot in call.slots if slot.pair.slot.role == "output"]
    return [slot for slot in results if not (isinstance(slot.measurement, SummaryMeasurement) and _shows_scale(slot))]


def _is_telling(call: JudgedCall, narrow: DType) -> bool:
    """A matrix product in full precision, forward, whose inputs agree far better than its result would."""
    record = call.pair.record
    is_product = plain_name(record.call) in CONTRACTIONS | COMPOSITES
    if record.phase != "forward" or record.level == "module" or not is_product or record.recompute:
        return False
    given = [slot for slot in call.slots if record.receives(slot.pair.slot)]
    dtypes = [one for slot in call.slots for one in dtypes_of(slot.pair)]
    return bool(given) and all(_agrees(one, narrow) for one in given) and all(one.mantissa >= 23 for one in dtypes)


def _agrees(slot: JudgedSlot, narrow: DType) -> bool:
    """Statistics give only a lower bound of the distance, so there the call that made the value has to be found honest too."""
    near, found = threshold("systemic_low") * narrow.eps / 8, slot.measurement
    if is_equal(found):
        return True
    is_honest = isinstance(found, TensorMeasurement) or slot.verdict.level == "rounding"
    return isinstance(found, (TensorMeasurement, SummaryMeasurement)) and is_honest and found.distance <= near


def _errs_like(slot: JudgedSlot, narrow: DType) -> bool:
    unit = narrow.eps / 2
    low, high = threshold("systemic_low") * unit, threshold("systemic_high") * unit
    measurement = slot.measurement
    if isinstance(measurement, SummaryMeasurement):
        return measurement.equal is not True and low <= _noise(slot) and measurement.distance <= high
    if not isinstance(measurement, TensorMeasurement) or measurement.num_nan_disagree or measurement.num_inf_disagree:
        return False
    if isinstance(measurement.rel_l2, Undefined) or looks_scaled(measurement):
        return False
    return measurement.distance <= 1.5 * measurement.rel_l2 and low <= measurement.rel_l2 <= high


def _noise(slot: JudgedSlot) -> float:
    """How large independent errors are that move the statistics so, over the size of the result; a mean moves by a root of n less."""
    ours, theirs = (record.summary if record else None for record in (slot.pair.subject, slot.pair.reference))
    if ours is None or theirs is None or not theirs.rms:
        return 0.0
    root = sqrt(theirs.numel)
    moved = [
        (getattr(ours, name), getattr(theirs, name), weight) for name, weight in (("min", 1), ("max", 1), ("mean", root), ("rms", root))
    ]
    sizes = [(left - right) * weight / theirs.rms for left, right, weight in moved if left is not None and right is not None]
    return sqrt(sum(size * size for size in sizes) / len(sizes)) if sizes else 0.0


def _shows_scale(slot: JudgedSlot) -> bool:
    """Whether extremes and rms all moved by the same factor: noise moves each its own way."""
    ours, theirs = (record.summary if record else None for record in (slot.pair.subject, slot.pair.reference))
    pairs = [(getattr(ours, name, None), getattr(theirs, name, None)) for name in ("min", "max", "rms")]
    moved = sorted(left / right - 1 for left, right in pairs if left is not None and right)
    return len(moved) > 1 and (0 < moved[-1] <= 2 * moved[0] or 2 * moved[-1] <= moved[0] < 0)
