# SPDX-License-Identifier: Apache-2.0
"""A clue: activation checkpointing computed something else the second time, so gradients belong to a forward pass that was never used."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import call_text
from ulpscope.model import CallRecord, Finding, JudgedCall

__all__ = ["clue_recompute"]


def clue_recompute(fault: Finding, views: Sequence[StepView]) -> list[str]:
    """The first recomputed call of each side whose results are not those of the call that it repeats."""
    view = next((view for view in views if (view.step, view.rank) == (fault.step, fault.rank)), None)
    if view is None or fault.phase not in ("backward", "optimizer"):
        return []
    lines = []
    for side in ("subject", "reference"):
        again = _first_changed([record for call in view.calls if (record := _record(call, side)) is not None])
        if again is not None:
            lines.append(f"recomputed otherwise: in the {side}, {call_text(again)} does not repeat what its forward call gave")
    return lines if len(lines) == 1 else []


def _record(call: JudgedCall, side: str) -> CallRecord | None:
    record: CallRecord | None = getattr(call.pair, side)
    return record


def _first_changed(records: Sequence[CallRecord]) -> CallRecord | None:
    first = {_key(record): record for record in records if record.phase == "forward" and not record.recompute}
    again = (record for record in records if record.phase == "forward" and record.recompute)
    return next((record for record in again if (before := first.get(_key(record))) is not None and _is_changed(record, before)), None)


def _key(record: CallRecord) -> Hashable:
    return record.level, record.module, record.call


def _is_changed(again: CallRecord, before: CallRecord) -> bool:
    """Other results, where what enters is the same."""
    then = {slot.slot: value_of(slot) for slot in before.slots}
    pairs = [(slot, value_of(slot), then.get(slot.slot)) for slot in again.slots]
    known = [(again.receives(slot.slot), now != old) for slot, now, old in pairs if now is not None and old is not None]
    return any(apart for is_given, apart in known if not is_given) and not any(apart for is_given, apart in known if is_given)
