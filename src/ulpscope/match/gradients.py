# SPDX-License-Identifier: Apache-2.0
"""The order of backward records in which every gradient is made before it is received.

A backward record is written when the last gradient of its call has come. A recurrent layer hands on the gradient of its input long before
those of its weights, so that the call before it is recorded first, with a gradient that no record has made yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ulpscope.model import CallRecord, Pair
from ulpscope.model.step_index import UNKNOWN, CallParts, StepIndex

__all__ = ["with_makers_first"]


def with_makers_first(pairs: Sequence[Pair]) -> list[Pair]:
    """Move each backward record behind those of all calls that took what its call made; all else stays where it is."""
    index = StepIndex(pair.record for pair in pairs)
    stretches = _stretches([pair.record for pair in pairs])
    after: dict[int, int] = {}
    turn: dict[int, int] = {}
    for number, parts in enumerate(_calls_with_backward(index)):
        takers = [taker.backward for value in _made(index, parts) for taker in index.takers(value)]
        for time, at in enumerate(parts.backward):
            turn[at] = number
            same = (other[time] for other in takers if len(other) == len(parts.backward) and stretches[other[time]] == stretches[at])
            after[at] = max([at, *(after.get(one, one) for one in same)])
    if all(at == last for at, last in after.items()):
        return list(pairs)
    order = sorted(range(len(pairs)), key=lambda at: (after.get(at, at), turn.get(at, -1)))
    return [pairs[at] for at in order]


def _stretches(records: Sequence[CallRecord]) -> list[int]:
    """Number the stretches of backward records that nothing else interrupts."""
    numbers: list[int] = []
    stretch, is_inside = 0, False
    for record in records:
        is_backward = record.phase == "backward"
        stretch += is_backward and not is_inside
        is_inside = is_backward
        numbers.append(stretch)
    return numbers


def _calls_with_backward(index: StepIndex) -> Iterator[CallParts]:
    """The calls that were differentiated, the last one first; where one was recomputed its first time counts."""
    for at in reversed(range(len(index.records))):
        parts = index.call(at)
        if parts is not None and parts.backward and parts.forward[:1] == [at]:
            yield parts


def _made(index: StepIndex, parts: CallParts) -> set[int]:
    """The differentiable values that a call made, each time that it ran."""
    found: set[int] = set()
    for at in parts.forward:
        record = index.records[at]
        for slot, value in zip(record.slots if record is not None else (), index.values(at), strict=True):
            if slot.requires_grad and value != UNKNOWN and record is not None and not record.receives(slot.slot):
                found.add(value)
    return found
