# SPDX-License-Identifier: Apache-2.0
"""A clue: activation checkpointing computed something else the second time, so gradients belong to a forward pass that was never used."""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import call_text
from ulpscope.model import CallRecord, Finding, Side
from ulpscope.model.step_index import StepIndex

__all__ = ["clue_recompute"]

_SIDES: tuple[Side, Side] = ("subject", "reference")


def clue_recompute(fault: Finding, views: Sequence[StepView]) -> list[str]:
    """The first recomputed call of each side whose results are not those of the call that it repeats."""
    view = next((view for view in views if (view.step, view.rank) == (fault.step, fault.rank)), None)
    if view is None or fault.phase not in ("backward", "optimizer"):
        return []
    lines = []
    for side in _SIDES:
        again = _first_changed(view.flow(side))
        if again is not None:
            lines.append(f"recomputed otherwise: in the {side}, {call_text(again)} does not repeat what its forward call gave")
    return lines if len(lines) == 1 else []


def _first_changed(flow: StepIndex) -> CallRecord | None:
    """The first recomputed call that is not what the last one of its name was that was not recomputed."""
    for at, again in enumerate(flow.records):
        parts = flow.call(at)
        if again is None or parts is None or again.phase != "forward" or not again.recompute:
            continue
        first = [record for one in parts.forward if (record := flow.records[one]) is not None and not record.recompute]
        if first and _is_changed(again, first[-1]):
            return again
    return None


def _is_changed(again: CallRecord, before: CallRecord) -> bool:
    """Other results, where what enters is the same."""
    then = {slot.slot: value_of(slot) for slot in before.slots}
    pairs = [(slot, value_of(slot), then.get(slot.slot)) for slot in again.slots]
    known = [(again.receives(slot.slot), now != old) for slot, now, old in pairs if now is not None and old is not None]
    return any(apart for is_given, apart in known if not is_given) and not any(apart for is_given, apart in known if is_given)
