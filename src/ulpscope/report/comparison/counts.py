# SPDX-License-Identifier: Apache-2.0
"""Count the calls of a comparison by verdict: the numbers under every report."""

from __future__ import annotations

from collections import Counter

from ulpscope.model import Comparison, JudgedCall
from ulpscope.model.nouns import dataclass

__all__ = ["Counts", "call_state", "count_calls", "count_states", "lone_side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of calls by verdict and by contribution.

    `compared` calls exist on both sides: the sum of same, rounding, differs, unmeasured and partial. A `partial` call has a slot that only
    one side knows, and no worse verdict. `inherited`, `amplified` and `masked` calls are among those that differ, and an error begins at a
    `contributed` one. The page shows these words as the state of a call; a fault uses them for its consequences.
    """

    calls: int
    slots: int
    compared: int
    same: int
    rounding: int
    differs: int
    unmeasured: int
    partial: int
    contributed: int
    inherited: int
    amplified: int
    masked: int
    only_subject: int
    only_reference: int


def lone_side(call: JudgedCall) -> str | None:
    """Return the only side that has this call; None where both have it."""
    if call.pair.reference is None:
        return "subject"
    return "reference" if call.pair.subject is None else None


def call_state(call: JudgedCall) -> str:
    """Return the state of a call, from its verdict and its part in the error: the word that the page counts and colours by."""
    if call.contribution == "contributed":
        return "contributed"
    if call.level == "differs" and call.contribution in ("amplified", "inherited", "masked"):
        return call.contribution
    return call.level


def count_states(comparison: Comparison) -> Counter[str]:
    """Count the calls by their state, condensed steps included."""
    condensed = comparison.condensed
    return Counter(map(call_state, comparison.calls)) + (condensed.states if condensed else Counter())


def count_calls(comparison: Comparison) -> Counts:
    """Count the calls by verdict and by contribution, condensed steps included."""
    condensed = comparison.condensed
    levels: Counter[str] = Counter(condensed.levels if condensed else ())
    states = count_states(comparison)
    lone: Counter[str] = Counter(condensed.lone if condensed else ())
    num_slots, num_calls = (condensed.num_slots, condensed.num_calls) if condensed else (0, 0)
    for call in comparison.calls:
        num_slots += len(call.slots)
        side = lone_side(call)
        if side is None:
            levels[call.level] += 1
        else:
            lone[side] += 1
    return Counts(
        calls=num_calls + len(comparison.calls),
        slots=num_slots,
        compared=levels.total(),
        same=levels["same"],
        rounding=levels["rounding"],
        differs=levels["differs"],
        unmeasured=levels["unmeasured"],
        partial=levels["unmatched"],
        contributed=states["contributed"],
        inherited=states["inherited"],
        amplified=states["amplified"],
        masked=states["masked"],
        only_subject=lone["subject"],
        only_reference=lone["reference"],
    )
