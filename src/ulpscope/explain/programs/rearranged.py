# SPDX-License-Identifier: Apache-2.0
"""A value comes in laid out otherwise, because a call before it was given other arguments: another axis, another size, another order."""

from __future__ import annotations

from ulpscope.explain.contributions import entered
from ulpscope.explain.entries.entering import entering_lines, is_regrouped
from ulpscope.explain.programs.arguments import is_telling
from ulpscope.explain.programs.missing import linked_calls
from ulpscope.explain.views import Divergence, StepView
from ulpscope.explain.wording import at_place, call_text, differences_lines, finding_at
from ulpscope.model import Finding, JudgedCall, JudgedSlot

__all__ = ["explain_rearranged"]


def explain_rearranged(view: StepView) -> Finding | None:
    """Blame the call that first laid the value out otherwise, where it was called otherwise and no call is missing."""
    found = view.divergence
    if found is None or found.how != "entered" or found.result is None or is_regrouped(view, found) or linked_calls(view, found):
        return None
    maker = _first_maker(view, found)
    if maker is None:
        return None
    call, slot = maker
    record = call.pair.record
    headline = f"arguments differ: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [*differences_lines(call), f"its result enters {call_text(found.call.pair.record, found.slot.pair.slot)}"]
    advice = "call it alike on both sides and compare again"
    return finding_at("fault", "arguments", headline, call, slot, [*evidence, *entering_lines(found)], advice)


def _first_maker(view: StepView, found: Divergence) -> tuple[JudgedCall, JudgedSlot] | None:
    """The call with other arguments on the way of a value that is laid out otherwise, from where it came in backwards."""
    blamed: tuple[JudgedCall, JudgedSlot] | None = None
    at, wanted = view.position(found.call), found.slot
    while True:
        maker = view.maker_of(at, wanted)
        if maker is None:
            return blamed
        at, slot = maker
        call = view.calls[at]
        if any(_is_set(one.what) and is_telling(one) for one in call.differences):
            blamed = (call, slot)
        before = next((slot for slot in entered(call) if _is_other_layout(slot)), None)
        if before is None:
            return blamed
        wanted = before


def _is_set(what: str) -> bool:
    return not what.startswith(("shape of", "dtype of", "mode "))


def _is_other_layout(slot: JudgedSlot) -> bool:
    ours, theirs = slot.pair.subject, slot.pair.reference
    return ours is not None and theirs is not None and ours.shape != theirs.shape
