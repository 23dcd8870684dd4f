# SPDX-License-Identifier: Apache-2.0
"""Check one recorded call: build it again, run it on the device under test, and judge it by the CPU in a higher precision.

The recorded values are used if all inputs were kept; otherwise values are made from their statistics. An error inside one call becomes the
reason why that call was skipped, and affects no other call.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ulpscope.judge.checks import check_limits, check_multiple, conclude, judge_checked, judge_overflow, with_own_leeway
from ulpscope.model import DTYPES, CallName, CallRecord, OperandFormat, Run, Slot, SlotReplay, TensorRecord
from ulpscope.model.check.checks import CheckData, CheckedCall, CheckedSlot, CheckRole, DrawnSlot
from ulpscope.model.step_index import StepIndex, stepped_before
from ulpscope.replay import (
    NotReplayable,
    Program,
    Yardstick,
    backward_program,
    forward_program,
    is_random,
    optimizer_program,
    recorded_results,
)
from ulpscope.replay.calls.arguments import bytes_of, slots_named
from ulpscope.replay.calls.devices import DeviceLost, has_own_kernel, run_on_device
from ulpscope.replay.calls.generating import Generated, Planted
from ulpscope.replay.calls.joined import joined
from ulpscope.replay.draws.chance import standard_errors
from ulpscope.replay.draws.expected import drawing_before, hangs_on_rounding, surprises, without_draws
from ulpscope.replay.program import Reader
from ulpscope.replay.yardstick.independent import second_opinions
from ulpscope.store.foreign.checker import UNRECORDED
from ulpscope.workflows.check.operand_precision import recognised_operands
from ulpscope.workflows.check.rules import RULES, CheckOptions, Judged
from ulpscope.workflows.check.standard_rules import golden_results

__all__ = ["CallChecker"]

Tensors = Mapping[Slot, torch.Tensor]
_STEPS_IN_MEMORY = 2
_MANY = 1 << 18


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A call that can be run, with its recorded results."""

    program: Program
    recorded: Tensors
    data: CheckData


