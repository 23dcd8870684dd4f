# SPDX-License-Identifier: Apache-2.0
"""A clue: the subject's value is an old one. A buffer that was not written, an offset carried over, a gradient one step late."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ulpscope.explain.suspects import Suspect, before_in_step, in_steps, is_varied, value_of
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import call_text, slot_text
from ulpscope.model import SlotPair, TensorRecord

__all__ = ["clue_stale"]


def clue_stale(suspect: Suspect, views: Sequence[StepView]) -> list[str]:
    steps, now = in_steps(suspect, views), suspect.view.step
    name = slot_text(suspect.slot.pair.slot)
    then = max((step for step in steps if step < now), default=None)
    if now in steps and then is not None and _is_kept(steps[now], steps[then]):
        return [f"stale: the subject's {name} is what it was in step {then}; the reference's has changed"]
    if source := _old_value(suspect):
        return [f"stale: the subject's {name} is a value of step {source[0]} ({source[1]}); the reference's is a new one"]
    late = next((step for step in sorted(steps) if step >= now and _is_late(steps, step)), None)
    if late is not None:
        return [f"one step late: the subject's {name} of step {late} is the reference's of step {late - 1}"]
    return _kept_from_call(suspect, name)


def _old_value(suspect: Suspect) -> tuple[int, str] | None:
    """Where the subject's value stood in the step before, whatever the call was named; the reference's stood nowhere."""
    previous, pair = suspect.view.previous, suspect.slot.pair
    ours, theirs = value_of(pair.subject), value_of(pair.reference)
    if previous is None or ours is None or theirs is None or not is_varied(pair.subject) or _is_single(pair.subject):
        return None
    stood: str | None = None
    for call in previous.calls:
        for side, record in (("subject", call.pair.subject), ("reference", call.pair.reference)):
            for slot in record.slots if record is not None else ():
                if side == "reference" and value_of(slot) == theirs:
                    return None
                if side == "subject" and stood is None and record is not None and value_of(slot) == ours:
                    stood = call_text(record, slot.slot)
    return (previous.step, stood) if stood is not None else None


def _is_single(record: TensorRecord | None) -> bool:
    return record is not None and prod(record.shape) <= 1


def _kept_from_call(suspect: Suspect, name: str) -> list[str]:
    before = before_in_step(suspect)
    if before is None or not _is_kept(suspect.slot.pair, before[1]):
        return []
    call = before[0].pair.record.call
    return [f"stale: the subject's {name} is that of the call before ({call.short}, call {call.index}); the reference's are not the same"]


def _is_kept(now: SlotPair, then: SlotPair) -> bool:
    """Whether the subject still has what it had, and the reference does not."""
    ours, theirs = value_of(now.subject), value_of(now.reference)
    is_known = ours is not None and theirs is not None and value_of(then.reference) is not None
    return is_known and ours == value_of(then.subject) and theirs != value_of(then.reference)


def _is_late(steps: dict[int, SlotPair], step: int) -> bool:
    if step - 1 not in steps or not is_varied(steps[step].subject) or value_of(steps[step].subject) == value_of(steps[step - 1].subject):
        return False
    ours, before = value_of(steps[step].subject), value_of(steps[step - 1].reference)
    return ours is not None and ours == before and before != value_of(steps[step].reference)
