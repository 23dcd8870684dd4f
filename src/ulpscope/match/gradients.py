# SPDX-License-Identifier: Apache-2.0
"""The order of backward records in which every gradient is made before it is received.

A backward record is written when the last gradient of its call has come. A recurrent layer hands on the gradient of its input long before
those of its weights, so that the call before it is recorded first, with a gradient that no record has made yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from ulpscope.model import CallRecord, Pair, TensorRecord
from ulpscope.model.names import INPUT_ROLES

__all__ = ["with_makers_first"]


class _Place(NamedTuple):
    """Where a backward record stands: its position, and the stretch of backward records that it is in."""

    at: int
    stretch: int


def with_makers_first(pairs: Sequence[Pair]) -> list[Pair]:
    """Move each backward record behind those of all calls that took what its call made; all else stays where it is."""
    places = _places(pairs)
    if not places:
        return list(pairs)
    forward = [pair.record for pair in pairs if pair.record.phase == "forward" and not pair.record.recompute]
    after: dict[int, int] = {}
    takers: defaultdict[str, list[Hashable]] = defaultdict(list)
    turn: dict[int, int] = {}
    for number, record in enumerate(reversed(forward)):
        key = _key(record)
        behind = [places[other] for value in _values(record, made=True) for other in takers[value] if other in places]
        for time, place in enumerate(places.get(key, ())):
            turn[place.at] = number
            same = (other[time] for other in behind if len(other) == len(places[key]) and other[time].stretch == place.stretch)
            after[place.at] = max([place.at, *(after[one.at] for one in same)])
        for value in _values(record, made=False):
            takers[value].append(key)
    if all(at == last for at, last in after.items()):
        return list(pairs)
    order = sorted(range(len(pairs)), key=lambda at: (after.get(at, at), turn.get(at, -1)))
    return [pairs[at] for at in order]


def _places(pairs: Sequence[Pair]) -> dict[Hashable, list[_Place]]:
    """The backward records of each call."""
    places: defaultdict[Hashable, list[_Place]] = defaultdict(list)
    stretch, is_inside = 0, False
    for at, pair in enumerate(pairs):
        is_backward = pair.record.phase == "backward"
        stretch += is_backward and not is_inside
        is_inside = is_backward
        if is_backward:
            places[_key(pair.record)].append(_Place(at, stretch))
    return dict(places)


def _key(record: CallRecord) -> Hashable:
    return record.level, record.call, record.module


def _values(record: CallRecord, *, made: bool) -> set[str]:
    """What tells the differentiable values apart that a call made, or took."""
    return {found for slot in _slots(record, made=made) if (found := slot.fingerprint or slot.content) is not None}


def _slots(record: CallRecord, *, made: bool) -> Iterable[TensorRecord]:
    return (slot for slot in record.slots if slot.requires_grad and (slot.slot.role in INPUT_ROLES) != made)