class CallChecker:
    """Checks calls of one run, one after the other, in this process.

    `tell` gets the current stage: `device` while the device under test has the call, else `yardstick`. `num_threads` is the number of
    threads for large calls; small ones use one thread, since more cost them more than they give.
    """

    def __init__(self, run: Run, options: CheckOptions, tell: Callable[[str], None] | None = None, num_threads: int = 0) -> None:
        self._num_threads = num_threads
        self._run = run
        self._options = options
        self._tell = tell or (lambda stage: None)
        self._steps: dict[tuple[int, int], StepIndex] = {}
        self._planted = Planted()
        self.is_device_lost = False

    def check(self, rank: int, step: int, index: int, operands: Mapping[CheckRole, OperandFormat] | None = None) -> CheckedCall:
        """Check one call; `operands` are the formats to which its family's matrix products are known to round."""
        begun = time.perf_counter()
        record = self._record(rank, step, index)
        call = CheckedCall.of(record, self._options.device)
        if self._num_threads:
            torch.set_num_threads(self._num_threads if _num_elements(record) >= _MANY else 1)
        try:
            found = self._checked(call, record, operands or {})
        except DeviceLost as error:
            self.is_device_lost = True
            found = replace(call, status="skipped", reason=str(error))
        except NotReplayable as error:
            found = replace(call, status="skipped", reason=str(error))
        except (
            MemoryError,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            OverflowError,
            NotImplementedError,
            OSError,
        ) as error:
            text = (str(error).splitlines() or [""])[0]
            found = replace(call, status="skipped", reason=f"it cannot be replayed ({type(error).__name__}: {text[:120]})")
        return replace(found, elapsed_s=time.perf_counter() - begun)

    def recognise(self, role: CheckRole, members: Sequence[tuple[int, int, int]]) -> OperandFormat | None:
        """Find the format to which a family of products, or a part of it, rounds its operands, from some of its calls."""
        family = []
        for rank, step, index in members:
            try:
                record = self._record(rank, step, index)
                prepared = self._prepare(record, rank, step)
                made = run_on_device(prepared.program, self._options.device) if role == "device" else prepared.recorded
            except Exception:
                continue
            if made:
                family.append((record.call, prepared.program, made))
        return recognised_operands(family)

    def _step(self, rank: int, step: int) -> StepIndex:
        if (rank, step) not in self._steps:
            while len(self._steps) >= _STEPS_IN_MEMORY:
                self._steps.pop(next(iter(self._steps)))
            self._steps[rank, step] = StepIndex(self._run.records(rank, step))
        return self._steps[rank, step]

    def _record(self, rank: int, step: int, index: int) -> CallRecord:
        record = self._step(rank, step).records[index]
        assert record is not None, "a run has every record of its own"
        return record

    def _checked(self, call: CheckedCall, record: CallRecord, operands: Mapping[CheckRole, OperandFormat]) -> CheckedCall:
        options = self._options
        prepared = self._prepare(record, call.rank, call.step)
        call = replace(call, data=prepared.data)
        if not has_own_kernel(record, options.device) and not prepared.recorded:
            raise NotReplayable("its kernel is a vendor's and not here, and no result of it was kept")
        self._tell("device")
        made = run_on_device(prepared.program, options.device)
        self._tell("yardstick")
        yardstick = Yardstick(joined(prepared.program), operands=operands.get("device"))
        if options.rules == "derived":
            with suppress(Exception):  # the CPU run also shows whether the call draws; an error comes again later, where it is reported
                yardstick.exact()
        if is_random(prepared.program):
            return self._checked_drawn(call, record, prepared, made)
        if options.rules == "derived" and hangs_on_rounding(prepared.program):
            return conclude(replace(call, slots=_drawn_slots(prepared, made, options.device)))
        if options.rules != "derived":
            return self._judged_by_standard(call, record, prepared, made)
        call = self._judged(call, prepared, made, yardstick, operands)
        if options.overflow:
            call = judge_overflow(call, device_overflows=_has_nonfinite(made), is_same_device=_is_same_device(record, options.device))
        if call.status == "failed" and options.failures:
            self._keep(call, prepared, made, yardstick.exact())
        return call

    def _judged_by_standard(self, call: CheckedCall, record: CallRecord, prepared: _Prepared, made: Tensors) -> CheckedCall:
        options = self._options
        judged = Judged(record=record, program=joined(prepared.program), made=made, precision=options.precision, edition=options.edition)
        call = conclude(replace(call, slots=tuple(RULES[options.rules](judged))))
        if call.status in ("failed", "warning") and options.failures:
            self._keep(call, prepared, made, golden_results(judged))
        return call

    def _judged(
        self, call: CheckedCall, prepared: _Prepared, made: Tensors, yardstick: Yardstick, operands: Mapping[CheckRole, OperandFormat]
    ) -> CheckedCall:
        device = self._options.device
        ours = _replayed(yardstick, made, call.call)
        theirs = self._recorded(call, prepared, made, ours, yardstick, operands)
        doubts: dict[Slot, SlotReplay] = {}
        if device == "cpu" or any(check_multiple(one, call.phase) > 1 for one in ours.values()):
            doubts = second_opinions(joined(prepared.program), yardstick.exact(), made)
        slots = [
            judge_checked(_slot(slot, made[slot], ours.get(slot), theirs.get(slot), doubts.get(slot)), device, call.phase)
            for slot in made
            if slot in ours or slot in theirs
        ]
        return conclude(
            replace(call, slots=tuple(slots), device_operands=operands.get("device"), recorded_operands=operands.get("recorded"))
        )

    def _recorded(
        self,
        call: CheckedCall,
        prepared: _Prepared,
        made: Tensors,
        ours: Mapping[Slot, SlotReplay],
        yardstick: Yardstick,
        operands: Mapping[CheckRole, OperandFormat],
    ) -> dict[Slot, SlotReplay]:
        """Judge the recorded results; where the device gives the same bits, reuse its verdict."""
        same = operands.get("recorded") == operands.get("device")
        known = {slot: one for slot, one in prepared.recorded.items() if slot in made and one.shape == made[slot].shape}
        equal = {slot for slot, one in known.items() if same and slot in ours and _is_equal(one, made[slot])}
        others = {slot: one for slot, one in known.items() if slot not in equal}
        own = yardstick if same else Yardstick(joined(prepared.program), operands=operands.get("recorded"))
        return {slot: ours[slot] for slot in equal} | _replayed(own, others, call.call)

    def _prepare(self, record: CallRecord, rank: int, step: int) -> _Prepared:
        forward = self._step(rank, step).forward_of(record)
        if record.phase == "backward" and forward is None:
            raise NotReplayable("its forward call was not recorded")
        if record.phase == "backward" and forward is not None:
            record = _with_wanted_gradients(record, forward)
        previous = self._stepped_before(record, rank, step) if record.phase == "optimizer" else None
        if _has_values(record, forward):
            program = self._program(_asking(record), forward, previous, self._reader)
            return _Prepared(program, _results(record, self._reader(record)), "recorded")
        made_up = Generated(self._options.seed, self._planted)
        given = made_up.record(record, forward=None)
        before = made_up.record(forward) if forward is not None else None
        previous = made_up.record(previous) if previous is not None else None
        program = self._program(given, before, previous, lambda _: made_up.read, made_up)
        return _Prepared(program, {}, "generated")

    def _reader(self, record: CallRecord) -> Reader:
        return lambda content: self._run.tensor(record.rank, record.step, content)

    def _program(
        self,
        record: CallRecord,
        forward: CallRecord | None,
        previous: CallRecord | None,
        reader: Callable[[CallRecord], Reader],
        made_up: Generated | None = None,
    ) -> Program:
        step = self._step(record.rank, record.step)
        if record.phase == "backward":
            assert forward is not None
            return backward_program(forward, record, reader(record), earlier=step.earlier_backward(record))
        if record.phase == "optimizer":
            parameters = step.parameters if made_up is None else [made_up.record(one) for one in step.parameters]
            before = reader(previous) if previous is not None else None
            return optimizer_program(record, reader(record), parameters=parameters, previous=previous, read_previous=before)
        return forward_program(record, reader(record))

    def _stepped_before(self, record: CallRecord, rank: int, step: int) -> CallRecord | None:
        here = (one for one in self._step(rank, step).optimizer_steps if one.order < record.order)
        found = stepped_before(record, here)
        if found is None and step - 1 in self._run.steps(rank):
            found = stepped_before(record, self._step(rank, step - 1).optimizer_steps)
        return found

    def _checked_drawn(self, call: CheckedCall, record: CallRecord, prepared: _Prepared, made: Tensors) -> CheckedCall:
        """Check a call that draws random numbers.

        If it computes more than its draw, a dropout of 0 makes it a call like any other; otherwise its distribution is judged.
        """
        call = replace(call, is_random=True)
        quiet = without_draws(prepared.program)
        if quiet is None:
            return conclude(replace(call, slots=_drawn_slots(prepared, made, self._options.device)))
        spoiled = [slot for slot, value in made.items() if _has_nonfinite({slot: value})]
        self._tell("device")
        made = run_on_device(quiet, self._options.device)
        self._tell("yardstick")
        found = self._judged(call, _Prepared(quiet, {}, prepared.data), made, Yardstick(joined(quiet)), {})
        if (lost := [slot for slot in spoiled if slot in made and not _has_nonfinite({slot: made[slot]})]) and found.status != "failed":
            return replace(found, status="failed", reason=f"{lost[0]}: inf or NaN with its dropout, and finite without")
        return replace(found, reason=found.reason or _QUIET)

    def _keep(self, call: CheckedCall, prepared: _Prepared, made: Tensors, exact: Tensors) -> None:
        """Save inputs and results of a failed call for a closer look, in one file."""
        from safetensors.torch import save_file

        groups = {"": prepared.program.inputs, "device.": made, "exact.": exact, "recorded.": prepared.recorded}
        tensors = {f"{prefix}{slot}": value.detach().clone().contiguous() for prefix, one in groups.items() for slot, value in one.items()}
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", f"{call.call}.{call.phase}")[:80]
        facts = {"call": call.name, "phase": call.phase, "device": call.device, "reason": call.reason, "data": call.data}
        facts["recorded_as"] = call.recorded_as
        folder = Path(self._options.failures)
        save_file(tensors, folder / f"rank{call.rank}_step{call.step}_{call.order:06d}_{stem}.safetensors", metadata=facts)


