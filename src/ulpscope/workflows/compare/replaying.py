# SPDX-License-Identifier: Apache-2.0
"""Which calls of a comparison are replayed, and how: both sides on their own inputs, in execution order, within a time limit.

`needed` replays what differs until a fault is found, but for what is too near for a replay to blame; `all` everything that differs;
`none` nothing. A machine that rounds the operands of
its matrix products is recognised from several calls of a family before one of them is blamed.
"""

from __future__ import annotations

import ast
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeAlias

from ulpscope.judge import argument_differences, is_beyond_doubt, multiple_of, product_family, replay_limits, with_own_limits
from ulpscope.model import (
    DTYPES,
    ArgumentDifference,
    Arguments,
    CallRecord,
    CallReplay,
    DType,
    JudgedCall,
    Measurement,
    NotMeasured,
    OperandFormat,
    Pair,
    PairReplay,
    Run,
    Side,
    SlotReplay,
    SystemicPrecision,
    TensorData,
)
from ulpscope.model.nouns import dataclass

if TYPE_CHECKING:
    import torch

    from ulpscope.model import Slot
    from ulpscope.replay import Program

__all__ = ["ReplayMode", "Replaying"]

ReplayMode: TypeAlias = Literal["needed", "all", "none"]
_SAMPLE = 8
_FAMILIES = ("matrix product", "convolution")
_INSIDE = "matrix product"
_ALIKE: dict[OperandFormat | None, OperandFormat] = {"float16": "tf32", "tf32": "float16"}
"""Formats of the same precision: only values at the end of a range tell them apart."""
_FORMATS: dict[OperandFormat, DType] = {"float16": DTYPES["float16"], "tf32": DTYPES["float16"], "bfloat16": DTYPES["bfloat16"]}


@dataclass(slots=True)
class _Side:
    """What is known of one side while its calls pass by."""

    run: Run
    operands: dict[str, OperandFormat | None] = field(default_factory=dict)
    explained: dict[tuple[str, OperandFormat], list[str]] = field(default_factory=dict)
    num_products: Counter[str] = field(default_factory=Counter)
    forward: dict[Hashable, CallRecord] = field(default_factory=dict)
    backward: dict[Hashable, list[CallRecord]] = field(default_factory=dict)
    parameters: list[CallRecord] = field(default_factory=list)
    stepped: dict[str, CallRecord] = field(default_factory=dict)
    doubted: frozenset[Slot] | None = None

    @property
    def formats(self) -> list[OperandFormat]:
        """The formats of operands that were recognised here, in a family or in a call."""
        return list(dict.fromkeys([*(one for one in self.operands.values() if one), *(one for _, one in self.explained)]))

    def explain(self, record: CallRecord, operands: OperandFormat) -> None:
        """Remember that one call alone was found to round its operands so; a call whose name tells nothing multiplies matrices inside."""
        self.explained.setdefault((product_family(record) or _INSIDE, operands), []).append(f"{record.name} {record.phase}")

    def reader(self, record: CallRecord) -> Callable[[str], TensorData]:
        return lambda content: self.run.tensor(record.rank, record.step, content)

    def begin_step(self) -> None:
        self.forward.clear()
        self.backward.clear()
        self.parameters.clear()

    def stepped_before(self, record: CallRecord) -> CallRecord | None:
        """The same optimizer's step just before this one."""
        before = self.stepped.get(str(record.call))
        return before if before is not None and before.step == record.step - 1 else None

    def pass_by(self, record: CallRecord) -> None:
        if record.phase in ("forward", "backward") and (family := product_family(record)):
            self.num_products[family] += 1
        if record.phase == "forward":
            self.forward[_key(record)] = record
        elif record.phase == "backward":
            self.backward.setdefault(_key(record), []).append(record)
        elif record.phase == "start" and record.call.op == "state.parameters":
            self.parameters.append(record)
        elif record.phase == "optimizer":
            self.stepped[str(record.call)] = record


