# SPDX-License-Identifier: Apache-2.0
"""What a step leaves behind is told on both sides where one side tells it.

A run records at the end of a step only what is otherwise than at its start. So what one side tells there and the other does not, is on the
other what it was at the start, if that side ended the step at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ulpscope.model import Arguments, CallRecord, Slot, TensorRecord

__all__ = ["with_ends_told"]


def with_ends_told(records: Sequence[CallRecord], other: Sequence[CallRecord]) -> list[CallRecord]:
    """The records of one side's whole step, with what only the other side tells of its end."""
    told, generators = _end_of(other), next((one for one in records if one.call.op == "state.rng"), None)
    if told is None or generators is None:
        return list(records)
    own, start = _end_of(records), _buffers_at_start(records)
    known = {one.slot for one in own.slots} if own is not None else set()
    unchanged = tuple(start[one.slot] for one in told.slots if one.slot in start and one.slot not in known)
    if own is not None:
        return [replace(one, slots=(*one.slots, *unchanged)) if one is own else one for one in records]
    arguments = Arguments(kwargs=generators.arguments.kwargs if generators.arguments else None)
    order = max(one.order for one in records) + 1
    return [*records, replace(generators, call=told.call, phase=told.phase, order=order, arguments=arguments, slots=unchanged)]


def _end_of(records: Sequence[CallRecord]) -> CallRecord | None:
    return next((one for one in records if one.phase == "end"), None)


def _buffers_at_start(records: Sequence[CallRecord]) -> dict[Slot, TensorRecord]:
    starts = (one for one in records if one.call.op == "state.parameters")
    return {slot.slot: slot for one in starts for slot in one.slots if slot.slot.role == "buffer"}
