# SPDX-License-Identifier: Apache-2.0
"""A/A calibration: from the comparison of a reference with its own repeat to what is benign, call by call."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ulpscope.judge.allowance.sizes import distance
from ulpscope.model import BandKey, Bands, CallRecord, JudgedCall, JudgedSlot, Slot
from ulpscope.model.step_index import ForwardCalls

__all__ = ["bands_of"]


def bands_of(judged: Sequence[JudgedCall]) -> Bands:
    """`judged` are the calls of a comparison whose subject is the reference and whose reference is its repeat."""
    slots: dict[tuple[BandKey, Slot], float] = {}
    calls: dict[BandKey, float] = {}
    nondeterministic: list[BandKey] = []
    given: dict[tuple[int, int], ForwardCalls[float]] = {}
    num_slots = 0
    for call in judged:
        record = call.pair.subject
        if record is None or call.pair.reference is None:
            continue
        key, num_slots = BandKey.of(record), num_slots + len(call.slots)
        apart = {slot.pair.slot: _apart(slot) for slot in call.slots}
        slots |= {(key, slot): found for slot, found in apart.items() if found}
        entering = max((found for slot, found in apart.items() if record.receives(slot)), default=0.0)
        forward = given.setdefault((record.rank, record.step), ForwardCalls())
        forward.add(record, max(apart.values(), default=0.0))
        entering = max(entering, forward.of(record) or 0.0)
        if entering:
            calls[key] = entering
        elif record.phase != "start" and any(_is_made_otherwise(record, slot) for slot in call.slots):
            nondeterministic.append(key)
    return Bands(slots=slots, calls=calls, nondeterministic=tuple(nondeterministic), num_slots=num_slots)


def _is_made_otherwise(record: CallRecord, slot: JudgedSlot) -> bool:
    """Whether a call made other bits; other random numbers are no want of determinism."""
    return not record.receives(slot.pair.slot) and _apart(slot) > 0 and slot.verdict.rule != "random"


def _apart(slot: JudgedSlot) -> float:
    """Infinite where bits differ by an unknown amount."""
    found = distance(slot.measurement)
    if found is not None:
        return found
    return inf if slot.differs_by_unknown else 0.0