def _replayed(yardstick: Yardstick, made: Tensors, call: CallName) -> dict[Slot, SlotReplay]:
    found = yardstick.measure(made, enough=check_limits) if made else ()
    return {one.slot: with_own_leeway(one, call) for one in found}


_QUIET = "checked with a dropout of 0, which leaves nothing to chance"


def _drawn_slots(prepared: _Prepared, made: Tensors, device: str) -> tuple[CheckedSlot, ...]:
    """Judge the device's draws and the recorded ones, each against the distribution that the call asks for."""
    found: dict[Slot, CheckedSlot] = {}
    roles: tuple[tuple[CheckRole, Tensors], ...] = (("device", made), ("recorded", prepared.recorded))
    for role, values in roles:
        known = {slot: value for slot, value in values.items() if slot in made and value.shape == made[slot].shape}
        is_recorded = role == "recorded"
        forward = None if is_recorded else _drawn_alike(prepared.program, made, device)
        told = surprises(prepared.program, known, is_recorded=is_recorded, before=forward) if known else {}
        for slot, (surprise, reason) in told.items():
            drawn = DrawnSlot(distance=standard_errors(surprise), reason=reason, role=role)
            before = found[slot].drawn if slot in found else None
            if before is None or drawn.distance > before.distance:
                found[slot] = replace(_slot(slot, known[slot], None, None, None), drawn=drawn)
    return tuple(judge_checked(slot, device) for slot in found.values())


