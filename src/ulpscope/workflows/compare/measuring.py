# SPDX-License-Identifier: Apache-2.0
"""Match and measure the steps of two runs: the tensors of a step are read while the one before it is judged.

Records of two steps are in memory at once, and as many tensors as there are cores. Values that appear in many slots (an output is the next
call's input, and often seen in another shape) are measured once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ulpscope.match import Mapping, match_calls, with_ends_told, with_makers_first
from ulpscope.measure import measure_slot, measure_sums, with_shape
from ulpscope.model import CallRecord, Frame, Measurement, Pair, Run, SlotPair, TensorMeasurement, TensorRecord
from ulpscope.model.step_index import StepIndex
from ulpscope.numerics.difference.kept_pairs import KeptPairs, Scratch
from ulpscope.numerics.difference.kept_place import Kept
from ulpscope.store import DirectoryRun
from ulpscope.workflows.compare.ahead import Ahead, Task
from ulpscope.workflows.compare.early import begun_early

__all__ = ["MeasuredStep", "measured_steps"]

_LARGE = 1 << 14


def measured_steps(
    subject: Run, reference: Run, parts: Sequence[tuple[int, int]], mapping: Mapping | None, ahead: Ahead
) -> Iterator[MeasuredStep]:
    """Measure the given ranks and steps in their order. The first is begun when this returns, every other one before its turn."""
    stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
    scratch = Scratch()
    steps = (MeasuredStep(subject, reference, rank, step, mapping, stacks, ahead, scratch) for rank, step in parts)
    return _one_ahead(next(steps), steps)


def _one_ahead(first: MeasuredStep, rest: Iterable[MeasuredStep]) -> Iterator[MeasuredStep]:
    for following in rest:
        yield first
        first = following
    yield first


class _Sums(NamedTuple):
    """A slot whose values only the kernel reads."""

    pairs: KeptPairs
    number: int
    slot: SlotPair


class MeasuredStep:
    """The pairs of one rank and step, and the data flow of each side; `measurements` returns those of a pair.

    Large tensors are measured ahead.
    """

    def __init__(
        self,
        subject: Run,
        reference: Run,
        rank: int,
        step: int,
        mapping: Mapping | None,
        stacks: dict[tuple[Frame, ...], tuple[Frame, ...]],
        ahead: Ahead,
        scratch: Scratch,
    ) -> None:
        self.rank = rank
        self.step = step
        runs = (subject, reference)
        recorded = [list(_sharing_stacks(run.records(rank, step), stacks)) for run in runs]
        self.subject, self.reference = (
            StepIndex.of(with_ends_told(own, other) if run.is_complete(rank, step) else own)
            for run, own, other in zip(runs, recorded, recorded[::-1], strict=True)
        )
        self.pairs = with_makers_first(match_calls(self.subject, self.reference, mapping))
        self._read_subject = lambda content: subject.tensor(rank, step, content)
        self._read_reference = lambda content: reference.tensor(rank, step, content)
        self._known: dict[Hashable, tuple[tuple[int, ...], Measurement | Task[Measurement] | _Sums]] = {}
        self._shaped: dict[Hashable, Measurement] = {}
        self._kept = KeptPairs(scratch)
        wanted = self._wanted(subject, reference)
        early = begun_early(subject, reference, rank, step)  # as late as possible, since the early threads work until this call
        for key, (slot, *sides) in wanted.items():
            if early is not None and (number := early.begun(*sides)) is not None:
                self._known[key] = (_shape(slot), _Sums(early, number, slot))
            elif (number := self._kept.add(*sides)) is not None:
                self._known[key] = (_shape(slot), _Sums(self._kept, number, slot))
            elif prod(_shape(slot)) >= _LARGE:
                self._known[key] = (_shape(slot), ahead.submit(self._measure, slot))
        self._kept.begin()
        ahead.share(self._kept)

    def _wanted(self, subject: Run, reference: Run) -> dict[Hashable, tuple[SlotPair, Kept | None, Kept | None]]:
        """Return the values that have to be read, each once, and where they lie."""
        wanted: dict[Hashable, tuple[SlotPair, Kept | None, Kept | None]] = {}
        for slot in (slot for pair in self.pairs for slot in pair.slots):
            if _has_values(slot) and (key := _values(slot)) is not None and key not in wanted:
                wanted[key] = (slot, _kept(subject, self, slot.subject), _kept(reference, self, slot.reference))
        return wanted

    def measurements(self, pair: Pair) -> list[Measurement]:
        return [self._measurement(slot) for slot in pair.slots]

    def _measurement(self, slot: SlotPair) -> Measurement:
        key = _values(slot)
        if key is None:
            return self._measure(slot)
        shape = _shape(slot)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (shape, self._measure(slot))
        elif isinstance(known[1], (Task, _Sums)):
            known = self._known[key] = (known[0], known[1].result() if isinstance(known[1], Task) else self._measured(known[1]))
        as_measured, found = known
        assert not isinstance(found, (Task, _Sums))
        if as_measured == shape or not isinstance(found, TensorMeasurement):
            return found
        return self._shaped.get((key, shape)) or self._shaped.setdefault((key, shape), with_shape(found, as_measured, shape))

    def _measured(self, sums: _Sums) -> Measurement:
        compared = sums.pairs.compared(sums.number)
        if compared is None:
            return self._measure(sums.slot)
        record = sums.slot.subject
        assert record is not None
        return measure_sums(record.dtype, record.shape, *compared)

    def _measure(self, slot: SlotPair) -> Measurement:
        return measure_slot(slot, self._read_subject, self._read_reference)


def _sharing_stacks(records: Iterable[CallRecord], stacks: dict[tuple[Frame, ...], tuple[Frame, ...]]) -> Iterator[CallRecord]:
    """Make equal stacks one object: a run has as many records as calls, but only as many stacks as lines."""
    here: dict[int, tuple[tuple[Frame, ...], tuple[Frame, ...]]] = {}  # within a step most equal stacks are one object already
    for record in records:
        found = here.get(id(record.stack))
        if found is None:
            found = here[id(record.stack)] = (record.stack, stacks.setdefault(record.stack, record.stack))
        yield record if found[1] is record.stack else replace(record, stack=found[1])


def _shape(slot: SlotPair) -> tuple[int, ...]:
    return slot.subject.shape if slot.subject is not None else ()


def _values(slot: SlotPair) -> Hashable | None:
    """Return the key of a measurement, without the shape of values that are read; None where nothing identifies the values."""
    ours, theirs = slot.subject, slot.reference
    if ours is None or theirs is None:
        return None
    if _is_read(ours, theirs) and ours.fingerprint is not None and theirs.fingerprint is not None:
        return ours.fingerprint, theirs.fingerprint, ours.dtype, theirs.dtype
    key = (_value(ours), _value(theirs))
    return None if None in key else key


def _is_read(ours: TensorRecord, theirs: TensorRecord) -> bool:
    """Tell whether values have to be read."""
    if ours.content is None or theirs.content is None or ours.shape != theirs.shape:
        return False
    return ours.fingerprint is None or ours.fingerprint != theirs.fingerprint


def _has_values(slot: SlotPair) -> bool:
    """Tell whether values have to be read."""
    ours, theirs = slot.subject, slot.reference
    return ours is not None and theirs is not None and _is_read(ours, theirs)


def _kept(run: Run, step: MeasuredStep, record: TensorRecord | None) -> Kept | None:
    """Return where the values lie, if they are those that the record describes."""
    if not isinstance(run, DirectoryRun) or record is None or record.content is None:
        return None
    found = run.kept(step.rank, step.step, record.content)
    return found if found is not None and (found.dtype, found.shape) == (record.dtype, record.shape) else None


def _value(record: TensorRecord) -> Hashable | None:
    if record.fingerprint is None and record.content is None:
        return None
    return record.fingerprint, record.content, record.dtype, record.shape
