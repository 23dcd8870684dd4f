# SPDX-License-Identifier: Apache-2.0
"""What the comparison did not or could not look at. Nothing here is a fault, and nothing is left unsaid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field

from ulpscope.explain.arithmetic.precision import precision_note
from ulpscope.explain.gaps import TOLD_GAPS
from ulpscope.explain.wording import count, listed
from ulpscope.model import Bands, Finding, Gap, JudgedCall, LedgerEntry, SystemicPrecision
from ulpscope.model.nouns import dataclass

__all__ = ["Circumstances", "explain_circumstances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What is known besides the judged calls: parts on one side only, steps that were never closed, both ledgers,
    the formats that a side rounds operands to, what was not replayed, and how far the reference
    is from itself. `later` stands for calls that differ in steps that were not kept, each by one like it; `gaps` are what was
    not compared."""

    notes: tuple[str, ...] = ()
    precision: tuple[SystemicPrecision, ...] = ()
    replay: tuple[str, ...] = ()
    bands: Bands | None = None
    later: Sequence[JudgedCall] = ()
    incomplete: tuple[str, ...] = ()
    ledgers: dict[str, tuple[LedgerEntry, ...]] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()


def explain_circumstances(calls: Sequence[JudgedCall], circumstances: Circumstances, *, is_doubt_said: bool = False) -> list[Finding]:
    """`is_doubt_said`: a finding of its own speaks of the slots that differ bitwise by an unknown amount."""
    findings = [precision_note(one) for one in circumstances.precision]
    findings += [_note(text) for text in (*circumstances.notes, *circumstances.replay)]
    if circumstances.incomplete:
        findings.append(
            _note(f"{count(len(circumstances.incomplete), 'step')} not closed by the writer: {listed(circumstances.incomplete)}")
        )
    findings += [_ledger_note(side, entries) for side, entries in circumstances.ledgers.items() if entries]
    findings += [_gap_note(gap) for gap in circumstances.gaps if gap.kind == "phase" or gap.why in TOLD_GAPS]
    return findings + _unmeasured_notes(calls, is_doubt_said)


def _note(headline: str, evidence: Sequence[str] = ()) -> Finding:
    return Finding(level="note", kind="coverage", headline=headline, evidence=tuple(evidence))


def _ledger_note(side: str, entries: Sequence[LedgerEntry]) -> Finding:
    total = sum(entry.count for entry in entries)
    lines = [f"could not {entry.what}: {entry.why}" + (f" ({entry.count} times)" if entry.count > 1 else "") for entry in entries[:5]]
    return _note(f"recording the {side} left {count(total, 'thing')} out", lines)


def _gap_note(gap: Gap) -> Finding:
    verb = "was" if gap.many == 1 else "were"
    return _note(f"{count(gap.many, gap.kind)} {verb} not compared and not shown harmless: {gap.why}", [f"first {listed(gap.places)}"])


def _unmeasured_notes(calls: Sequence[JudgedCall], is_doubt_said: bool) -> list[Finding]:
    slots = [slot for call in calls for slot in call.slots]
    unsaid = [
        slot
        for slot in slots
        if slot.verdict.level == "unmeasured" and slot.behind is None and not (is_doubt_said and slot.differs_by_unknown)
    ]
    if not unsaid:
        return []
    reasons = Counter(slot.verdict.reason for slot in unsaid)
    headline = f"{len(unsaid)} of {count(len(slots), 'slot')} could not be measured; record with keep statistics or tensors for numbers"
    return [_note(headline, [f"{many}: {reason}" for reason, many in reasons.most_common(3)])]