def _drawn_alike(program: Program, made: Tensors, device: str) -> Tensors | None:
    """Run the forward call of a gradient on the same draw; None where the device does not draw the same again."""
    forward = drawing_before(program)
    if forward is None:
        return None
    before, again = run_on_device(forward, device), run_on_device(program, device)
    return before if all(slot in again and _is_equal(again[slot], value) for slot, value in made.items()) else None


def _slot(
    slot: Slot, value: torch.Tensor, device: SlotReplay | None, recorded: SlotReplay | None, second_opinion: SlotReplay | None
) -> CheckedSlot:
    return CheckedSlot(
        slot=slot,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape),
        device=device,
        recorded=recorded,
        second_opinion=second_opinion,
    )


_WANTED = "wanted"


def _with_wanted_gradients(record: CallRecord, forward: CallRecord) -> CallRecord:
    """Ask for the gradients that the call gives, by the inputs that require one: other tools record gradients inside a call.

    A call without any gradient is treated alike: its gradient is 0 then, and torch leaves it out.
    """
    own = [slot for slot in record.slots if slot.slot.role != "output" or slot.slot.path[-1:] != ("node",)]
    if len(own) == len(record.slots) and any(slot.slot.role == "output" for slot in own):
        return record
    known = {slot.slot for slot in own}
    wanted = (replace(slot, slot=Slot("output", slot.slot.path), summary=None, content=None) for slot in _differentiable(forward))
    return replace(record, slots=(*own, *(slot for slot in wanted if slot.slot not in known)))


def _differentiable(forward: CallRecord) -> list[TensorRecord]:
    """Find the inputs that require a gradient or, where the tool did not note that, those that might."""
    inputs = [slot for slot in forward.slots if slot.slot.role == "input" and slot.dtype in DTYPES]
    return [slot for slot in inputs if slot.requires_grad] or [slot for slot in inputs if DTYPES[slot.dtype].is_floating]


def _asking(record: CallRecord) -> CallRecord:
    """Ask a backward record for all of its gradients, also for those that were not kept."""
    if record.phase != "backward":
        return record
    return replace(record, slots=tuple(replace(slot, content=_WANTED) if _is_unkept(slot) else slot for slot in record.slots))


def _is_unkept(slot: TensorRecord) -> bool:
    """Tell whether a gradient lacks only its values; a note would name another reason."""
    return slot.slot.role == "output" and slot.content is None and slot.note in ("", UNRECORDED)


def _has_values(record: CallRecord, forward: CallRecord | None) -> bool:
    """Tell whether the values of all inputs were kept."""
    called = forward or record
    named = set(slots_named(called.arguments)) if called.arguments is not None else set()
    entering = [slot for slot in called.slots if slot.slot in named]
    if record.phase in ("backward", "optimizer"):
        entering += [slot for slot in record.slots if record.receives(slot.slot)]
    return all(slot.content is not None or slot.note for slot in entering)


def _results(record: CallRecord, read: Reader) -> dict[Slot, torch.Tensor]:
    try:
        return recorded_results(record, read)
    except Exception:
        return {}


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))


def _num_elements(record: CallRecord) -> int:
    return sum(math.prod(slot.shape) for slot in record.slots)


def _has_nonfinite(made: Tensors) -> bool:
    return any(not bool(torch.isfinite(one).all()) for one in made.values() if one.is_floating_point() or one.is_complex())


def _is_same_device(record: CallRecord, device: str) -> bool:
    kinds = {slot.device.partition(":")[0] for slot in record.slots if slot.device}
    return not kinds or device.partition(":")[0] in kinds
