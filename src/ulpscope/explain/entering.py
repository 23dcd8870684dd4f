# SPDX-License-Identifier: Apache-2.0
"""A value differs that no recorded call made: data before the first call, or something between two calls that was not recorded."""

from __future__ import annotations

from ulpscope.explain.batch import ADVICE
from ulpscope.explain.views import Divergence, StepView
from ulpscope.explain.wording import at_place, call_text, difference_line, finding_at
from ulpscope.model import Finding, JudgedCall, JudgedSlot

__all__ = ["explain_entering", "is_regrouped"]

_UNSEEN = (
    "record more of what lies between (level both or op, no --select), and look for code that writes to this tensor outside torch calls"
)
_NOISE = 2.0**-14
_COLLECTIVES = ("distributed.", "c10d", "_c10d")


def explain_entering(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "entered" or found.lone or is_regrouped(view, found):
        return None
    record = found.call.pair.record
    place = f"{call_text(record, found.slot.pair.slot)}, {at_place(record)}"
    evidence = [difference_line(found.slot), "no recorded call made this difference"]
    if found.is_first_call:
        return finding_at("fault", "batch", f"inputs differ before the first call: {place}", found.call, found.slot, evidence, ADVICE)
    kind = {"backward": "backward", "optimizer": "optimizer"}.get(record.phase, "calls")
    return finding_at("fault", kind, f"a value changes between calls: {place}", found.call, found.slot, evidence, _UNSEEN)


def is_regrouped(view: StepView, found: Divergence) -> bool:
    """Whether a call is given other shapes (one bucket against many, fused weights) and nothing that follows on equal shapes differs.

    Then the work is only cut into other pieces. Without an optimizer to look at, nothing says so.
    """
    if _has_same_shapes(found.slot):
        return False
    after = view.calls[next(at for at, call in enumerate(view.calls) if call is found.call) + 1 :]
    comparable = [call for call in after if all(_has_same_shapes(slot) for slot in call.slots)]
    is_seen = any(call.pair.record.phase == "optimizer" and call.slots for call in comparable)
    return is_seen and not any(_differs(call) for call in comparable if call.pair.record.phase != "start")


def _differs(call: JudgedCall) -> bool:
    """Of an optimizer the gradients count that are more than the rounding of the others: a key bias has none in exact arithmetic."""
    if call.pair.record.phase != "optimizer":
        return call.level == "differs" and not call.pair.record.call.op.startswith(_COLLECTIVES)
    sizes = [(slot, _rms(slot)) for slot in call.slots if slot.pair.slot.role == "gradient"]
    largest = max((size for _, size in sizes), default=0.0)
    return any(slot.verdict.level == "differs" and size > _NOISE * largest for slot, size in sizes)


def _rms(slot: JudgedSlot) -> float:
    found = [side.summary.rms for side in (slot.pair.subject, slot.pair.reference) if side is not None and side.summary is not None]
    return max((rms for rms in found if rms is not None), default=0.0)


def _has_same_shapes(slot: JudgedSlot) -> bool:
    ours, theirs = slot.pair.subject, slot.pair.reference
    return ours is None or theirs is None or ours.shape == theirs.shape
