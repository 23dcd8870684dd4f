# SPDX-License-Identifier: Apache-2.0
"""Index one step of one side as a data-flow graph: calls are its nodes, tensors its edges.

Records hold no addresses, so a tensor is known by its values: fingerprint (or content key), dtype and shape. A value gets its number when a
call makes it. It stays the same value while calls hand it on unchanged, and becomes another when a call makes the same bits anew; each
version of memory that is written in place is a value of its own. A view of known bits makes no new value: it looks at what was written
through another view. A module returns the value that a call inside it made, and that call is its maker. Any other view is a value with a
base; the base of a chain of views is the value that the first of them looks at. A write through a view leaves a value in its base that has
no maker: records do not tell whose memory a view looks at. A value given at the start of a step was made there, unless an earlier call made
it.

Each part is built when it is first asked for, in one pass over the slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeVar

from ulpscope.model.names import Role, Slot
from ulpscope.model.operations.tensor_views import is_view
from ulpscope.model.records import RECEIVED_ROLES, CallRecord, TensorRecord

__all__ = ["UNKNOWN", "CallParts", "ForwardCalls", "StepIndex", "call_key", "stepped_before"]

UNKNOWN = -1
"""The number of a value without fingerprint and content key, and the position of a missing call."""

T = TypeVar("T")


def call_key(record: CallRecord) -> Hashable:
    """Return what the records of one call share within a step: forward, recomputed and backward.

    Names alone do not tell: modules of other tools are counted each by itself, and one name occurs at several levels.
    """
    call = record.call
    return record.level, record.module, call.op, call.index


def stepped_before(record: CallRecord, earlier: Iterable[CallRecord]) -> CallRecord | None:
    """Return the last of `earlier` records that is the step before this one: an optimizer of this class that stepped one of its parameters.

    Several optimizers of a class step in turn, and one of them may step several times: their names do not tell them apart.
    """
    names = _stepped(record)
    found = None
    for one in earlier:
        if one.phase == "optimizer" and one.call.op == record.call.op and not names.isdisjoint(_stepped(one)):
            found = one
    return found


def _stepped(record: CallRecord) -> set[tuple[int | str, ...]]:
    return {slot.slot.path for slot in record.slots if slot.slot.role in ("gradient", "mutated")}


class ForwardCalls(dict[Hashable, T]):
    """Find the forward call of each backward record, while the records of a step pass by: the last one before it.

    A recomputed call counts as the forward call, since its backward used the recomputed values.
    """

    __slots__ = ()

    def add(self, record: CallRecord, known: T) -> None:
        """Remember `known` for a forward record; ignore any other."""
        if record.phase == "forward":
            self[call_key(record)] = known

    def of(self, record: CallRecord) -> T | None:
        """Return what was remembered for the forward call of a backward record."""
        return self.get(call_key(record)) if record.phase == "backward" else None


class CallParts(NamedTuple):
    """The positions of the records of one call: forward, with its recomputations, and backward, one for each pass."""

    forward: list[int]
    backward: list[int]


_NOBODY, _CALL, _MODULE, _EITHER = 0, 1, 2, 3


class _Values(NamedTuple):
    """Values by number: `place` is the slot that made each, or the first that had it, as position and number of the slot.

    `of` has the values of the slots of each record. `made_by` says whether a module made a value, or a call, or both, or neither.
    `reshaped` has the earlier value of the same elements in another shape, if no recorded call reshaped it.
    """

    of: list[tuple[int, ...]]
    place: list[tuple[int, int]]
    made_by: list[int]
    readers: list[list[int]]
    reshaped: list[int]

    def add(self, at: int, number: int, made_by: int) -> int:
        self.place.append((at, number))
        self.made_by.append(made_by)
        self.readers.append([])
        self.reshaped.append(UNKNOWN)
        return len(self.place) - 1


class StepIndex:
    """One step of one side, in execution order; None stands where this side has no record.

    Calls are named by their position in `records`, values by numbers in the order in which they appear.
    """

    def __init__(self, records: Iterable[CallRecord | None]) -> None:
        self.records: Sequence[CallRecord | None] = tuple(records)

    @classmethod
    def of(cls, records: Iterable[CallRecord] | StepIndex) -> StepIndex:
        """Index the records of a step in the order in which they were executed."""
        if isinstance(records, StepIndex):
            return records
        in_order = sorted(records, key=lambda record: record.order)
        return cls(in_order)

    def all_records(self) -> list[CallRecord]:
        """Return the records that this side has."""
        return [record for record in self.records if record is not None]

    # ---- calls

    @cached_property
    def _calls(self) -> tuple[list[CallParts | None], list[int]]:
        """Return the parts of the call of each record, and the position of its forward call."""
        known: dict[Hashable, CallParts] = {}
        parts: list[CallParts | None] = []
        forward: list[int] = []
        for at, record in enumerate(self.records):
            if record is None or record.phase not in ("forward", "backward"):
                parts.append(None)
                forward.append(UNKNOWN)
                continue
            key = call_key(record)
            found = known.get(key)
            if found is None:
                found = known[key] = CallParts([], [])
            parts.append(found)
            is_backward = record.phase == "backward"
            forward.append(found.forward[-1] if is_backward and found.forward else UNKNOWN)
            (found.backward if is_backward else found.forward).append(at)
        return parts, forward

    @cached_property
    def _positions(self) -> dict[tuple[int, str], int]:
        return {(record.order, record.phase): at for at, record in enumerate(self.records) if record is not None}

    def position(self, record: CallRecord) -> int:
        """Return where a record of this step stands, `UNKNOWN` if it is not here."""
        return self._positions.get((record.order, record.phase), UNKNOWN)

    def call(self, at: int) -> CallParts | None:
        """Return all records of the call of a forward or backward record."""
        return self._calls[0][at]

    def forward(self, at: int) -> int:
        """Return the forward call of a backward record: the last one before it, and so the recomputed one if it was recomputed."""
        return self._calls[1][at]

    def forward_of(self, record: CallRecord) -> CallRecord | None:
        """Return the record of the forward call of a backward record."""
        at = self.position(record)
        forward = UNKNOWN if at == UNKNOWN else self.forward(at)
        return None if forward == UNKNOWN else self.records[forward]

    def earlier_backward(self, record: CallRecord) -> list[CallRecord]:
        """Return the backward records of the same call before this one: the passes before it."""
        at = self.position(record)
        parts = None if at == UNKNOWN else self.call(at)
        records = (self.records[one] for one in parts.backward if one < at) if parts is not None else ()
        return [one for one in records if one is not None]

    @cached_property
    def parameters(self) -> list[CallRecord]:
        """Return the records of parameters and buffers at the start of the step."""
        return [one for one in self.all_records() if one.phase == "start" and one.call.op == "state.parameters"]

    @cached_property
    def optimizer_steps(self) -> list[CallRecord]:
        """Return the records of optimizer steps, in order."""
        return [one for one in self.all_records() if one.phase == "optimizer"]

    # ---- values

    @cached_property
    def _values(self) -> _Values:
        found = _Values([], [], [], [], [])
        current: dict[Hashable, int] = {}
        latest: dict[str, int] = {}
        for at, record in enumerate(self.records):
            if record is None:
                found.of.append(())
                continue
            received = RECEIVED_ROLES[record.phase]
            maker = _MODULE if record.level == "module" else _CALL
            values = [UNKNOWN] * len(record.slots)
            given: dict[Hashable, int] = {}
            made: list[tuple[int, str, Hashable]] = []
            for number, slot in enumerate(record.slots):
                bits = slot.fingerprint or slot.content
                if bits is None:
                    continue
                key = (bits, slot.dtype, slot.shape)
                is_received = slot.slot.role in received
                if not is_received and record.phase not in ("start", "end"):
                    made.append((number, bits, key))
                    continue
                value = current.get(key, UNKNOWN)
                if value == UNKNOWN:
                    value = current[key] = found.add(at, number, maker if record.phase == "start" else _NOBODY)
                    found.reshaped[value] = self._reshaped(found, latest.get(bits, UNKNOWN), slot)
                    latest[bits] = value
                values[number] = given[key] = value
                if is_received and found.readers[value][-1:] != [at]:
                    found.readers[value].append(at)
            looks_only = record.phase == "forward" and bool(made) and is_view(record.call.op)
            for number, bits, made_key in made:
                value = given.get(made_key, UNKNOWN)
                if value == UNKNOWN:
                    value = current.get(made_key, UNKNOWN)
                    if value != UNKNOWN and looks_only:
                        values[number] = given[made_key] = value
                        continue
                    if value == UNKNOWN or found.made_by[value] != maker ^ _EITHER:
                        value = current[made_key] = latest[bits] = found.add(at, number, maker)
                    elif maker == _CALL:
                        found.place[value] = at, number
                    found.made_by[value] |= maker
                    given[made_key] = value
                values[number] = value
            found.of.append(tuple(values))
        return found

    def _reshaped(self, found: _Values, value: int, slot: TensorRecord) -> int:
        """Return the earlier value of the same bits, if it has as many elements of the same dtype."""
        if value == UNKNOWN:
            return UNKNOWN
        before = self._slot(*found.place[value])
        return value if before.dtype == slot.dtype and prod(before.shape) == prod(slot.shape) else UNKNOWN

    def _slot(self, at: int, number: int) -> TensorRecord:
        record = self.records[at]
        assert record is not None, "a value stands in a record"
        return record.slots[number]

    @cached_property
    def _numbers(self) -> list[dict[Slot, int] | None]:
        return [None] * len(self.records)

    def number(self, at: int, slot: Slot) -> int:
        """Return which slot of a record has this name, `UNKNOWN` if none has."""
        known, record = self._numbers[at], self.records[at]
        if known is None:
            known = self._numbers[at] = {one.slot: number for number, one in enumerate(record.slots if record is not None else ())}
        return known.get(slot, UNKNOWN)

    def values(self, at: int) -> tuple[int, ...]:
        """Return the value in each slot of a record, `UNKNOWN` where nothing identifies it."""
        return self._values.of[at]

    def value(self, at: int, slot: Slot) -> int:
        """Return the value in one slot of a record."""
        number = self.number(at, slot)
        return UNKNOWN if number == UNKNOWN else self.values(at)[number]

    def tensor(self, value: int) -> TensorRecord:
        """Return the slot that made a value, or the first that had it."""
        return self._slot(*self._values.place[value])

    def maker(self, value: int) -> int:
        """Return the record that made a value; `UNKNOWN` if it came from outside."""
        found = self._values
        return found.place[value][0] if value != UNKNOWN and found.made_by[value] else UNKNOWN

    def readers(self, value: int) -> Sequence[int]:
        """Return the records that received a value, in order, including those that handed it on."""
        return self._values.readers[value] if value != UNKNOWN else ()

    # ---- views

    @cached_property
    def _viewed(self) -> list[int]:
        """Return the value that each value is a view of, one step back."""
        found, viewed = self._values, list(self._values.reshaped)
        ways: dict[int, _Ways] = {}
        for value, (maker, number) in enumerate(found.place):
            record = self.records[maker]
            if found.made_by[value] and record is not None and record.phase == "forward":
                if maker not in ways:
                    ways[maker] = _Ways.of(record, found.of[maker])
                viewed[value] = ways[maker].to(record.slots[number])
        return viewed

    @cached_property
    def _bases(self) -> list[int]:
        return _ends(self._viewed)

    def base(self, value: int) -> int:
        """Return the value that a view looks at, through all views of views; of any other value, itself."""
        return self._bases[value] if value != UNKNOWN else UNKNOWN

    # ---- gradients

    def differentiated(self, at: int, slot: Slot) -> int:
        """Return the value whose gradient, or a part of it, stands in a slot of a backward record or enters an optimizer's step."""
        record = self.records[at]
        if record is not None and record.phase == "optimizer" and slot.role == "gradient":
            places = ((self.position(one), Slot("parameter", slot.path)) for one in self.parameters)
        elif record is not None and record.phase == "backward" and self.forward(at) != UNKNOWN:
            roles: tuple[Role, ...] = ("output",) if slot.role == "input" else ("input", "parameter")
            places = ((self.forward(at), Slot(role, slot.path)) for role in roles)
        else:
            return UNKNOWN
        return next((value for place, one in places if (value := self.value(place, one)) != UNKNOWN), UNKNOWN)

    def takers(self, value: int) -> Sequence[CallParts]:
        """Return the calls with backward records that took a value in a differentiable slot: its gradient is the sum of the gradients they
        pass on.

        A call that took a view of the value counts too, if the view itself has no backward record.
        """
        return self._takers.get(value, ())

    @cached_property
    def _takers(self) -> dict[int, list[CallParts]]:
        links = list(self._viewed)
        for value in range(len(links)):
            maker = self.maker(value)
            parts = self.call(maker) if maker != UNKNOWN else None
            if parts is not None and parts.backward:
                links[value] = UNKNOWN
        roots = _ends(links)
        takers: defaultdict[int, list[CallParts]] = defaultdict(list)
        for at, record in enumerate(self.records):
            parts = self.call(at)
            if record is None or parts is None or not parts.backward or record.phase != "forward":
                continue
            for slot, value in zip(record.slots, self.values(at), strict=True):
                if value != UNKNOWN and slot.requires_grad and slot.slot.role in RECEIVED_ROLES["forward"]:
                    found = takers[roots[value]]
                    if not found or found[-1] is not parts:
                        found.append(parts)
        return dict(takers)


