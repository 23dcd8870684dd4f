# SPDX-License-Identifier: Apache-2.0
"""The calls of one step on both sides become pairs, in execution order.

Forward calls are aligned; a backward record follows its forward call; recomputed calls pair among themselves. What finds
no partner is a pair with one side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from ulpscope.match.alignment import align
from ulpscope.match.likeness import Sketch, sketch
from ulpscope.match.mapping import Mapping
from ulpscope.match.slots import pair_slots
from ulpscope.model import CallName, CallRecord, MatchedBy, Pair, SlotPair
from ulpscope.model.step_index import UNKNOWN, CallParts, StepIndex

__all__ = ["match_calls"]


def match_calls(
    subject: Iterable[CallRecord] | StepIndex, reference: Iterable[CallRecord] | StepIndex, mapping: Mapping | None = None
) -> list[Pair]:
    """Pair the records of one rank and step: the subject's order, what only the reference has inserted where it falls."""
    left, right = StepIndex.of(subject), StepIndex.of(reference)
    return _in_order(left, right, _partners(left, right, mapping), mapping)


def _partners(subject: StepIndex, reference: StepIndex, mapping: Mapping | None) -> dict[int, int]:
    """Positions on the left to positions on the right."""
    left, right = subject.all_records(), reference.all_records()
    ours, theirs = _by_group(left), _by_group(right)
    partner = _follow_names(left, right, ours["state"], theirs["state"])
    for group in ("forward", "recompute"):
        partner |= _aligned(left, right, ours[group], theirs[group], mapping)
    followed = _follow_forward(subject, reference, partner)
    orphans = [i for i in ours["backward"] if subject.forward(i) == UNKNOWN]
    return partner | followed | _aligned(left, right, orphans, [j for j in theirs["backward"] if reference.forward(j) == UNKNOWN], mapping)


def _by_group(records: Sequence[CallRecord]) -> defaultdict[str, list[int]]:
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for at, record in enumerate(records):
        groups[_group(record)].append(at)
    return groups


def _group(record: CallRecord) -> str:
    if record.level == "state" or record.phase in ("start", "optimizer"):
        return "state"
    if record.phase == "forward" and record.recompute:
        return "recompute"
    return record.phase


def _aligned(
    left: Sequence[CallRecord], right: Sequence[CallRecord], ours: Sequence[int], theirs: Sequence[int], mapping: Mapping | None
) -> dict[int, int]:
    if not ours or not theirs:
        return {}
    matches = align([_mapped(left[i], mapping) for i in ours], [sketch(right[j]) for j in theirs])
    return {ours[i]: theirs[j] for i, j in matches}


def _mapped(record: CallRecord, mapping: Mapping | None) -> Sketch:
    name = mapping.rename(record.name) if mapping else None
    if name is None:
        return sketch(record)
    module, _, call = name.rpartition("/")
    try:
        op = CallName.parse(call).op
    except ValueError:
        op = call
    return sketch(record, module, op)


def _follow_names(left: Sequence[CallRecord], right: Sequence[CallRecord], ours: Iterable[int], theirs: Iterable[int]) -> dict[int, int]:
    """State records pair by name; an optimizer also with one of another class, in order."""
    partner = _one_by_one(_places(left, ours, _named), _places(right, theirs, _named))
    taken = set(partner.values())
    rest = [i for i in ours if i not in partner and left[i].phase == "optimizer"]
    return partner | dict(zip(rest, (j for j in theirs if j not in taken and right[j].phase == "optimizer"), strict=False))


def _follow_forward(subject: StepIndex, reference: StepIndex, partner: dict[int, int]) -> dict[int, int]:
    """Backward records pair as their forward calls did; where a recomputed call found another partner than the first, as that did."""
    chosen: dict[int, tuple[CallParts, CallParts]] = {}
    for i, j in partner.items():
        ours, theirs = subject.call(i), reference.call(j)
        if ours is not None and theirs is not None and ours.backward and theirs.backward:
            chosen[ours.backward[0]] = ours, theirs
    wanted: defaultdict[int, list[int]] = defaultdict(list)
    for ours, theirs in chosen.values():
        wanted[theirs.backward[0]] += ours.backward
    free = {theirs.backward[0]: theirs.backward for _, theirs in chosen.values()}
    return {i: j for first, found in wanted.items() for i, j in zip(sorted(found), free[first], strict=False)}


def _named(record: CallRecord) -> Hashable:
    return record.phase, record.call


def _places(records: Sequence[CallRecord], positions: Iterable[int], key: Callable[[CallRecord], Hashable]) -> dict[Hashable, list[int]]:
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for at in positions:
        places[key(records[at])].append(at)
    return places


def _one_by_one(ours: dict[Hashable, list[int]], theirs: dict[Hashable, list[int]]) -> dict[int, int]:
    return {i: j for key, places in ours.items() for i, j in zip(places, theirs.get(key, ()), strict=False)}


def _in_order(subject: StepIndex, reference: StepIndex, partner: dict[int, int], mapping: Mapping | None) -> list[Pair]:
    left, right = subject.all_records(), reference.all_records()
    back = {j: i for i, j in partner.items()}
    after: defaultdict[int, list[CallRecord]] = defaultdict(list)
    at = -1
    for j, record in enumerate(right):
        if j in back:
            at = back[j]
        else:
            after[at].append(record)
    pairs = [_lone_reference(record) for record in after[-1]]
    slots: list[tuple[SlotPair, ...]] = []
    for i, record in enumerate(left):
        pair = Pair(subject=record, reference=None, matched_by="nothing")
        if i in partner:
            forward = subject.forward(i)
            pair = _pair(record, right[partner[i]], mapping, () if forward == UNKNOWN else slots[forward])
        slots.append(pair.slots)
        pairs += [pair, *(_lone_reference(lone) for lone in after[i])]
    return pairs


def _lone_reference(record: CallRecord) -> Pair:
    return Pair(subject=None, reference=record, matched_by="nothing")


def _pair(subject: CallRecord, reference: CallRecord, mapping: Mapping | None, forward: Iterable[SlotPair]) -> Pair:
    matched_by: MatchedBy = "alignment"
    if mapping and mapping.rename(subject.name) is not None:
        matched_by = "mapping"
    elif subject.module == reference.module and subject.call.op == reference.call.op:
        matched_by = "name"
    return Pair(subject=subject, reference=reference, matched_by=matched_by, slots=pair_slots(subject, reference, mapping, forward))
