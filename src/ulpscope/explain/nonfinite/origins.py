# SPDX-License-Identifier: Apache-2.0
"""Where inf and NaN began in one step of one rank, followed through its records in execution order.

Tensors are recognised by their fingerprints. Where a run has none, a call that receives something non-finite is taken to have it from what
began earlier in the step. Whether a beginning is a fault depends on what it reached: the loss, a gradient, a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ulpscope.model import CallRecord, TensorRecord
from ulpscope.numerics.nonfinite_rule import CLEAN, MASK_NOTE, Kinds, Origin, Passage, asks_for, kinds_of, pass_through

__all__ = ["Beginning", "StepTrace", "trace_step"]

_BeginningKind: TypeAlias = Literal["made", "given", "received", "soft"]


@dataclass(slots=True)
class Beginning:
    """One call where non-finite values began: its record, the slots they are in, and what became of them.

    `before` is the last record with finite results before it; `forward` the forward side of a call that began them in backward.
    """

    kind: _BeginningKind
    record: CallRecord
    slots: tuple[TensorRecord, ...]
    kinds: Kinds
    forward: CallRecord | None = None
    before: CallRecord | None = None
    num_passed: int = 0
    swallowed_by: CallRecord | None = None
    last_touch: Passage = "passed"


@dataclass(slots=True)
class StepTrace:
    """What one step of one rank tells: beginnings in order of time, and what they reached."""

    rank: int
    step: int
    beginnings: list[Beginning] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    has_backward: bool = False
    has_update: bool = False
    is_skipped: bool = False
    scale: float | None = None
    num_calls: int = 0
    num_unknown: int = 0

    def reach(self, what: str) -> None:
        if what not in self.reached:
            self.reached.append(what)

    def is_fault(self, beginning: Beginning) -> bool:
        """Whether it did harm; what vanished before the loss, or was a mask, did none."""
        if self.is_expected(beginning):
            return False
        if self.reached:
            return beginning in self.at_large
        if self.has_backward and beginning.record.phase == "forward":
            return False
        if self.has_update and beginning.record.phase == "backward":
            return False
        return beginning.kind != "soft" and beginning.last_touch != "swallowed"

    @property
    def at_large(self) -> list[Beginning]:
        """What may be behind something bad later in the step: not what was swallowed, if there is anything else."""
        return [beginning for beginning in self.beginnings if beginning.last_touch != "swallowed"] or self.beginnings

    def is_expected(self, beginning: Beginning) -> bool:
        """Whether loss scaling explains it: a float16 gradient overflowed and the scaler left the weights alone."""
        is_half = any(slot.dtype == "float16" for slot in beginning.slots)
        return self.is_skipped and beginning.record.phase in ("backward", "optimizer") and is_half and beginning.kinds is not Kinds.NAN


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
        self._forward: dict[str, CallRecord] = {}
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
            self._forward.setdefault(str(record.call), record)
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
            passage, behind = self._in_backward(passage, bool(entering) or is_gradient_alone, behind)
        if passage == "made" and record.call.op.startswith("distributed."):
            behind = [self._begin("received", record, made)]
            passage = "passed"
        elif passage in ("made", "given", "soft"):
            behind = [self._begin(passage, record, made)]
        elif passage in ("passed", "swallowed"):
            for beginning in behind:
                _touch(beginning, passage, record)
        if passage not in ("clean", "swallowed"):
            self._remember(made, _origin(passage, entering), behind)
        if any(slot.slot.role == "gradient" and self._kinds_of([slot]) for slot in made):
            trace.reach("gradients")

    def _in_backward(self, passage: Passage, is_given: bool, behind: list[Beginning]) -> tuple[Passage, list[Beginning]]:
        """A gradient is never a mask, and one that was not finite before is explained by what began earlier in the step."""
        if passage in ("masked", "soft", "given", "made") and is_given and self.trace.beginnings:
            return "passed", behind or self.trace.at_large
        return ("made" if passage in ("masked", "soft") else passage), behind

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
        forward = self._forward.get(str(record.call))
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
        if self.trace.beginnings and not kinds.is_mask:
            return "made", self.trace.at_large[-1]
        return None, None

    def _remember(self, made: Iterable[TensorRecord], origin: Origin, behind: list[Beginning]) -> None:
        for slot in made:
            if slot.fingerprint is not None and kinds_of(slot.summary, slot.dtype, saturates=self._saturates):
                self._origins[slot.fingerprint] = (origin, behind[0] if behind else None)

    def _begin(self, kind: _BeginningKind, record: CallRecord, made: Iterable[TensorRecord]) -> Beginning:
        slots = [slot for slot in made if kinds_of(slot.summary, slot.dtype, saturates=self._saturates)]
        forward = self._forward.get(str(record.call)) if record.phase == "backward" else None
        beginning = Beginning(kind, record, tuple(slots), self._kinds_of(slots), forward, self._last_clean)
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
            self.trace.reach({"output": "loss", "gradient": "gradients"}.get(slot.slot.role, "parameters"))
        made = [slot for slot in bad if slot.slot.role != "gradient"]
        if self.trace.beginnings:
            for beginning in self.trace.at_large:
                _touch(beginning, "passed", record)
        elif len(made) == len(bad):
            self._begin("made", record, made)
        else:
            self._begin("received" if self._world_size > 1 else "made", record, bad)

    def _take_start(self, record: CallRecord, bad: list[TensorRecord]) -> None:
        """Parameters and batches that were not finite to begin with; a mask among them is none of our business."""
        suspects = [slot for slot in bad if not self._kinds_of([slot]).is_mask]
        if suspects:
            beginning = self._begin("given", record, suspects)
            self._remember(suspects, "given", [beginning])


def _origin(passage: Passage, entering: dict[Origin | None, Kinds]) -> Origin:
    if passage == "soft" or passage == "masked" or passage == "given":
        return passage
    return "given" if passage == "passed" and "made" not in entering and "given" in entering else "made"


def _touch(beginning: Beginning, passage: Passage, record: CallRecord) -> None:
    beginning.last_touch = passage
    if passage == "swallowed":
        beginning.swallowed_by = record
        return
    beginning.num_passed += 1
    if beginning.kind == "soft":
        beginning.kind = "made"
