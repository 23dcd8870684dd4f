# SPDX-License-Identifier: Apache-2.0
"""Calls that only one side has, and what leaves them differs: the programs are not the same.

Of several such calls those are named that made the value that differs, or that took part in its gradient, as far as values tell;
else the last block of them before the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.explain.entries.entering import entering_lines, is_regrouped
from ulpscope.explain.flow import tensor_of, value_in
from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import Divergence, StepView, common_levels
from ulpscope.explain.wording import at_place, call_text, count, difference_line, finding_at, listed, slot_text
from ulpscope.model import CallRecord, Finding, JudgedCall, JudgedSlot, Side
from ulpscope.model.step_index import UNKNOWN

__all__ = ["explain_missing", "explain_writing", "lone_text"]

_SIDES: tuple[Side, Side] = ("subject", "reference")


def explain_missing(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "entered" or not found.lone or is_regrouped(view, found):
        return None
    lone = linked_calls(view, found) or list(found.lone)
    first = lone[0]
    record = first.pair.record
    headline = f"calls only in the {_side(first)}: {call_text(record)}, {at_place(record)}"
    if any(_side(call) != _side(first) for call in lone):
        headline = f"calls differ between the runs: {call_text(record)}, {at_place(record)}"
    evidence = [
        lone_text(lone),
        f"the next call on both sides, {call_text(found.call.pair.record)}, receives something else",
        *entering_lines(found),
    ]
    return finding_at(
        "fault", "calls", headline, first, None, evidence, "make both programs compute the same, or map renamed calls with --mapping"
    )


def explain_writing(view: StepView) -> Finding | None:
    """A call on one side wrote to a parameter during the step, and the optimizer's result differs."""
    found = view.divergence
    if found is None or found.how != "contributed" or found.call.pair.record.phase != "optimizer":
        return None
    path = found.slot.pair.slot.path
    start = next((slot for call in view.state("state.parameters") for slot in call.slots if slot.pair.slot.path == path), None)
    writer = next((call for call in _lone_before(view, found) if start is not None and _writes_to(call, start)), None)
    if writer is None or start is None:
        return None
    record = writer.pair.record
    headline = f"a parameter is written to in the {_side(writer)} only: {call_text(record)}, {at_place(record)}"
    evidence = [f"it changes {slot_text(start.pair.slot)} before the optimizer's step", difference_line(found.slot)]
    return finding_at("fault", "calls", headline, writer, None, evidence, "make both programs compute the same")


def linked_calls(view: StepView, found: Divergence) -> list[JudgedCall]:
    """The calls on one side that the differing value comes from: its maker and what led to it, or what else used the value
    whose gradient it is."""
    lone = _lone_before(view, found)
    names = set()
    for side in _SIDES:
        ours = {view.position(call) for call in lone if _side(call) == side}
        linked = _leading_to(view, found, ours, side) or _users_of(view, found, ours, side)
        names |= {(side, view.calls[at].pair.record.call, view.calls[at].pair.record.module) for at in linked}
    return [call for call in lone if (_side(call), call.pair.record.call, call.pair.record.module) in names]


def lone_text(calls: Sequence[JudgedCall]) -> str:
    sides = [(side, [call for call in calls if _side(call) == side]) for side in _SIDES]
    return "; ".join(
        f"{count(len(lone), 'call')} only in the {side}: {listed([_name(call) for call in lone])}" for side, lone in sides if lone
    )


def _lone_before(view: StepView, found: Divergence) -> list[JudgedCall]:
    levels, lone = common_levels(view.calls), []
    for call in view.calls:
        if call is found.call:
            break
        record = call.pair.record
        if call.contribution == "unmatched" and record.phase != "start" and not record.recompute and record.level in levels:
            lone.append(call)
    return lone


def _leading_to(view: StepView, found: Divergence, lone: set[int], side: Side) -> set[int]:
    """The calls that made the value, and those that made what these were given."""
    flow = view.flow(side)
    linked: set[int] = set()
    waiting = [value_in(flow, view.position(found.call), found.slot, side)]
    while waiting:
        value = waiting.pop()
        maker = flow.maker(value) if flow.maker(value) != UNKNOWN else flow.maker(flow.base(value))
        record = flow.records[maker] if maker in lone else None
        if record is not None and maker not in linked:
            linked.add(maker)
            waiting += [
                one for slot, one in zip(record.slots, flow.values(maker), strict=True) if one != UNKNOWN and record.receives(slot.slot)
            ]
    return linked


def _users_of(view: StepView, found: Divergence, lone: set[int], side: Side) -> set[int]:
    """For a gradient: the calls that used the value it belongs to, since gradients of all uses add up."""
    flow, tensor = view.flow(side), tensor_of(found.slot, side)
    value = UNKNOWN if tensor is None else flow.differentiated(view.position(found.call), tensor.slot)
    return {at for at in flow.readers(value) if at in lone and view.calls[at].pair.record.phase == "forward"}


def _writes_to(call: JudgedCall, start: JudgedSlot) -> bool:
    """Whether a call on one side was given the parameter and left something else in its place."""
    side = _side(call)
    record: CallRecord = getattr(call.pair, side)
    before = value_of(getattr(start.pair, side))
    given = [slot.slot.path for slot in record.slots if record.receives(slot.slot) and value_of(slot) == before and before is not None]
    is_in_place = record.call.op.endswith("_") and not record.call.op.endswith("__")
    results = [slot for slot in record.slots if slot.slot.role == "mutated" or (is_in_place and slot.slot.role == "output")]
    return bool(given) and any(value_of(slot) != before for slot in results)


def _side(call: JudgedCall) -> Side:
    return "subject" if call.pair.reference is None else "reference"


def _name(call: JudgedCall) -> str:
    record = call.pair.record
    return f"{record.module}/{record.call.short}" if record.module else record.call.short
