# SPDX-License-Identifier: Apache-2.0
"""Gradients stop flowing on one side: a detach, a no_grad, a frozen parameter. The forward values agree; only backward shows it.

What is named is the place in the forward pass where the first value stops being differentiable on one side only, not the
backward call that misses the gradient.
"""

from __future__ import annotations

from ulpscope.explain.flow import value_in
from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import Divergence, StepView
from ulpscope.explain.wording import at_place, call_text, count, difference_line, finding_at, listed, slot_text
from ulpscope.model import Finding, JudgedCall, JudgedSlot, Side, Slot, TensorRecord
from ulpscope.model.step_index import UNKNOWN

__all__ = ["explain_cut"]

_ADVICE = "let gradients flow through it on both sides, or on neither"


def explain_cut(view: StepView) -> Finding | None:
    """Asked where backward or the optimizer receives something else, or lacks it."""
    found = view.divergence
    if found is None or not _is_about_gradients(view, found):
        return None
    for call in view.calls:
        if call.pair.record.phase != "forward" or call.pair.record.recompute:
            continue
        slot = next((slot for slot in call.slots if _cut_side(slot) is not None), None)
        if slot is not None:
            return _finding(view, found, call, slot)
    return None


def _is_about_gradients(view: StepView, found: Divergence) -> bool:
    record = found.call.pair.record
    if record.phase == "backward":
        return found.how == "entered" or any(slot.verdict.level == "unmatched" for slot in found.call.slots)
    if record.phase != "optimizer":
        return False
    return bool(_lone_backward(view)) or any(_is_lone_gradient(slot) for slot in found.call.slots)


def _is_lone_gradient(slot: JudgedSlot) -> bool:
    return slot.pair.slot.role == "gradient" and slot.verdict.level == "unmatched"


def _cut_side(slot: JudgedSlot) -> Side | None:
    """The side on which a floating value is not differentiable although it is on the other."""
    ours, theirs = slot.pair.subject, slot.pair.reference
    if ours is None or theirs is None or ours.requires_grad == theirs.requires_grad or not (ours.device and theirs.device):
        return None
    return "reference" if ours.requires_grad else "subject"


def _finding(view: StepView, found: Divergence, call: JudgedCall, slot: JudgedSlot) -> Finding:
    side = _cut_side(slot) or "subject"
    blamed, what, blamed_slot = _origin(view, call, slot, side)
    record = blamed.pair.record
    headline = f"gradients stop in the {side} only: {call_text(record, blamed_slot.pair.slot if blamed_slot else None)}, {at_place(record)}"
    evidence = [what, *_mode_lines(call, slot), *_missing_lines(view), difference_line(found.slot)]
    kind = "calls" if blamed.contribution == "unmatched" else "parameters" if record.phase == "start" else "arguments"
    return finding_at("fault", kind, headline, blamed, blamed_slot, evidence, _ADVICE)


def _origin(view: StepView, call: JudgedCall, slot: JudgedSlot, side: Side) -> tuple[JudgedCall, str, JudgedSlot | None]:
    """The call on one side that made the value and cut it, the parameter that is frozen, else the first call that shows it."""
    name = slot_text(slot.pair.slot)
    if not call.pair.record.receives(slot.pair.slot):
        return call, f"{name} does not require gradients in the {side}, although what enters agrees", slot
    record: TensorRecord = getattr(slot.pair, side)
    maker = _cutter(view, call, slot, side)
    if maker is not None:
        return maker, f"its result enters {call_text(call.pair.record, slot.pair.slot)} and does not require gradients", None
    start = _parameter(view, record, side)
    if start is not None:
        return start[0], f"{slot_text(start[1].pair.slot)} does not require gradients in the {side}", start[1]
    return call, f"{name} does not require gradients in the {side}, and no recorded call made it so", slot


def _cutter(view: StepView, call: JudgedCall, slot: JudgedSlot, side: Side) -> JudgedCall | None:
    """The first call of one side that gave the value on, or made it, so that it requires no gradients."""
    flow, at = view.flow(side), view.position(call)
    value = value_in(flow, at, slot, side)
    values = {value, flow.base(value)} - {UNKNOWN}
    places = {place for one in values for place in (flow.maker(one), *flow.readers(one))} - {UNKNOWN}
    for place in sorted(places):
        other = view.calls[place]
        if place < at and other.pair.record.phase == "forward" and (other.pair.subject is None or other.pair.reference is None):
            made = (tensor for tensor, number in zip(other.pair.record.slots, flow.values(place), strict=True) if number in values)
            if any(not tensor.requires_grad and not other.pair.record.receives(tensor.slot) for tensor in made):
                return other
    return None


def _parameter(view: StepView, value: TensorRecord, side: str) -> tuple[JudgedCall, JudgedSlot] | None:
    slots = ((call, slot) for call in view.state("state.parameters") for slot in call.slots if _cut_side(slot) == side)
    return next(((call, slot) for call, slot in slots if value_of(getattr(slot.pair, side)) == value_of(value)), None)


def _mode_lines(call: JudgedCall, slot: JudgedSlot) -> list[str]:
    modes = [one for one in call.differences if one.what in ("mode grad", "mode inference")]
    return [f"{one.what}: {one.subject} against {one.reference}" for one in modes]


def _lone_backward(view: StepView) -> list[JudgedCall]:
    return [call for call in view.calls if call.contribution == "unmatched" and call.pair.record.phase == "backward"]


def _missing_lines(view: StepView) -> list[str]:
    lone = _lone_backward(view)
    names = [call.pair.record.module or call.pair.record.call.short for call in lone]
    lines = [f"{count(len(lone), 'backward call')} on one side only: {listed(list(dict.fromkeys(names)))}"] if lone else []
    slots = [slot for call in view.calls if call.pair.record.phase == "optimizer" for slot in call.slots if _is_lone_gradient(slot)]
    gradients = [slot_text(Slot("gradient", slot.pair.slot.path)) for slot in slots]
    return lines + ([f"{count(len(gradients), 'gradient')} on one side only: {listed(gradients)}"] if gradients else [])
