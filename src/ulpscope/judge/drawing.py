# SPDX-License-Identifier: Apache-2.0
"""Results of random calls: two sides that drew other numbers are judged by what both distributions show, not element by element."""

from __future__ import annotations

from math import isfinite, sqrt

from ulpscope.judge.thresholds import threshold
from ulpscope.model import CallRecord, PairReplay, SlotPair, Summary, Verdict

__all__ = ["draws_numbers", "judge_drawn"]


def draws_numbers(record: CallRecord, replay: PairReplay | None) -> bool:
    """Whether a call draws random numbers: seen by replaying it twice, else guessed by its name."""
    if replay is not None and (replay.subject.slots or replay.reference.slots):
        return replay.subject.is_random or replay.reference.is_random
    return record.level != "module" and record.call.sounds_random


def judge_drawn(slot: SlotPair) -> Verdict:
    """Honest where share of zeros, mean and size agree as two samples of one distribution do."""
    ours, theirs = (record.summary if record else None for record in (slot.subject, slot.reference))
    if ours is None or theirs is None or not ours.numel or not theirs.numel:
        return Verdict("rounding", "random", "drew other numbers; no statistics were kept to judge them by", 0.0)
    multiple = max(_zeros_apart(ours, theirs), _moments_apart(ours, theirs)) / threshold("drawn")
    if multiple > 1:
        return Verdict("differs", "random", f"two draws of one distribution are not that far apart ({multiple:.3g}x)", multiple)
    return Verdict("rounding", "random", "drew other numbers of the same distribution", multiple)


def _zeros_apart(ours: Summary, theirs: Summary) -> float:
    """The difference of the shares of zeros in standard errors of that difference."""
    if ours.num_zero is None or theirs.num_zero is None:
        return 0.0
    share = (ours.num_zero + theirs.num_zero) / (ours.numel + theirs.numel)
    spread = share * (1 - share) * (1 / ours.numel + 1 / theirs.numel)
    apart = abs(ours.num_zero / ours.numel - theirs.num_zero / theirs.numel)
    return apart / (sqrt(spread) + 1 / ours.numel)


def _moments_apart(ours: Summary, theirs: Summary) -> float:
    """The difference of the mean squares over what the largest elements allow: one element may carry up to its square."""
    values = (ours.rms, theirs.rms, ours.abs_max, theirs.abs_max)
    if any(value is None or not isfinite(value) for value in values):
        return 0.0
    rms_ours, rms_theirs, largest_ours, largest_theirs = (float(value or 0.0) for value in values)
    size, largest = max(rms_ours, rms_theirs), max(largest_ours, largest_theirs)
    if not size:
        return 0.0
    return abs(rms_ours**2 - rms_theirs**2) / (size * largest * sqrt(1 / ours.numel + 1 / theirs.numel))