class Replaying:
    """Replays the pairs of one comparison; `settle` says that a fault is found."""

    def __init__(self, subject: Run, reference: Run, mode: ReplayMode = "needed", seconds: float = 600.0) -> None:
        self.why_not = "" if mode != "none" else "replay is switched off"
        if mode != "none" and find_spec("torch") is None:
            self.why_not = "torch is not installed here"
        self._replayed, self._left_out, self._missed = 0, 0, 0
        self._refused: Counter[str] = Counter()
        self._mode = mode
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._settled: set[int] = set()
        self._subjects: dict[int, _Side] = {}
        self._references: dict[int, _Side] = {}
        self._runs = (subject, reference)
        self._pairs: Sequence[Pair] = ()

    @property
    def precision(self) -> tuple[SystemicPrecision, ...]:
        """The formats that were recognised, each side and family once."""
        sides: tuple[tuple[Side, dict[int, _Side]], ...] = (("subject", self._subjects), ("reference", self._references))
        found = {
            (name, family): SystemicPrecision(family=family, operands=operands, side=name)
            for name, ranks in sides
            for side in ranks.values()
            for family, operands in side.operands.items()
            if operands is not None
        }
        alone = [
            SystemicPrecision(family=family, operands=one, side=name, calls=tuple(calls), num_family=side.num_products[family])
            for name, ranks in sides
            for side in ranks.values()
            for (family, one), calls in side.explained.items()
            if (name, family) not in found
        ]
        return (*found.values(), *alone)

    def coarsest_operands(self, rank: int) -> DType | None:
        sides = (side for side in (self._subjects.get(rank), self._references.get(rank)) if side is not None)
        found = [_FORMATS[one] for side in sides for one in side.formats]
        return max(found, key=lambda one: one.eps, default=None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not replayed although it would have helped, and why."""
        notes = []
        if self._missed:
            notes.append(f"{self.why_not}: {_calls(self._missed)} judged by the distance of the two sides only")
        if self._left_out:
            done, left = _calls(self._replayed), _calls(self._left_out)
            notes.append(f"replay stopped after {self._seconds:g} s: {done} replayed, {left} judged without; see --replay-limit")
        if many := self._refused.total():
            reason, times = self._refused.most_common(1)[0]
            what = "judged by the distance of the two sides: they could not be run again"
            notes.append(f"{_calls(many)} {what} (most often, {times} times: {reason[:160]})")
        return tuple(notes)

    def settle(self, rank: int) -> None:
        self._settled.add(rank)

    def begin_step(self, rank: int, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        for side in self._sides(rank):
            side.begin_step()

    def __call__(self, pair: Pair, measurements: Sequence[Measurement], foresee: Callable[[], JudgedCall]) -> PairReplay | None:
        """Both sides of a pair, replayed; None where that is not needed or not possible. `foresee` tells the verdict without."""
        sides = self._sides(pair.record.rank)
        try:
            return self._replay(pair, sides) if self._is_needed(pair, measurements, foresee) else None
        finally:
            for record, side in zip((pair.subject, pair.reference), sides, strict=True):
                if record is not None:
                    side.pass_by(record)

    def _sides(self, rank: int) -> tuple[_Side, _Side]:
        return (
            self._subjects.setdefault(rank, _Side(self._runs[0])),
            self._references.setdefault(rank, _Side(self._runs[1])),
        )

    def _is_needed(self, pair: Pair, measurements: Sequence[Measurement], foresee: Callable[[], JudgedCall]) -> bool:
        record = pair.record
        if pair.subject is None or pair.reference is None or record.phase == "start" or record.level == "module":
            return False
        if record.rank in self._settled and self._mode == "needed":
            return False
        measured = zip(pair.slots, measurements, strict=True)
        made = [(slot, found) for slot, found in measured if not record.receives(slot.slot)]
        apart = [slot for slot, found in made if isinstance(found, NotMeasured) or found.equal is not True]
        if not any(slot.subject and slot.reference and slot.subject.content and slot.reference.content for slot in apart):
            return False
        if self.why_not:
            self._missed += 1
            return False
        if self._mode == "needed" and not self._doubt(pair, foresee()):
            return False
        if time.monotonic() > self._deadline:
            self._left_out += 1
            return False
        return True

    def _doubt(self, pair: Pair, foreseen: JudgedCall) -> bool:
        """Whether a replay could say something else; of an optimizer's step the sides remember about which results."""
        if _differ_in_arguments(pair):
            return True
        made = (slot for slot in foreseen.slots if not pair.record.receives(slot.pair.slot))
        doubted = frozenset(slot.pair.slot for slot in made if not is_beyond_doubt(slot))
        for side in self._sides(pair.record.rank):
            side.doubted = doubted if pair.record.phase == "optimizer" else None
        return bool(doubted)

    def _replay(self, pair: Pair, sides: tuple[_Side, _Side]) -> PairReplay:
        self._replayed += 1
        records = (record for record in (pair.subject, pair.reference) if record is not None)
        ours, theirs = (self._replay_side(record, side) for record, side in zip(records, sides, strict=True))
        self._refused.update({one.why_not for one in (ours, theirs) if one.why_not and not one.is_random})
        exchanged = self._exchanged(pair, sides) if ours.slots else None
        return PairReplay(subject=ours, reference=theirs, arguments=exchanged)

    def _replay_side(self, record: CallRecord, side: _Side) -> CallReplay:
        family = product_family(record)
        operands = side.operands.get(family) if family else None
        operands = operands if operands and _narrows(operands, record) else None
        replayed = _replay(record, side, operands)
        if family and family not in side.operands and _is_beyond(replayed):
            operands = side.operands[family] = self._recognise(family, side)
            replayed = _replay(record, side, operands) if operands and _narrows(operands, record) else replayed
        return self._explained(record, side, replayed) if _is_beyond(replayed) and replayed.has_products else replayed

    def _explained(self, record: CallRecord, side: _Side, replayed: CallReplay) -> CallReplay:
        """A call with products that errs, as one that rounds their operands where that is what it did; else as it was replayed.

        Machines choose kernels by size and kind, so one product may round its operands where others do not, and so may what a call of any
        name multiplies inside. Its operands predict what it gives then, digit by digit. What a kernel rounds on the way is not known from
        outside, only how large such rounding is: that counts where the format was recognised before.
        """
        for operands, loosely in self._ways(record, side, replayed.operands):
            if not _narrows(operands, record):
                continue
            attempt = _replay(record, side, operands, loosely=loosely)
            if attempt.slots and not _is_beyond(attempt):
                side.explain(record, operands)
                return attempt
        return replayed

    def _ways(self, record: CallRecord, side: _Side, tried: OperandFormat | None) -> Iterator[tuple[OperandFormat, bool]]:
        """Formats, and whether only the size of their rounding is asked for: first what this side was found to do before."""
        known = side.formats
        yield from ((one, False) for one in known if one != tried)
        yield from ((one, True) for one in known)
        yield from ((one, False) for one in _FORMATS if one != tried and one not in known)
        if not known:
            self._recognise_others(product_family(record), side)
            yield from ((one, True) for one in side.formats)

    def _recognise_others(self, family: str | None, side: _Side) -> None:
        for other in _FAMILIES:
            if other != family and other not in side.operands:
                side.operands[other] = self._recognise(other, side)

    def _recognise(self, family: str, side: _Side) -> OperandFormat | None:
        """The format that a family's operands are rounded to on one side; small gradients tell two of the same precision apart."""
        from ulpscope.replay import effective_operands

        which = "subject" if side.run is self._runs[0] else "reference"
        records = [record for pair in self._pairs if (record := getattr(pair, which)) is not None]
        whole = _Side(side.run, forward={_key(record): record for record in records if record.phase == "forward"})
        made, passed_back = ([_told(record, whole) for record in _spread(records, family, phase)] for phase in ("forward", "backward"))
        forward = [one for one in made if not isinstance(one, str)]
        operands = effective_operands(forward) if forward else None
        if operands not in _ALIKE:
            return operands
        return effective_operands([*forward, *(one for one in passed_back if not isinstance(one, str))]) or operands

    def _exchanged(self, pair: Pair, sides: tuple[_Side, _Side]) -> CallReplay | None:
        """What the reference's arguments make of the subject's tensors, against the subject's own exact result.

        A number that is a limit of a dtype stays the subject's own: it is another number, and so another result, of the same argument.
        """
        called = _forward_pair(pair, sides)
        if called is None or called.subject is None or called.reference is None:
            return None
        arguments = with_own_limits(called.subject, called.reference)
        if arguments == called.reference.arguments and not _differ_in_arguments(called):
            return None
        if called.subject.call.op != called.reference.call.op:
            return CallReplay(why_not="another operation")
        others = filter(_is_argument, argument_differences(called))
        has_ties = all(_is_fraction(one.subject) and _is_fraction(one.reference) for one in others)
        return _attempt(lambda: _exchange(pair.record, arguments, sides[0], has_ties=has_ties))


def _spread(records: Sequence[CallRecord], family: str, phase: str) -> Sequence[CallRecord]:
    """A few calls of a family, from all over the step."""
    members = [record for record in records if record.phase == phase and product_family(record) == family]
    return members[:: max(1, len(members) // _SAMPLE)][:_SAMPLE]


def _calls(many: int) -> str:
    return f"{many} call{'' if many == 1 else 's'}"


def _forward_pair(pair: Pair, sides: tuple[_Side, _Side]) -> Pair | None:
    """The records that hold the arguments of a pair: itself, or the forward calls of a backward one."""
    if pair.record.phase != "backward":
        return pair
    records = [side.forward.get(_key(record)) for side, record in zip(sides, (pair.subject, pair.reference), strict=True) if record]
    return replace(pair, subject=records[0], reference=records[1], slots=()) if len(records) == 2 and all(records) else None


def _differ_in_arguments(pair: Pair) -> bool:
    return any(map(_is_argument, argument_differences(pair)))


def _is_argument(difference: ArgumentDifference) -> bool:
    return not difference.what.startswith(("strides of", "dtype of", "shape of", "requires_grad of", "mode "))


def _is_fraction(text: str) -> bool:
    """Whether an argument, as it is shown, is a number that is no integer: each side may have computed its own."""
    try:
        return isinstance(ast.literal_eval(text), float)
    except (SyntaxError, ValueError):
        return False


def _key(record: CallRecord) -> Hashable:
    return record.level, record.call, record.module


def _attempt(replay: Callable[[], CallReplay]) -> CallReplay:
    """A call that cannot be replayed is judged otherwise; whatever goes wrong in somebody's operation is such a case."""
    try:
        return replay()
    except Exception as error:
        return CallReplay(why_not=str(error) or type(error).__name__)


def _replay(record: CallRecord, side: _Side, operands: OperandFormat | None, *, loosely: bool = False) -> CallReplay:
    def replay() -> CallReplay:
        from ulpscope.replay import Yardstick, has_free_signs, is_random, with_signs_of

        recorded = _results(record, side)
        slots: list[SlotReplay] = []
        has_products = False
        for program in _programs(record, side):
            if is_random(program):
                return CallReplay(is_random=True, why_not="it draws random numbers")
            yardstick = Yardstick(program, operands=operands, loosely=loosely)
            if has_free_signs(record.call):
                recorded = with_signs_of(record.call, recorded, yardstick.exact())
            slots += yardstick.measure(recorded, enough=replay_limits)
            has_products |= yardstick.has_products
        return CallReplay(slots=tuple(slots), operands=operands, has_products=has_products)

    return _attempt(replay)


def _exchange(record: CallRecord, arguments: Arguments | None, side: _Side, *, has_ties: bool) -> CallReplay:
    """Two exact results on the same inputs: a tie falls otherwise only if an argument is a fraction that either side rounded."""
    from ulpscope.replay import Yardstick

    exchanged = {slot: value for program in _programs(record, side, arguments) for slot, value in Yardstick(program).exact().items()}
    yardsticks = (Yardstick(program) for program in _programs(record, side))
    slots = [one for yardstick in yardsticks for one in yardstick.measure(exchanged, enough=replay_limits, has_ties=has_ties)]
    return CallReplay(slots=tuple(slots))


def _narrows(operands: OperandFormat, record: CallRecord) -> bool:
    """Whether what enters a call has digits that this format cuts off: else such a machine computes what every other one does."""
    known = [DTYPES[slot.dtype] for slot in record.slots if record.receives(slot.slot) and slot.dtype in DTYPES]
    floating = [one.mantissa for one in known if one.is_floating]
    return not floating or max(floating) > _FORMATS[operands].mantissa


def _is_beyond(replay: CallReplay) -> bool:
    return any(multiple_of(slot) > 1 for slot in replay.slots)


def _told(record: CallRecord, side: _Side) -> tuple[Program, Mapping[Slot, torch.Tensor]] | str:
    try:
        return next(_programs(record, side)), _results(record, side)
    except Exception as error:
        return str(error)


def _results(record: CallRecord, side: _Side) -> Mapping[Slot, torch.Tensor]:
    from ulpscope.replay import recorded_results

    return recorded_results(record, side.reader(record))


def _is_doubted(side: _Side, name: str) -> bool:
    """Whether the step of this parameter has to be replayed."""
    return side.doubted is None or any(f"{slot}.".partition(".")[2].startswith(f"{name}.") for slot in side.doubted)


def _programs(record: CallRecord, side: _Side, arguments: Arguments | None = None) -> Iterator[Program]:
    """The call itself; of an optimizer's step one program for each parameter, so that memory stays that of the largest."""
    from ulpscope.replay import (
        NotReplayable,
        backward_program,
        forward_program,
        has_free_signs,
        optimizer_program,
        stepped_parameters,
    )

    read = side.reader(record)
    if record.phase == "forward":
        yield forward_program(record, read, arguments=arguments)
    elif record.phase == "backward":
        forward = side.forward.get(_key(record))
        if forward is None:
            raise NotReplayable("its forward call was not recorded")
        if has_free_signs(record.call):
            raise NotReplayable("the signs of its results are free, and so are those of its gradients")
        yield backward_program(forward, record, read, arguments=arguments, earlier=side.backward.get(_key(record), ()))
    else:
        before = side.stepped_before(record)
        step = record if arguments is None else replace(record, arguments=arguments)
        for name in filter(partial(_is_doubted, side), stepped_parameters(step)):
            yield optimizer_program(
                step,
                read,
                parameters=side.parameters,
                previous=before,
                read_previous=side.reader(before) if before else None,
                names=(name,),
            )
