# SPDX-License-Identifier: Apache-2.0
"""Slots within a pair of calls: the same slot first, then what is passed by position here and by keyword there, then what was renamed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from ulpscope.match.likeness import plain_op
from ulpscope.match.mapping import Mapping
from ulpscope.model import CallRecord, Role, Slot, SlotPair, TensorRecord

__all__ = ["pair_slots"]

_NAMED: frozenset[Role] = frozenset({"parameter", "buffer", "gradient", "state", "mutated"})


def pair_slots(
    subject: CallRecord, reference: CallRecord, mapping: Mapping | None = None, forward: Iterable[SlotPair] = ()
) -> tuple[SlotPair, ...]:
    """Every slot of both sides once, in the subject's order; None stands where a side lacks it.

    `forward` is how the slots of the forward call were paired, for backward records: gradients pair as their inputs did.
    """
    if plain_op(subject.call.op) == plain_op(reference.call.op):
        places = _gradient_places(forward)
        if mapping is None and not places and _have_same_slots(subject, reference):
            return tuple([SlotPair(slot.slot, slot, other) for slot, other in zip(subject.slots, reference.slots, strict=True)])
        partner = _same_place(subject, reference, mapping, places)
    else:
        partner = _same_value(subject.slots, reference.slots)
    pairs = [SlotPair(slot.slot, slot, partner.get(slot.slot)) for slot in subject.slots]
    taken = {slot.slot for slot in partner.values()}
    pairs += [SlotPair(slot.slot, None, slot) for slot in reference.slots if slot.slot not in taken]
    return tuple(pairs)


def _have_same_slots(subject: CallRecord, reference: CallRecord) -> bool:
    """Whether both have the same slots in the same order, each once: most calls do, and then nothing has to be looked for."""
    ours, theirs = ([(slot.slot.role, slot.slot.path) for slot in record.slots] for record in (subject, reference))
    return ours == theirs and len(set(ours)) == len(ours)


def _gradient_places(forward: Iterable[SlotPair]) -> dict[Slot, Slot]:
    """Where the reference has the gradient of an argument that it was passed otherwise."""
    return {
        Slot("output", pair.subject.slot.path): Slot("output", pair.reference.slot.path)
        for pair in forward
        if pair.subject and pair.reference and pair.slot.role == "input" and pair.subject.slot != pair.reference.slot
    }


def _same_place(subject: CallRecord, reference: CallRecord, mapping: Mapping | None, places: dict[Slot, Slot]) -> dict[Slot, TensorRecord]:
    there = {slot.slot: slot for slot in reference.slots}
    partner = {slot.slot: there.pop(places[slot.slot]) for slot in subject.slots if places.get(slot.slot) in there}
    for slot in subject.slots:
        if slot.slot in partner:
            continue
        found = there.pop(_renamed(slot.slot, mapping), None) or there.pop(slot.slot, None)
        if found is not None:
            partner[slot.slot] = found
    lone = [slot for slot in subject.slots if slot.slot not in partner]
    if lone and there:
        partner |= _passed_otherwise(lone, list(there.values()))
    return partner


def _renamed(slot: Slot, mapping: Mapping | None) -> Slot:
    if mapping is None or slot.role not in _NAMED or not slot.path:
        return slot
    name = mapping.rename(str(slot).partition(".")[2])
    return slot if name is None else Slot.parse(f"{slot.role}.{name}")


def _passed_otherwise(subject: list[TensorRecord], reference: list[TensorRecord]) -> dict[Slot, TensorRecord]:
    """Position against keyword, in order, where the shapes agree; names against names where nothing but the names differ."""
    partner: dict[Slot, TensorRecord] = {}
    for (role, ours), theirs in _by_role(subject, reference):
        if role in _NAMED:
            if [_shape(one) for one in ours] == [_shape(one) for one in theirs]:
                partner |= {one.slot: other for one, other in zip(ours, theirs, strict=True)}
        else:
            partner |= _first_fit(ours, theirs, _is_passed_otherwise)
    return partner


def _by_role(
    subject: list[TensorRecord], reference: list[TensorRecord]
) -> Iterable[tuple[tuple[Role, list[TensorRecord]], list[TensorRecord]]]:
    sides: defaultdict[Role, tuple[list[TensorRecord], list[TensorRecord]]] = defaultdict(lambda: ([], []))
    for side, slots in enumerate((subject, reference)):
        for slot in slots:
            sides[slot.slot.role][side].append(slot)
    return [((role, ours), theirs) for role, (ours, theirs) in sides.items() if ours and theirs]


def _is_passed_otherwise(one: TensorRecord, other: TensorRecord) -> bool:
    here, there = one.slot.path[:1], other.slot.path[:1]
    return one.shape == other.shape and bool(here) and bool(there) and isinstance(here[0], int) != isinstance(there[0], int)


def _same_value(subject: Iterable[TensorRecord], reference: Iterable[TensorRecord]) -> dict[Slot, TensorRecord]:
    """For operations of different names: equal fingerprints, then equal shapes, in order and within a role."""
    ours, theirs = list(subject), list(reference)
    partner: dict[Slot, TensorRecord] = {}
    for fits in (_is_same_value, _is_same_shape):
        found = _first_fit([one for one in ours if one.slot not in partner], theirs, fits)
        taken = {other.slot for other in found.values()}
        theirs = [other for other in theirs if other.slot not in taken]
        partner |= found
    return partner


def _is_same_value(one: TensorRecord, other: TensorRecord) -> bool:
    return one.fingerprint is not None and one.fingerprint == other.fingerprint and _is_same_shape(one, other)


def _is_same_shape(one: TensorRecord, other: TensorRecord) -> bool:
    return one.slot.role == other.slot.role and one.shape == other.shape


def _first_fit(
    ours: Iterable[TensorRecord], theirs: Iterable[TensorRecord], fits: Callable[[TensorRecord, TensorRecord], bool]
) -> dict[Slot, TensorRecord]:
    free = list(theirs)
    partner: dict[Slot, TensorRecord] = {}
    for one in ours:
        at = next((k for k, other in enumerate(free) if fits(one, other)), None)
        if at is not None:
            partner[one.slot] = free.pop(at)
    return partner


def _shape(one: TensorRecord) -> tuple[int, ...]:
    return one.shape
