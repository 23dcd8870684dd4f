# SPDX-License-Identifier: Apache-2.0
"""The slots that a fault is about, and what stood in the same slot in other steps and in the call before: what clues look at."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ulpscope.explain.views import StepView
from ulpscope.model import CallRecord, Finding, JudgedCall, JudgedSlot, SlotPair, TensorRecord
from ulpscope.model.nouns import dataclass

__all__ = ["Suspect", "before_in_step", "in_steps", "is_varied", "suspects_of", "value_of"]


@dataclass(frozen=True, slots=True)
class Suspect:
    view: StepView
    call: JudgedCall
    slot: JudgedSlot


def suspects_of(fault: Finding, views: Sequence[StepView]) -> list[Suspect]:
    """The slot that the fault points at, and the first one that diverges where that is another."""
    found: list[Suspect] = []
    for view in views:
        if (view.step, view.rank) != (fault.step, fault.rank):
            continue
        found += [Suspect(view, call, slot) for call in view.calls if _is_at(fault, call) for slot in call.slots if _is_in(fault, slot)]
        if view.divergence is not None:
            found.append(Suspect(view, view.divergence.call, view.divergence.slot))
    return found


def in_steps(suspect: Suspect, views: Sequence[StepView]) -> dict[int, SlotPair]:
    """The same slot of the same call in every step of its rank that has it, on both sides."""
    place, found = _place(suspect.call, suspect.slot.pair), {}
    for view in views:
        if view.rank == suspect.view.rank:
            slots = (slot.pair for call in view.calls if _key(call.pair.record) == place[0] for slot in call.slots)
            pair = next((slot for slot in slots if slot.slot == place[1]), None)
            if pair is not None and pair.subject is not None and pair.reference is not None:
                found[view.step] = pair
    return found


def before_in_step(suspect: Suspect) -> tuple[JudgedCall, SlotPair] | None:
    """The same slot of the call of the same operation and module that came before, in the same step and phase."""
    record, found = suspect.call.pair.record, None
    for call in suspect.view.calls:
        if call is suspect.call:
            return found
        if _kind(call.pair.record) == _kind(record):
            pair = next((slot.pair for slot in call.slots if slot.pair.slot == suspect.slot.pair.slot), None)
            found = (call, pair) if pair is not None else found
    return None


def value_of(record: TensorRecord | None) -> Hashable | None:
    """What tells equal values; None where nothing does."""
    return (record.dtype, record.shape, record.fingerprint) if record is not None and record.fingerprint else None


def is_varied(record: TensorRecord | None) -> bool:
    """Whether not all elements are the same: zeros and ones are equal to many things by chance."""
    summary = record.summary if record is not None else None
    return summary is None or summary.min is None or summary.min != summary.max


def _is_at(fault: Finding, call: JudgedCall) -> bool:
    record = call.pair.record
    return (record.order, record.phase, str(record.call)) == (fault.order, fault.phase, fault.call)


def _is_in(fault: Finding, slot: JudgedSlot) -> bool:
    return str(slot.pair.slot) == fault.slot


def _place(call: JudgedCall, slot: SlotPair) -> tuple[Hashable, Hashable]:
    return _key(call.pair.record), slot.slot


def _key(record: CallRecord) -> Hashable:
    return record.phase, record.level, record.module, record.call, record.recompute


def _kind(record: CallRecord) -> Hashable:
    return record.phase, record.level, record.module, record.call.op, record.recompute