class _Ways(NamedTuple):
    """The values that one call received, by the marks that show a result to be a view of one of them."""

    by_bits: dict[Hashable, int]
    by_memory: dict[str, int]
    of_view: int

    @classmethod
    def of(cls, record: CallRecord, values: Sequence[int]) -> _Ways:
        by_bits: dict[Hashable, int] = {}
        by_memory: dict[str, int] = {}
        first = UNKNOWN
        for slot, value in zip(record.slots, values, strict=True):
            if slot.slot.role not in RECEIVED_ROLES["forward"]:
                continue
            if first == UNKNOWN:
                first = value
            if value != UNKNOWN:
                by_bits.setdefault(_bits(slot), value)
                if (memory := _memory(slot)) is not None:
                    by_memory.setdefault(memory, value)
        return cls(by_bits, by_memory, first if is_view(record.call.op) else UNKNOWN)

    def to(self, made: TensorRecord) -> int:
        """Return the value that a result looks at: the same elements in another shape, the same memory, or the first input of a view
        operation.
        """
        found = self.by_bits.get(_bits(made), UNKNOWN)
        if found == UNKNOWN and (memory := _memory(made)) is not None:
            found = self.by_memory.get(memory, UNKNOWN)
        return self.of_view if found == UNKNOWN else found


def _ends(links: Sequence[int]) -> list[int]:
    """Follow each chain of links to its end; a cycle ends where it was entered."""
    ends = [UNKNOWN] * len(links)
    for start in range(len(links)):
        path, at = [], start
        while ends[at] == UNKNOWN:
            ends[at] = at
            path.append(at)
            at = links[at] if links[at] != UNKNOWN else at
        for one in path:
            ends[one] = ends[at]
    return ends


def _bits(slot: TensorRecord) -> Hashable:
    return slot.fingerprint or slot.content, slot.dtype, prod(slot.shape)


def _memory(slot: TensorRecord) -> str | None:
    """Return the hash of the bytes that a kept tensor is a view of."""
    return slot.content.partition(":")[0] if slot.content is not None and ":" in slot.content else None
