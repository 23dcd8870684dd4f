# SPDX-License-Identifier: Apache-2.0
"""Choose the calls of a comparison to replay, and replay both sides on their own inputs, in execution order, within a time limit.

`needed` replays the calls that differ until a fault is found, except those too near for a replay to blame; `all` replays every call that
differs, `none` no call. A machine that rounds the operands of its matrix products is recognised from several calls of a family before one
of them is blamed.
"""

from __future__ import annotations

import ast
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

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
    ReplayMode,
    Run,
    Side,
    SlotReplay,
    SystemicPrecision,
    TensorData,
)
from ulpscope.model.nouns import dataclass
from ulpscope.model.step_index import StepIndex, stepped_before

if TYPE_CHECKING:
    import torch

    from ulpscope.model import Slot
    from ulpscope.replay import Program

__all__ = ["Replaying"]

_SAMPLE = 8
_FAMILIES = ("matrix product", "convolution")
_INSIDE = "matrix product"
_ALIKE: dict[OperandFormat | None, OperandFormat] = {"float16": "tf32", "tf32": "float16"}
"""Formats of the same precision: only values at the end of a range tell them apart."""
_FORMATS: dict[OperandFormat, DType] = {"float16": DTYPES["float16"], "tf32": DTYPES["float16"], "bfloat16": DTYPES["bfloat16"]}


