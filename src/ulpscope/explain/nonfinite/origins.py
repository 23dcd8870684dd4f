# SPDX-License-Identifier: Apache-2.0
"""Where inf and NaN began in one step of one rank, followed through its records in execution order.

Tensors are recognised by their fingerprints. Where a run has none, a call that receives something non-finite is taken to have it from what
began earlier in the step. Whether a beginning is a fault depends on what it reached: the loss, a gradient, a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ulpscope.model import CallRecord, Phase, TensorRecord
from ulpscope.model.step_index import ForwardCalls
from ulpscope.numerics.nonfinite_rule import CLEAN, MASK_NOTE, Kinds, Origin, Passage, asks_for, kinds_of, pass_through
from ulpscope.numerics.nonfinite_steps import BegunKind, BegunStep, given_at_the_end, origin_after, reached_by

__all__ = ["Beginning", "StepTrace", "trace_step"]


@dataclass(slots=True)
class Beginning:
    """One call where non-finite values began: its record, the slots they are in, and what became of them.

    `before` is the last record with finite results before it; `forward` the forward side of a call that began them in backward.
    """

    kind: BegunKind
    record: CallRecord
    slots: tuple[TensorRecord, ...]
    kinds: Kinds
    forward: CallRecord | None = None
    before: CallRecord | None = None
    num_passed: int = 0
    swallowed_by: CallRecord | None = None
    last_touch: Passage = "passed"

    @property
    def phase(self) -> Phase:
        return self.record.phase

    @property
    def is_half(self) -> bool:
        return any(slot.dtype == "float16" for slot in self.slots)


@dataclass(slots=True)
class StepTrace(BegunStep[Beginning]):
    """What one step of one rank tells: beginnings in order of time, and what they reached."""

    rank: int
    step: int
    num_calls: int = 0
    num_unknown: int = 0


def trace_step(
    records: Iterable[CallRecord],
    *,
    rank: int,
    step: int,
    world_size: int = 1,
    may_be_skipped: bool = False,
    saturates: bool = False,
    is_watched: bool = False,
) -> StepTrace:
    """Follow non-finite values through the records of one step. In a run whose scaler skipped steps, one without an update is one of these.
    Of a watched run only part is recorded: what nobody is seen to have made is laid at the door of what began before.
    """
    tracer = _Tracer(StepTrace(rank, step, is_skipped=may_be_skipped), world_size, saturates, is_watched)
    for record in records:
        tracer.take(record)
    tracer.finish()
    return tracer.trace


class _Tracer:
    def __init__(self, trace: StepTrace, world_size: int, saturates: bool, is_watched: bool) -> None:
        self.trace = trace
        self._is_watched = is_watched
        self._world_size = world_size
        self._saturates = saturates
        self._origins: dict[str, tuple[Origin, Beginning | None]] = {}
        self._forward = ForwardCalls[CallRecord]()
        self._last_clean: CallRecord | None = None
        self._last_forward: tuple[CallRecord, Kinds] | None = None
        self._told: dict[str, object] | None = None

    def take(self, record: CallRecord) -> None:
        if record.recompute:
            return
        if record.call.op == "state.watch" and record.arguments is not None:
            self._told = record.arguments.kwargs
        elif record.level == "state":
            self._take_state(record)
        else:
            self._take_call(record)

    def finish(self) -> None:
        """What the watch itself wrote down about the step counts; without it the records tell."""
        trace, told = self.trace, self._told
        if told is None:
            if trace.has_backward and self._last_forward is not None and self._last_forward[1]:
                trace.reach("loss")
            return
        reached = told.get("reached")
        trace.reached = [str(what) for what in reached] if isinstance(reached, list) else trace.reached
        trace.has_backward = bool(told.get("has_backward", trace.has_backward))
        trace.has_update = bool(told.get("has_update", trace.has_update))
        trace.is_skipped = bool(told.get("is_skipped"))
        scale = told.get("scale")
        trace.scale = float(scale) if isinstance(scale, (int, float)) else None

    # ---- calls

    def _take_call(self, record: CallRecord) -> None:
        trace = self.trace
        trace.num_calls += 1
        if record.phase == "backward":
            trace.has_backward = True
        received = [slot for slot in record.slots if record.receives(slot.slot)]
        made = [slot for slot in record.slots if not record.receives(slot.slot)]
        if record.phase == "backward" and not made:  # the gradient at a module's output, as the watch takes it on an accelerator
            received, made = [], received
        if any(slot.summary is None and not slot.note for slot in made):
            trace.num_unknown += 1
        leaving = self._kinds_of(made)
        entering, behind = self._entering(record, received)
        if leaving or entering:
            self._follow(record, entering, leaving, made, behind)
        if not leaving:
            self._last_clean = record
        if record.phase == "forward":
            self._forward.add(record, record)
            if not trace.has_backward:
                self._last_forward = (record, leaving)

    def _follow(
        self, record: CallRecord, entering: dict[Origin | None, Kinds], leaving: Kinds, made: list[TensorRecord], behind: list[Beginning]
    ) -> None:
        trace = self.trace
        arguments = record.arguments
        values = (*arguments.args, *(arguments.kwargs or {}).values()) if arguments is not None else ()
        is_mask = any(slot.note == MASK_NOTE for slot in made)
        passage = pass_through(record.call.op, entering, leaving, asked=is_mask or asks_for(values, leaving))
        if passage == "made" and self._is_told_already(record, made):
            return
        if record.phase == "backward":
            is_gradient_alone = not any(record.receives(slot.slot) and slot not in made for slot in record.slots)
            passage, behind = trace.in_backward(passage, bool(entering) or is_gradient_alone, behind)
        if passage == "made" and record.call.op.startswith("distributed."):
            behind = [self._begin("received", record, made)]
            passage = "passed"
        elif passage in ("made", "given", "soft"):
            behind = [self._begin(passage, record, made)]
        elif passage in ("passed", "swallowed"):
            for beginning in behind:
                self._touch(beginning, passage, record)
        if passage not in ("clean", "swallowed"):
            self._remember(made, origin_after(passage, entering), behind)
        if any(slot.slot.role == "gradient" and self._kinds_of([slot]) for slot in made):
            trace.reach("gradients")

    def _is_told_already(self, record: CallRecord, made: Sequence[TensorRecord]) -> bool:
        """Whether a module's result is that of a call inside it, which stands before it."""
        if record.level != "module":
            return False
        if any(slot.fingerprint in self._origins for slot in made if slot.fingerprint is not None):
            return True
        inside = f"{record.module}." if record.module else ""
        return any(
            begun.record.phase == record.phase and (begun.record.module == record.module or begun.record.module.startswith(inside))
            for begun in self.trace.beginnings
        )

    def _entering(self, record: CallRecord, received: list[TensorRecord]) -> tuple[dict[Origin | None, Kinds], list[Beginning]]:
        entering: dict[Origin | None, Kinds] = {}
        behind: list[Beginning] = []
        for slot in received:
            kinds = kinds_of(slot.summary, slot.dtype, saturates=self._saturates)
            if kinds:
                origin, beginning = self._origin_of(slot, kinds)
                entering[origin] = entering.get(origin, CLEAN) | kinds
                if beginning is not None and beginning not in behind:
                    behind.append(beginning)
        if record.phase == "backward":
            self._add_forward(record, entering, behind)
        return entering, behind

    def _add_forward(self, record: CallRecord, entering: dict[Origin | None, Kinds], behind: list[Beginning]) -> None:
        """A backward call also works with what its forward call had."""
        forward = self._forward.of(record)
        for slot in forward.slots if forward is not None else ():
            known = self._origins.get(slot.fingerprint) if slot.fingerprint is not None else None
            if known is not None and known[0] != "masked" and known[1] is not None:
                entering[known[0]] = entering.get(known[0], CLEAN) | kinds_of(slot.summary, slot.dtype)
                if known[1] not in behind:
                    behind.append(known[1])

    def _origin_of(self, slot: TensorRecord, kinds: Kinds) -> tuple[Origin | None, Beginning | None]:
        known = self._origins.get(slot.fingerprint) if slot.fingerprint is not None else None
        if known is not None or (slot.fingerprint is not None and not self._is_watched):
            return known or (None, None)
        return self.trace.unseen_origin(kinds)

    def _remember(self, made: Iterable[TensorRecord], origin: Origin, behind: list[Beginning]) -> None:
        for slot in made:
            if slot.fingerprint is not None and kinds_of(slot.summary, slot.dtype, saturates=self._saturates):
                self._origins[slot.fingerprint] = (origin, behind[0] if behind else None)

    def _begin(self, kind: BegunKind, record: CallRecord, made: Iterable[TensorRecord]) -> Beginning:
        slots = [slot for slot in made if kinds_of(slot.summary, slot.dtype, saturates=self._saturates)]
        beginning = Beginning(kind, record, tuple(slots), self._kinds_of(slots), self._forward.of(record), self._last_clean)
        self.trace.beginnings.append(beginning)
        return beginning

    def _kinds_of(self, slots: Iterable[TensorRecord]) -> Kinds:
        found = CLEAN
        for slot in slots:
            found |= kinds_of(slot.summary, slot.dtype, saturates=self._saturates)
        return found

    # ---- what is not a call

    def _take_state(self, record: CallRecord) -> None:
        bad = [slot for slot in record.slots if kinds_of(slot.summary, slot.dtype, saturates=self._saturates)]
        if record.call.op.startswith("optimizer."):
            self.trace.is_skipped, self.trace.has_update = False, True
        if record.call.op == "state.range" or not bad:
            return
        if record.phase == "start":
            self._take_start(record, bad)
            return
        for slot in bad:
            self.trace.reach(reached_by(slot.slot.role))
        if self.trace.beginnings:
            for beginning in self.trace.at_large:
                self._touch(beginning, "passed", record)
        else:
            self._begin(given_at_the_end({slot.slot.role for slot in bad}, world_size=self._world_size), record, bad)

    def _take_start(self, record: CallRecord, bad: list[TensorRecord]) -> None:
        """Parameters and batches that were not finite to begin with; a mask among them is none of our business."""
        suspects = [slot for slot in bad if not self._kinds_of([slot]).is_mask]
        if suspects:
            beginning = self._begin("given", record, suspects)
            self._remember(suspects, "given", [beginning])

    def _touch(self, beginning: Beginning, passage: Passage, record: CallRecord) -> None:
        self.trace.touch(beginning, passage)
        if passage == "swallowed":
            beginning.swallowed_by = record
