# SPDX-License-Identifier: Apache-2.0
"""Hold the index of a step against a naive reference on any records, and against the true course of simulated programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.model import CallName, CallRecord, Level, Phase, Slot, TensorRecord
from ulpscope.model.step_index import UNKNOWN, ForwardCalls, StepIndex, call_key, stepped_before

Shape = tuple[int, ...]


class Tensor(NamedTuple):
    """The facts that a slot shows of a tensor."""

    bits: str
    shape: Shape = (2, 3)
    dtype: str = "float32"
    content: str | None = None
    grad: bool = True


def slots(role: Any, tensors: Sequence[Tensor]) -> list[TensorRecord]:
    return [
        TensorRecord(
            slot=Slot(role, (at,)),
            dtype=one.dtype,
            shape=one.shape,
            fingerprint=one.bits or None,
            content=one.content,
            requires_grad=one.grad,
        )
        for at, one in enumerate(tensors)
    ]


def call(
    op: str,
    given: Sequence[Tensor] = (),
    made: Sequence[Tensor] = (),
    *,
    index: int = 0,
    phase: Phase = "forward",
    level: Level = "api",
    module: str = "",
    recompute: bool = False,
) -> CallRecord:
    found = tuple(slots("input", given) + slots("output", made))
    name = CallName(op, index)
    return CallRecord(rank=0, step=0, order=0, call=name, phase=phase, level=level, module=module, slots=found, recompute=recompute)


def ordered(records: Sequence[CallRecord]) -> list[CallRecord]:
    return [replace(one, order=at) for at, one in enumerate(records)]


# ---- any records


LEVELS: list[Level] = ["api", "module", "state"]
PHASES: list[Phase] = ["start", "forward", "forward", "forward", "backward", "optimizer", "end"]
TENSORS = st.builds(
    Tensor,
    st.sampled_from(["", "a", "b", "c", "d"]),
    st.sampled_from([(2, 3), (3, 2), (6,), (2, 2)]),
    st.sampled_from(["float32", "int32"]),
    st.sampled_from([None, None, "a:float32:2x3", "e:float32:3x2:1x3:0"]),
    st.booleans(),
)
RECORDS = st.builds(
    call,
    st.sampled_from(["Tensor.add", "Tensor.t", "Tensor.add_"]),
    st.lists(TENSORS, max_size=3),
    st.lists(TENSORS, max_size=2),
    index=st.integers(0, 2),
    phase=st.sampled_from(PHASES),
    level=st.sampled_from(LEVELS),
    module=st.sampled_from(["", "layer"]),
)
Place = tuple[int, int]


@dataclass
class Naive:
    """The same answers, each found by looking through all records before."""

    records: Sequence[CallRecord | None]

    def __post_init__(self) -> None:
        self.birth = cache(self._birth)

    def slots(self, at: int) -> Sequence[TensorRecord]:
        record = self.records[at]
        return record.slots if record is not None else ()

    def key(self, place: Place) -> Any:
        slot = self.slots(place[0])[place[1]]
        bits = slot.fingerprint or slot.content
        return None if bits is None else (bits, slot.dtype, slot.shape)

    def is_received(self, place: Place) -> bool:
        record = self.records[place[0]]
        assert record is not None
        return record.receives(record.slots[place[1]].slot)

    def is_made(self, place: Place) -> bool:
        record = self.records[place[0]]
        assert record is not None
        return not self.is_received(place) and record.phase not in ("start", "end")

    def in_record(self, at: int, key: Any) -> list[Place]:
        return [(at, number) for number in range(len(self.slots(at))) if self.key((at, number)) == key]

    def before(self, at: int, key: Any) -> Place | None:
        places = [place for one in range(at) for place in self.in_record(one, key)]
        return self.birth(places[-1]) if places else None

    def _birth(self, place: Place) -> Place | None:
        """Return where the value of a slot was made or first seen."""
        at = place[0]
        key = self.key(place)
        if key is None:
            return None
        here = self.in_record(at, key)
        if not self.is_made(place):
            first = next(one for one in here if not self.is_made(one))
            return self.before(at, key) or (self.birth(first) if first != place else place)
        given = [one for one in here if not self.is_made(one)]
        if given:
            return self.birth(given[0])
        if here[0] != place:
            return self.birth(here[0])
        before = self.before(at, key)
        if before is None:
            return place
        if self.looks_only(at):
            return before
        kinds = {self.kind(maker) for maker in self.makers(before, at)}
        return before if kinds and kinds | {self.kind(at)} == {"module", "call"} and self.kind(at) not in kinds else place

    def kind(self, at: int) -> str:
        record = self.records[at]
        return "module" if record is not None and record.level == "module" else "call"

    def looks_only(self, at: int) -> bool:
        record = self.records[at]
        return record is not None and record.phase == "forward" and record.call.op == "Tensor.t"

    def makers(self, birth: Place, until: int) -> list[int]:
        key = self.key(birth)
        found = []
        for at in range(birth[0], until):
            here = self.in_record(at, key)
            record = self.records[at]
            if self.looks_only(at) and at != birth[0]:
                continue
            is_given = record is not None and record.phase == "start" and at == birth[0]
            if here and (is_given or all(self.is_made(one) for one in here)) and self.birth(here[0]) == birth:
                found.append(at)
        return found

    def maker(self, birth: Place) -> int:
        makers = self.makers(birth, len(self.records))
        return next((one for one in makers if self.kind(one) == "call"), makers[0] if makers else UNKNOWN)

    def readers(self, birth: Place) -> list[int]:
        return [
            at
            for at in range(len(self.records))
            if any(self.is_received((at, number)) and self.birth((at, number)) == birth for number in range(len(self.slots(at))))
        ]


@given(st.lists(st.one_of(st.none(), RECORDS, RECORDS, RECORDS), max_size=9))
def test_values_are_those_of_a_naive_reference(records: list[CallRecord | None]) -> None:
    index, naive = StepIndex(records), Naive(records)
    births: dict[int, Place] = {}
    for at in range(len(records)):
        for number, value in enumerate(index.values(at)):
            birth = naive.birth((at, number))
            assert (value == UNKNOWN) == (birth is None)
            if birth is not None:
                assert births.setdefault(value, birth) == birth
                assert index.maker(value) == naive.maker(birth)
                assert list(index.readers(value)) == naive.readers(birth)
    assert len(set(births.values())) == len(births)


@given(st.lists(st.one_of(st.none(), RECORDS, RECORDS, RECORDS), max_size=9))
def test_forward_calls_are_those_of_a_naive_reference(records: list[CallRecord | None]) -> None:
    index, passing = StepIndex(records), ForwardCalls[int]()
    for at, record in enumerate(records):
        if record is None:
            continue
        same = [one for one in range(len(records)) if (other := records[one]) is not None and call_key(other) == call_key(record)]
        forward = [one for one in same if records[one].phase == "forward"]  # type: ignore[union-attr]
        backward = [one for one in same if records[one].phase == "backward"]  # type: ignore[union-attr]
        if record.phase in ("forward", "backward"):
            assert index.call(at) == (forward, backward)
        expected = max((one for one in forward if one < at), default=UNKNOWN) if record.phase == "backward" else UNKNOWN
        assert index.forward(at) == expected
        found = passing.of(record)
        assert (UNKNOWN if found is None else found) == expected
        passing.add(record, at)


@given(st.lists(RECORDS, max_size=12))
def test_every_chain_of_views_ends(records: list[CallRecord]) -> None:
    index = StepIndex(records)
    for at in range(len(records)):
        for value in index.values(at):
            base = index.base(value)
            assert base == UNKNOWN if value == UNKNOWN else index.base(base) == base
            assert all(parts.backward for parts in index.takers(value))


# ---- what programs really do


@dataclass(frozen=True)
class Seen:
    """A tensor of a simulated program: its memory, and the view through which it looks at it."""

    memory: int
    way: str

    def shown(self, versions: dict[int, int], *, keeps: bool) -> Tensor:
        """Return the bits and shape that a record shows: another view has other bits, another shape the same."""
        version = f"{self.memory}v{versions[self.memory]}"
        bits, shape = {"whole": (version, (2, 3)), "turned": (f"{version}t", (3, 2)), "flat": (version, (6,))}[self.way]
        view = {"whole": "2x3", "turned": "3x2:1x3:0", "flat": "6"}[self.way]
        return Tensor(bits, shape, content=f"{version}:float32:{view}" if keeps else None)


class Truth(NamedTuple):
    """The truth about one slot: who made the value, whose memory it looks at in which version, and whether a call made that in this
    step.
    """

    maker: int
    memory: int
    version: int


STEPS = st.lists(st.tuples(st.sampled_from(["make", "view", "flatten", "write", "pass", "read"]), st.integers(0, 30)), max_size=25)


def run_program(steps: Sequence[tuple[str, int]], *, keeps: bool) -> tuple[list[CallRecord], list[list[Truth]]]:
    """Run a random program with views, writes in place and shared memory; return its records, and the truth of each of their slots."""
    versions: dict[int, int] = {0: 0}
    tensors = [Seen(0, "whole")]
    makers: dict[tuple[Seen, int], int] = {}
    records: list[CallRecord] = []
    truths: list[list[Truth]] = []

    def truth(seen: Seen) -> Truth:
        version = versions[seen.memory]
        return Truth(makers.get((seen, version), UNKNOWN), seen.memory, version)

    for kind, chosen in steps:
        at = len(records)
        source = tensors[chosen % len(tensors)]
        given, known = source.shown(versions, keeps=keeps), truth(source)
        made = source
        if kind == "make":
            made = Seen(len(versions), "whole")
            versions[made.memory] = 0
        elif kind == "view":
            made = Seen(source.memory, {"whole": "turned", "turned": "whole", "flat": "whole"}[source.way])
        elif kind == "flatten":
            made = Seen(source.memory, "flat" if source.way != "turned" else "turned")
        elif kind == "write":
            versions[source.memory] += 1
        op = {"make": "torch.exp", "view": "Tensor.t", "flatten": "Tensor.flatten", "write": "Tensor.add_"}.get(kind, "torch.sum")
        results = [] if kind == "read" else [made.shown(versions, keeps=keeps)]
        if kind in ("make", "write") or (kind != "read" and made != source):
            makers[made, versions[made.memory]] = at
        records.append(call(op, [given], results, index=at))
        truths.append([known, *([truth(made)] if results else [])])
        tensors.append(made)
    return records, truths


@given(STEPS, st.booleans())
def test_makers_are_found_through_views_and_versions(steps: list[tuple[str, int]], keeps: bool) -> None:
    records, truths = run_program(steps, keeps=keeps)
    index = StepIndex(records)
    bases: dict[int, set[tuple[int, int]]] = {}
    for at, known in enumerate(truths):
        for value, true in zip(index.values(at), known, strict=True):
            if true.maker == UNKNOWN or index.maker(value) == true.maker:
                bases.setdefault(index.base(value), set()).add((true.memory, true.version))
            else:  # seen before as the result of a view that gave back what it had been made from
                assert index.maker(value) < true.maker
    assert all(len(looked_at) == 1 for looked_at in bases.values())


def test_a_view_of_a_view_leads_to_its_base() -> None:
    a, turned, part, other = Tensor("a"), Tensor("b", (3, 2)), Tensor("c", (1, 2)), Tensor("d")
    index = StepIndex(
        [
            call("functional.linear", [Tensor("x")], [a]),
            call("Tensor.t", [a], [turned]),
            call("Tensor.__getitem__", [turned], [part]),
            call("torch.mul", [part, a], [other]),
        ]
    )
    base = index.base(index.value(3, Slot("input", (0,))))
    assert (index.maker(base), list(index.readers(base))) == (0, [1, 3])
    assert index.base(index.value(3, Slot("output", (0,)))) != base


def test_what_is_written_through_a_view_is_found_through_another() -> None:
    """Parts of a bucket are scaled in place, and taken out of the bucket again."""
    index = StepIndex(
        [
            call("Tensor.chunk", [Tensor("whole", (4, 3))], [Tensor("a"), Tensor("b")]),
            call("Tensor.mul_", [Tensor("a")], [Tensor("c")]),
            call("Tensor.chunk", [Tensor("whole, with c", (4, 3))], [Tensor("c"), Tensor("b")], index=1),
            call("torch.cat", [Tensor("c"), Tensor("b")], [Tensor("both", (4, 3))]),
        ]
    )
    value = index.value(3, Slot("input", (0,)))
    assert (index.maker(value), list(index.readers(value))) == (1, [3])
    assert index.maker(index.value(2, Slot("input", (0,)))) == UNKNOWN


def test_a_shape_that_no_call_gave_is_a_view() -> None:
    index = StepIndex([call("torch.exp", [Tensor("x")], [Tensor("a", (2, 3))]), call("torch.sum", [Tensor("a", (6,))], [Tensor("b", ())])])
    flat = index.value(1, Slot("input", (0,)))
    assert index.maker(flat) == UNKNOWN
    assert index.maker(index.base(flat)) == 0
    other = StepIndex([call("torch.zeros", [], [Tensor("0", (2, 3))]), call("torch.sum", [Tensor("0", (4,))], [Tensor("b", ())])])
    assert other.base(1) == 1, "as many zeros they are not"


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_module_returns_was_made_inside_it(is_first: bool) -> None:
    inside = call("functional.linear", [Tensor("x")], [Tensor("a")], module="layer")
    around = call("Linear", [Tensor("x")], [Tensor("a")], level="module", module="layer")
    after = call("torch.sum", [Tensor("a")], [Tensor("b")])
    records = [around, inside, after] if is_first else [inside, around, after]
    index = StepIndex(records)
    value = index.value(2, Slot("input", (0,)))
    assert records[index.maker(value)] is inside
    assert {index.value(at, Slot("output", (0,))) for at in (0, 1)} == {value}


# ---- gradients


def small_step() -> list[CallRecord]:
    """Make a step: x -> linear -> t (no backward record) -> two users; one of them twice."""
    h, turned = Tensor("h"), Tensor("t", (3, 2))
    start = replace(call("state.parameters", phase="start", level="state"), slots=tuple(named("parameter", "w", Tensor("w"))))
    forward = [
        call("functional.linear", [Tensor("x", grad=False), Tensor("w")], [h]),
        call("Tensor.t", [h], [turned]),
        call("torch.sin", [turned], [Tensor("s")]),
        call("torch.cos", [h], [Tensor("c")]),
    ]
    backward = [
        call("torch.cos", [Tensor("gc")], [Tensor("g1")], phase="backward"),
        call("torch.sin", [Tensor("gs")], [Tensor("g2")], phase="backward"),
        call("functional.linear", [Tensor("gh")], [Tensor("gx"), Tensor("gw")], phase="backward"),
    ]
    step = replace(call("optimizer.SGD", phase="optimizer", level="state"), slots=tuple(named("gradient", "w", Tensor("gw"))))
    return ordered([start, *forward, *backward, step])


def named(role: Any, name: str, tensor: Tensor) -> list[TensorRecord]:
    return [replace(one, slot=Slot(role, (name,))) for one in slots(role, [tensor])]


def test_a_gradient_is_the_sum_of_what_all_takers_pass_on() -> None:
    records = small_step()
    index = StepIndex(records)
    value = index.differentiated(7, Slot("input", (0,)))
    assert index.maker(value) == 1
    assert [index.records[one].call.op for parts in index.takers(value) for one in parts.backward] == ["torch.sin", "torch.cos"]  # type: ignore[union-attr]
    weight = index.differentiated(8, Slot("gradient", ("w",)))
    assert index.tensor(weight).fingerprint == "w"
    assert [parts.backward for parts in index.takers(weight)] == [[7]]
    assert index.differentiated(7, Slot("output", (1,))) == weight


def test_the_forward_call_of_a_recomputed_one_is_the_second() -> None:
    first, again = (call("torch.sin", [Tensor("x")], [Tensor("s")], recompute=recompute) for recompute in (False, True))
    records = ordered([first, again, call("torch.sin", [Tensor("g")], [Tensor("h")], phase="backward")])
    index = StepIndex.of(reversed(records))
    assert index.forward_of(records[2]) is records[1]
    assert index.call(0) == ([0, 1], [2])
    assert index.earlier_backward(records[2]) == []


def test_names_of_other_modules_and_levels_are_other_calls() -> None:
    records = ordered(
        [
            call("Linear", [Tensor("x")], [Tensor("a")], module="first", level="module"),
            call("Linear", [Tensor("a")], [Tensor("b")], module="second", level="module"),
            call("Linear", [Tensor("gb")], [Tensor("ga")], module="second", level="module", phase="backward"),
            call("Linear", [Tensor("ga")], [Tensor("gx")], module="first", level="module", phase="backward"),
        ]
    )
    index = StepIndex.of(records)
    assert [index.forward_of(one) for one in records] == [None, None, records[1], records[0]]


def test_the_step_before_is_of_the_same_parameters() -> None:
    def step(order: int, index: int, name: str, op: str = "optimizer.AdamW") -> CallRecord:
        record = call(op, index=index, phase="optimizer", level="state")
        return replace(record, order=order, slots=tuple(named("mutated", name, Tensor(f"{name}{order}"))))

    earlier = [step(0, 0, "w"), step(1, 1, "v"), step(2, 0, "w", "optimizer.SGD")]
    assert stepped_before(step(3, 2, "w"), earlier) is earlier[0]
    assert stepped_before(step(3, 2, "v"), earlier) is earlier[1]
    assert stepped_before(step(3, 0, "u"), earlier) is None