@dataclass(slots=True)
class _Side:
    """Facts about one side: the data flow of the current step, and the operand formats found in all steps.

    `stepped` are the optimizers' steps of the training step before, if that was recorded.
    """

    run: Run
    index: StepIndex = field(default_factory=lambda: StepIndex(()))
    stepped: Sequence[CallRecord] = ()
    operands: dict[str, OperandFormat | None] = field(default_factory=dict)
    explained: dict[tuple[str, OperandFormat], list[str]] = field(default_factory=dict)
    num_products: Counter[str] = field(default_factory=Counter)

    @property
    def formats(self) -> list[OperandFormat]:
        """Return the formats of operands that were recognised on this side, in a family or in a call."""
        return list(dict.fromkeys([*(one for one in self.operands.values() if one), *(one for _, one in self.explained)]))

    def explain(self, record: CallRecord, operands: OperandFormat) -> None:
        """Remember that one call alone rounds its operands to this format; a call whose name says nothing multiplies matrices inside."""
        self.explained.setdefault((product_family(record) or _INSIDE, operands), []).append(f"{record.name} {record.phase}")

    def reader(self, record: CallRecord) -> Callable[[str], TensorData]:
        return lambda content: self.run.tensor(record.rank, record.step, content)

    def begin_step(self, index: StepIndex) -> None:
        before = self.index.optimizer_steps
        self.index = index
        self.stepped = [one for one in before if any(one.step == record.step - 1 for record in index.optimizer_steps)]
        self.num_products.update(family for record in index.all_records() if (family := _family_of(record)) is not None)

    def stepped_before(self, record: CallRecord) -> CallRecord | None:
        """Find the same optimizer's step just before this one."""
        here = (one for one in self.index.optimizer_steps if one.order < record.order)
        return stepped_before(record, [*self.stepped, *here])


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

    @property
    def precision(self) -> tuple[SystemicPrecision, ...]:
        """Return the formats that were recognised, each side and family once."""
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
        """Say what was not replayed although it would have helped, and why."""
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

    def begin_step(self, rank: int, subject: StepIndex, reference: StepIndex) -> None:
        for side, index in zip(self._sides(rank), (subject, reference), strict=True):
            side.begin_step(index)

    def could_tell(self, pair: Pair, measurements: Sequence[Measurement]) -> bool:
        """Tell whether a pair may be replayed and the replay could tell more: both sides kept a result that is not the same."""
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
        return not self.why_not

    def __call__(self, pair: Pair, foreseen: JudgedCall) -> PairReplay | None:
        """Replay both sides of a pair; return None where that cannot change the verdict, or where time is up."""
        doubted = _doubted(pair, foreseen) if self._mode == "needed" else None
        if doubted is not None and not doubted:
            return None
        if time.monotonic() > self._deadline:
            self._left_out += 1
            return None
        return self._replay(pair, self._sides(pair.record.rank), doubted)

    def _sides(self, rank: int) -> tuple[_Side, _Side]:
        return (
            self._subjects.setdefault(rank, _Side(self._runs[0])),
            self._references.setdefault(rank, _Side(self._runs[1])),
        )

    def _replay(self, pair: Pair, sides: tuple[_Side, _Side], doubted: frozenset[Slot] | None) -> PairReplay:
        self._replayed += 1
        calls = [_Call(record, side, doubted) for record, side in zip((pair.subject, pair.reference), sides, strict=True) if record]
        ours, theirs = map(self._replay_side, calls)
        self._refused.update({one.why_not for one in (ours, theirs) if one.why_not and not one.is_random})
        exchanged = self._exchanged(pair, sides, calls[0]) if ours.slots else None
        return PairReplay(subject=ours, reference=theirs, arguments=exchanged)

    def _replay_side(self, call: _Call) -> CallReplay:
        side, family = call.side, product_family(call.record)
        operands = side.operands.get(family) if family else None
        operands = operands if operands and _narrows(operands, call.record) else None
        replayed = call.replayed(operands)
        if family and family not in side.operands and _is_beyond(replayed):
            operands = side.operands[family] = self._recognise(family, side)
            replayed = call.replayed(operands) if operands and _narrows(operands, call.record) else replayed
        return self._explained(call, replayed) if _is_beyond(replayed) and replayed.has_products else replayed

    def _explained(self, call: _Call, replayed: CallReplay) -> CallReplay:
        """Replay an erring call with rounded operands, if it has products; return that replay where it explains the result.

        Machines choose kernels by size and kind, so one product may round its operands where others do not, and so may a product inside a
        call of any name. Rounded operands predict its result digit by digit. What a kernel rounds on the way is not known from outside,
        only how large such rounding is: that counts where the format was recognised before.
        """
        for operands, loosely in self._ways(call.record, call.side, replayed.operands):
            if not _narrows(operands, call.record):
                continue
            attempt = call.replayed(operands, loosely=loosely)
            if attempt.slots and not _is_beyond(attempt):
                call.side.explain(call.record, operands)
                return attempt
        return replayed

    def _ways(self, record: CallRecord, side: _Side, tried: OperandFormat | None) -> Iterator[tuple[OperandFormat, bool]]:
        """Yield formats, and whether only the size of their rounding is asked for: first those that this side was found to use before."""
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
        """Find the format that a family's operands are rounded to on one side; small gradients tell apart two of the same precision."""
        from ulpscope.replay import effective_operands

        records = side.index.all_records()
        made, passed_back = ([_Call(one, side).told() for one in _spread(records, family, phase)] for phase in ("forward", "backward"))
        forward = [one for one in made if not isinstance(one, str)]
        operands = effective_operands(forward) if forward else None
        if operands not in _ALIKE:
            return operands
        return effective_operands([*forward, *(one for one in passed_back if not isinstance(one, str))]) or operands

    def _exchanged(self, pair: Pair, sides: tuple[_Side, _Side], call: _Call) -> CallReplay | None:
        """Run the subject's tensors with the reference's arguments, and measure against the subject's own exact result.

        A number that is a limit of a dtype stays the subject's own: another dtype has another limit, and so another result for the same
        argument.
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
        return _attempt(lambda: call.exchanged(arguments, has_ties=has_ties))


def _spread(records: Sequence[CallRecord], family: str, phase: str) -> Sequence[CallRecord]:
    """Return a few calls of a family, from all over the step."""
    members = [record for record in records if record.phase == phase and product_family(record) == family]
    return members[:: max(1, len(members) // _SAMPLE)][:_SAMPLE]


def _calls(many: int) -> str:
    return f"{many} call{'' if many == 1 else 's'}"


def _forward_pair(pair: Pair, sides: tuple[_Side, _Side]) -> Pair | None:
    """Return the records that hold the arguments of a pair: itself, or the forward calls of a backward one."""
    if pair.record.phase != "backward":
        return pair
    records = [side.index.forward_of(record) for side, record in zip(sides, (pair.subject, pair.reference), strict=True) if record]
    return replace(pair, subject=records[0], reference=records[1], slots=()) if len(records) == 2 and all(records) else None


def _differ_in_arguments(pair: Pair) -> bool:
    return any(map(_is_argument, argument_differences(pair)))


def _is_argument(difference: ArgumentDifference) -> bool:
    return not difference.what.startswith(("strides of", "dtype of", "shape of", "requires_grad of", "mode "))


def _is_fraction(text: str) -> bool:
    """Tell whether an argument, as it is shown, is a number that is no integer: each side may have computed its own."""
    try:
        return isinstance(ast.literal_eval(text), float)
    except (SyntaxError, ValueError):
        return False


def _doubted(pair: Pair, foreseen: JudgedCall) -> frozenset[Slot] | None:
    """Return the results about which a replay could say something else; None for all, where the arguments differ."""
    if _differ_in_arguments(pair):
        return None
    made = (slot for slot in foreseen.slots if not pair.record.receives(slot.pair.slot))
    return frozenset(slot.pair.slot for slot in made if not is_beyond_doubt(slot))


def _family_of(record: CallRecord) -> str | None:
    return product_family(record) if record.phase in ("forward", "backward") else None


def _attempt(replay: Callable[[], CallReplay]) -> CallReplay:
    """Replay a call; an error, also in a user's operation, means that it is judged without a replay."""
    try:
        return replay()
    except Exception as error:
        return CallReplay(why_not=str(error) or type(error).__name__)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of one side, to be replayed. Only the `doubted` results of an optimizer's step are replayed; None means all."""

    record: CallRecord
    side: _Side
    doubted: frozenset[Slot] | None = None

    def replayed(self, operands: OperandFormat | None, *, loosely: bool = False) -> CallReplay:
        return _attempt(lambda: self._measured(operands, loosely))

    def _measured(self, operands: OperandFormat | None, loosely: bool) -> CallReplay:
        from ulpscope.replay import Yardstick, has_free_signs, is_random, with_signs_of

        recorded = self._results()
        slots: list[SlotReplay] = []
        has_products = False
        for program in self._programs():
            if is_random(program):
                return CallReplay(is_random=True, why_not="it draws random numbers")
            yardstick = Yardstick(program, operands=operands, loosely=loosely)
            if has_free_signs(self.record.call):
                recorded = with_signs_of(self.record.call, recorded, yardstick.exact())
            slots += yardstick.measure(recorded, enough=replay_limits)
            has_products |= yardstick.has_products
        return CallReplay(slots=tuple(slots), operands=operands, has_products=has_products)

    def exchanged(self, arguments: Arguments | None, *, has_ties: bool) -> CallReplay:
        """Compare two exact results on the same inputs: a tie falls otherwise only if an argument is a fraction that a side rounded."""
        from ulpscope.replay import Yardstick

        exchanged = {slot: value for program in self._programs(arguments) for slot, value in Yardstick(program).exact().items()}
        yardsticks = (Yardstick(program) for program in self._programs())
        slots = [one for yardstick in yardsticks for one in yardstick.measure(exchanged, enough=replay_limits, has_ties=has_ties)]
        return CallReplay(slots=tuple(slots))

    def told(self) -> tuple[Program, Mapping[Slot, torch.Tensor]] | str:
        """Return the call as a program with its recorded results, or why it cannot be one."""
        try:
            return next(self._programs()), self._results()
        except Exception as error:
            return str(error)

    def _results(self) -> Mapping[Slot, torch.Tensor]:
        from ulpscope.replay import recorded_results

        return recorded_results(self.record, self.side.reader(self.record))

    def _programs(self, arguments: Arguments | None = None) -> Iterator[Program]:
        """Yield the call itself; of an optimizer's step one program for each parameter, so that memory stays that of the largest."""
        from ulpscope.replay import (
            NotReplayable,
            backward_program,
            forward_program,
            has_free_signs,
            optimizer_program,
            stepped_parameters,
        )

        record, index, read = self.record, self.side.index, self.side.reader(self.record)
        if record.phase == "forward":
            yield forward_program(record, read, arguments=arguments)
        elif record.phase == "backward":
            forward = index.forward_of(record)
            if forward is None:
                raise NotReplayable("its forward call was not recorded")
            if has_free_signs(record.call):
                raise NotReplayable("the signs of its results are free, and so are those of its gradients")
            yield backward_program(forward, record, read, arguments=arguments, earlier=index.earlier_backward(record))
        else:
            before = self.side.stepped_before(record)
            step = record if arguments is None else replace(record, arguments=arguments)
            for name in filter(self._is_doubted, stepped_parameters(step)):
                yield optimizer_program(
                    step,
                    read,
                    parameters=index.parameters,
                    previous=before,
                    read_previous=self.side.reader(before) if before else None,
                    names=(name,),
                )

    def _is_doubted(self, name: str) -> bool:
        """Tell whether the step of this parameter has to be replayed."""
        return self.doubted is None or any(f"{slot}.".partition(".")[2].startswith(f"{name}.") for slot in self.doubted)


def _narrows(operands: OperandFormat, record: CallRecord) -> bool:
    """Tell whether the inputs of a call have digits that this format cuts off: otherwise such a machine computes as every other one."""
    known = [DTYPES[slot.dtype] for slot in record.slots if record.receives(slot.slot) and slot.dtype in DTYPES]
    floating = [one.mantissa for one in known if one.is_floating]
    return not floating or max(floating) > _FORMATS[operands].mantissa


def _is_beyond(replay: CallReplay) -> bool:
    return any(multiple_of(slot) > 1 for slot in replay.slots)
