# SPDX-License-Identifier: Apache-2.0
"""Results of random calls: two sides that drew other numbers are judged by what both distributions show, not element by element."""

from __future__ import annotations

from math import isfinite, sqrt

from ulpscope.judge.allowance.conditioning import plain_name
from ulpscope.judge.thresholds import threshold
from ulpscope.model import CallRecord, PairReplay, SlotPair, Summary, Verdict
from ulpscope.model.operations.randomness import draws

__all__ = ["draws_numbers", "judge_draw_of", "judge_drawn"]


def draws_numbers(record: CallRecord, replay: PairReplay | None, forward: CallRecord | None = None) -> bool:
    """Whether a call draws random numbers, by its name and arguments, or as a replay with other seeds showed.

    A backward record has no arguments of its own: those of its forward call say whether that one drew.
    """
    if replay is not None and (replay.subject.is_random or replay.reference.is_random):
        return True
    return record.level != "module" and draws(record.call.op, (forward or record).arguments)


_ELEMENT_BY_ELEMENT = frozenset(
    """
    dropout native_dropout fused_dropout alpha_dropout bernoulli rand rand_like randn randn_like randint randint_like random normal uniform
    exponential geometric cauchy log_normal trunc_normal poisson binomial rrelu rrelu_with_noise
    """.split()
)


def judge_draw_of(record: CallRecord, slot: SlotPair) -> Verdict:
    """Judge what a call drew by its distribution, where it draws for each element of its own; any other draw is honest.

    An attention that drops one weight changes a whole row, and how many draws stand behind its result is not known.
    """
    if plain_name(record.call) in _ELEMENT_BY_ELEMENT:
        return judge_drawn(slot)
    return Verdict("rounding", "random", "drew other numbers", 0.0)


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
