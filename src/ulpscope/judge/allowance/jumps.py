# SPDX-License-Identifier: Apache-2.0
"""What statistics say of a result in which a few elements may have jumped: a gradient that a near tie hands to another element."""

from __future__ import annotations

from math import inf, isfinite, sqrt

from ulpscope.judge.allowance.allowances import Allowance
from ulpscope.judge.allowance.conditioning import HANDING_ON, plain_name
from ulpscope.judge.thresholds import rounding_units, threshold
from ulpscope.model import DTYPES, CallRecord, Pair, SlotPair, Summary, SummaryMeasurement, TensorRecord

__all__ = ["error_beyond_jumps", "keeps_sum"]


def error_beyond_jumps(pair: SlotPair, measurement: SummaryMeasurement, allowance: Allowance) -> float:
    """The least error of mean and rms that jumps leave unexplained; minimum and maximum are single elements and tell nothing.

    An element jumps by no more than others are large, so that a new order of magnitude is no jump.
    """
    ours, theirs = (record.summary if record else None for record in (pair.subject, pair.reference))
    if ours is None or theirs is None or not ours.numel or not isfinite(measurement.distance):
        return inf
    smaller, largest = sorted((ours.abs_max or 0.0, theirs.abs_max or 0.0))
    if largest > threshold("jump_size") * smaller:
        return inf
    share = threshold("flips") / ours.numel + threshold("flip_share") * allowance.entering
    return max(_mean_error(ours, theirs) - share * largest, _rms_error(ours, theirs, share * largest**2), 0.0)


def _mean_error(ours: Summary, theirs: Summary) -> float:
    return inf if ours.mean is None or theirs.mean is None else abs(ours.mean - theirs.mean)


def _rms_error(ours: Summary, theirs: Summary, jumped: float) -> float:
    """How far the rms is apart when so much of the larger mean square has come by jumps."""
    if ours.rms is None or theirs.rms is None:
        return inf
    low, high = sorted((ours.rms, theirs.rms))
    return sqrt(max(high * high - jumped, 0.0)) - low


def keeps_sum(pair: Pair) -> bool:
    """Whether no side loses or gains anything where gradients are only handed on: other elements may get them, but their sum stays."""
    is_handing_on = pair.record.phase == "backward" and plain_name(pair.record.call) in HANDING_ON
    return not is_handing_on or all(_side_keeps_sum(record) for record in (pair.subject, pair.reference) if record is not None)


def _side_keeps_sum(record: CallRecord) -> bool:
    given, made = ([slot for slot in record.slots if record.receives(slot.slot) is is_given] for is_given in (True, False))
    sums = [_sum(slot) for slot in (*given, *made)]
    if len(given) != 1 or len(made) != 1 or None in sums:
        return True
    apart = abs((sums[0] or 0.0) - (sums[1] or 0.0))
    return apart <= max(rounding_units(DTYPES.get(slot.dtype)) * _most(slot) for slot in (*given, *made))


def _sum(slot: TensorRecord) -> float | None:
    summary = slot.summary
    return None if summary is None or summary.mean is None or summary.num_nonfinite else summary.mean * summary.numel


def _most(slot: TensorRecord) -> float:
    """The most that the magnitudes may add up to."""
    return slot.summary.numel * (slot.summary.rms or 0.0) if slot.summary else 0.0
