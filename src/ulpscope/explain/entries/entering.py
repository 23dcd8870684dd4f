# SPDX-License-Identifier: Apache-2.0
"""A value differs that no recorded call made: data before the first call, or something between two calls that was not recorded."""

from __future__ import annotations

from ulpscope.explain.contributions import made
from ulpscope.explain.entries.batch import ADVICE
from ulpscope.explain.views import Divergence, StepView, worst
from ulpscope.explain.wording import at_place, call_text, difference_line, finding_at, inputs_line
from ulpscope.model import Finding, JudgedCall, JudgedSlot

__all__ = ["entering_lines", "explain_entering", "is_regrouped"]

_UNSEEN = (
    "record more of what lies between (level both or op, no --select), and look for code that writes to this tensor outside torch calls"
)
_NOISE = 2.0**-14
_COLLECTIVES = ("distributed.", "c10d", "_c10d")


def explain_entering(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "entered" or found.lone or is_regrouped(view, found):
        return None
    if found.slot.verdict.rule == "zeros" and (zeros := _explain_zeros(view, found)) is not None:
        return zeros
    record = found.call.pair.record
    place = f"{call_text(record, found.slot.pair.slot)}, {at_place(record)}"
    evidence = [*entering_lines(found), "no recorded call made this difference"]
    if found.is_first_call:
        return finding_at("fault", "batch", f"inputs differ before the first call: {place}", found.call, found.slot, evidence, ADVICE)
    kind = {"backward": "backward", "optimizer": "optimizer"}.get(record.phase, "calls")
    return finding_at("fault", kind, f"a value changes between calls: {place}", found.call, found.slot, evidence, _UNSEEN)


def _explain_zeros(view: StepView, found: Divergence) -> Finding | None:
    """Blame the call that made a zero of another sign, where the call that tells them apart was only given it."""
    maker = view.maker_of(view.position(found.call), found.slot)
    if maker is None:
        return None
    call, slot = view.calls[maker[0]], maker[1]
    record, told = call.pair.record, call_text(found.call.pair.record, found.slot.pair.slot)
    headline = f"zeros of other signs: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [f"the values agree, but for the signs of zeros, and {told} tells them apart", inputs_line(call)]
    result = worst(made(found.call))
    evidence += [f"there {difference_line(result)}"] if result is not None else []
    kind = "backward" if record.phase == "backward" else "contributed"
    return finding_at("fault", kind, headline, call, slot, evidence, "look at what makes a zero negative on one side only")


def entering_lines(found: Divergence) -> list[str]:
    """The difference that comes in, and what a call made of it where only that could be measured."""
    lines = [difference_line(found.slot)]
    return (
        lines
        if found.result is None or found.result is found.slot
        else [*lines, difference_line(found.result), found.result.verdict.reason]
    )


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
