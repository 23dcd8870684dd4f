# SPDX-License-Identifier: Apache-2.0
"""The rule set `derived`: a slot differs when it is farther apart than the arithmetic of its call explains.

allowed = rounding units of the dtype + `amplification` (8) times the distance of the call's inputs, scaled by the size of the terms that
were summed.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, prod

from ulpscope.judge.allowance.allowances import Allowance
from ulpscope.judge.allowance.jumps import error_beyond_jumps
from ulpscope.judge.allowance.sizes import is_coherent, is_equal, is_floating
from ulpscope.judge.thresholds import threshold
from ulpscope.model import (
    FingerprintMeasurement,
    Measurement,
    NotMeasured,
    SlotPair,
    SummaryMeasurement,
    TensorMeasurement,
    TensorRecord,
    Undefined,
    Verdict,
)
from ulpscope.model.operations.unwritten import is_unwritten

__all__ = ["derived", "verdict_without_numbers"]


def derived(pair: SlotPair, measurement: Measurement, allowance: Allowance) -> Verdict:
    if allowance.is_known_honest and not is_equal(measurement):
        return Verdict("rounding", "derived", "made by a call that erred within its allowance", _at_most_one(measurement, allowance))
    settled = verdict_without_numbers("derived", pair, measurement)
    if settled is not None:
        is_other_start = allowance.is_start and isinstance(measurement, FingerprintMeasurement) and not is_floating(pair)
        return Verdict("differs", "exact", "differs bitwise", inf) if is_other_start and settled.level == "unmeasured" else settled
    assert isinstance(measurement, (TensorMeasurement, SummaryMeasurement))
    if not is_floating(pair):
        return _exact(measurement, allowance)
    if allowance.is_given:
        return _given(measurement, allowance)
    return _made(pair, measurement, allowance)


def verdict_without_numbers(rule: str, pair: SlotPair, measurement: Measurement) -> Verdict | None:
    """What is settled before any yardstick is needed; None where one is."""
    if pair.subject is None or pair.reference is None:
        return Verdict("unmatched", rule, f"only the {'reference' if pair.subject is None else 'subject'} has this slot")
    if is_equal(measurement):
        return Verdict("same", rule, "agrees bitwise", 0.0)
    if pair.subject.shape != pair.reference.shape:
        return _other_shape(rule, pair.subject, pair.reference)
    if isinstance(measurement, NotMeasured):
        if is_unwritten(pair.subject) and is_unwritten(pair.reference):
            return Verdict("same", rule, "memory that nobody wrote to is not compared", 0.0)
        return Verdict("unmeasured", rule, measurement.reason)
    if isinstance(measurement, FingerprintMeasurement):
        return Verdict("unmeasured", rule, "differs bitwise, size unknown: only fingerprints were kept")
    return None


def _other_shape(rule: str, subject: TensorRecord, reference: TensorRecord) -> Verdict:
    reason = f"shapes differ: {list(subject.shape)} and {list(reference.shape)}"
    if subject.fingerprint is not None and (subject.fingerprint, subject.dtype) == (reference.fingerprint, reference.dtype):
        return Verdict("same", rule, f"{reason}, the values agree bitwise", 0.0)
    if prod(subject.shape) == prod(reference.shape):
        return Verdict("unmeasured", rule, f"{reason}, with as many elements")
    return Verdict("differs", rule, reason, inf)


def _at_most_one(measurement: Measurement, allowance: Allowance) -> float:
    is_number = isinstance(measurement, (TensorMeasurement, SummaryMeasurement))
    return min(_given(measurement, allowance).multiple or 0.0, 1.0) if is_number else 1.0  # type: ignore[arg-type]


def _exact(measurement: TensorMeasurement | SummaryMeasurement, allowance: Allowance) -> Verdict:
    if isinstance(measurement, SummaryMeasurement) and measurement.equal is None and measurement.distance == 0:
        return Verdict("rounding", "exact", "the statistics agree; nothing else was kept that could be compared", 0.0)
    if allowance.is_given or not allowance.entering:
        return Verdict("differs", "exact", "integers and booleans have to agree exactly where the inputs do", inf)
    if not isinstance(measurement, TensorMeasurement) or not isfinite(allowance.entering):
        return Verdict("rounding" if allowance.inputs_agree else "differs", "exact", "the inputs differ, so integers may flip", 0.0)
    free = threshold("flips") + threshold("flip_share") * allowance.entering * measurement.numel
    multiple = measurement.num_different / free
    level = "differs" if multiple > 1 or not allowance.inputs_agree else "rounding"
    return Verdict(level, "exact", f"{measurement.num_different} of {measurement.numel} elements flip", multiple)  # type: ignore[arg-type]


def _given(measurement: TensorMeasurement | SummaryMeasurement, allowance: Allowance) -> Verdict:
    limit = allowance.units + threshold("amplification") * allowance.drift
    multiple = _ratio(measurement.distance, limit)
    if multiple > 1 and allowance.terms and isfinite(allowance.error):
        multiple = min(multiple, _ratio(allowance.error, allowance.units * allowance.terms + allowance.carried))
    if multiple <= 1:
        return Verdict("rounding", "derived", f"within what calls before it explain{_bound(measurement)}", multiple)
    return Verdict("differs", "derived", f"{multiple:.3g}x what calls before it explain{_bound(measurement)}", multiple)


def _made(pair: SlotPair, measurement: TensorMeasurement | SummaryMeasurement, allowance: Allowance) -> Verdict:
    is_scale = is_coherent(pair, measurement)
    if is_scale and not allowance.inputs_scaled:
        allowance = _without_noise(allowance)
    multiple = _ratio(*_error_and_limit(measurement, allowance))
    if multiple > 1 and allowance.can_flip and allowance.entering:
        multiple = min(multiple, _flip_multiple(pair, measurement, allowance))
    if 1 < multiple <= threshold("amplified") and _may_magnify(allowance) and not is_scale:
        if allowance.entering < measurement.distance:
            return Verdict("rounding", "amplified", f"{multiple:.3g}x what is allowed: magnifies the difference of its inputs", multiple)
        return Verdict("rounding", "derived", f"{multiple:.3g}x what is allowed, and no farther apart than its inputs", multiple)
    if multiple > 1:
        what = "rounding explains" if not allowance.entering else "rounding and the difference of its inputs explain"
        return Verdict("differs", "derived", f"{multiple:.3g}x what {what}{_bound(measurement)}", multiple)
    if allowance.inputs_agree:
        return Verdict("rounding", "derived", f"{multiple:.3g}x what rounding explains{_bound(measurement)}", multiple)
    if measurement.distance <= allowance.units + threshold("amplification") * allowance.drift:
        return Verdict("rounding", "derived", f"agrees although its inputs differ{_bound(measurement)}", multiple)
    return Verdict("differs", "derived", f"no more than the difference of its inputs explains{_bound(measurement)}", multiple)


def _may_magnify(allowance: Allowance) -> bool:
    """Whether there is a difference of the inputs, all of which can be compared."""
    return allowance.inputs_agree and allowance.inputs_known and allowance.entering > 0


def _without_noise(allowance: Allowance) -> Allowance:
    """For a change of scale that the inputs do not have: noise that enters explains only a part of it."""
    part = 1 / threshold("scale")
    return replace(allowance, entering=allowance.entering * part, carried=allowance.carried * part, narrowed=allowance.narrowed * part)


def _error_and_limit(measurement: TensorMeasurement | SummaryMeasurement, allowance: Allowance) -> tuple[float, float]:
    """Absolute where the sizes are known, else relative to the reference."""
    limit = allowance.limit
    if isinstance(measurement, TensorMeasurement):
        if measurement.num_nan_disagree or measurement.num_inf_disagree:
            return inf, limit
        if not isinstance(measurement.rms_error, Undefined) and not isinstance(measurement.max_abs, Undefined) and limit:
            return max(measurement.rms_error, measurement.max_abs / threshold("peak")), limit
    elif limit and isfinite(allowance.error):
        return allowance.error, limit
    return measurement.distance, allowance.units + threshold("amplification") * allowance.entering


def _flip_multiple(pair: SlotPair, measurement: TensorMeasurement | SummaryMeasurement, allowance: Allowance) -> float:
    """Judged by the mean error, which a few jumps hardly move."""
    limit = allowance.limit + allowance.jump
    if not isinstance(measurement, TensorMeasurement):
        if allowance.is_step:
            return _ratio(allowance.error, limit) if allowance.jump else inf
        return _ratio(error_beyond_jumps(pair, measurement, allowance), limit)
    mean, largest = measurement.mean_abs, measurement.max_abs
    if isinstance(mean, Undefined) or isinstance(largest, Undefined) or measurement.num_nan_disagree or measurement.num_inf_disagree:
        return inf
    jumped = threshold("flips") * largest / max(measurement.numel, 1)
    return _ratio(max(mean - jumped, 0.0), limit)


def _ratio(value: float, limit: float) -> float:
    if limit == inf or value == 0:
        return 0.0
    return value / limit if limit > 0 else inf


def _bound(measurement: TensorMeasurement | SummaryMeasurement) -> str:
    return "" if isinstance(measurement, TensorMeasurement) else " (a lower bound: only statistics were kept)"
