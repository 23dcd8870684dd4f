# SPDX-License-Identifier: Apache-2.0
"""How many calls got which verdict: the numbers under every report."""

from __future__ import annotations

from collections import Counter

from ulpscope.model import Comparison
from ulpscope.model.nouns import dataclass

__all__ = ["Counts", "count_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Calls by verdict and by contribution.

    `compared` calls exist on both sides: same + rounding + differs + unmeasured + partial of them. A `partial` call has a
    slot that only one side knows, and no worse verdict.
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


def count_calls(comparison: Comparison) -> Counts:
    condensed = comparison.condensed
    levels: Counter[str] = Counter(condensed.levels if condensed else ())
    contributions: Counter[str] = Counter(condensed.contributions if condensed else ())
    num_slots, num_calls = (condensed.num_slots, condensed.num_calls) if condensed else (0, 0)
    only_subject = only_reference = 0
    for call in comparison.calls:
        num_slots += len(call.slots)
        contributions[call.contribution] += 1
        if call.pair.reference is None:
            only_subject += 1
        elif call.pair.subject is None:
            only_reference += 1
        else:
            levels[call.level] += 1
    return Counts(
        calls=num_calls + len(comparison.calls),
        slots=num_slots,
        compared=levels.total(),
        same=levels["same"],
        rounding=levels["rounding"],
        differs=levels["differs"],
        unmeasured=levels["unmeasured"],
        partial=levels["unmatched"],
        contributed=contributions["contributed"],
        inherited=contributions["inherited"],
        amplified=contributions["amplified"],
        masked=contributions["masked"],
        only_subject=only_subject,
        only_reference=only_reference,
    )
