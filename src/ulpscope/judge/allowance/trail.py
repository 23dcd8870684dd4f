# SPDX-License-Identifier: Apache-2.0
"""What was found honest so far in one rank's run: how a value that comes back as an input is recognised."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import field, replace

from ulpscope.judge.allowance.sizes import absolute_error, distance, size_of
from ulpscope.judge.thresholds import threshold
from ulpscope.model import Bands, Behind, CallRecord, DType, JudgedCall, JudgedSlot, Pair, Slot, SlotPair, TensorRecord
from ulpscope.model.nouns import dataclass
from ulpscope.model.operations.unwritten import NEVER_WRITTEN, is_overwritten, is_unfollowed, may_carry, writes_in_place
from ulpscope.model.step_index import ForwardCalls

__all__ = ["Parts", "Trail", "values_key"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the honest contributions to one gradient say of their sum: `apart` is the largest distance among them, `error` what they are
    apart in all, `terms` how large they are in all. A sum whose terms cancel has no size of its own to be judged by.
    """

    apart: float = 0.0
    error: float = 0.0
    terms: float = 0.0


_SOURCES: dict[str, Behind] = {"fork": "fork", "choice": "choice", "random": "random", "unwritten": "unwritten"}
"""Rules by which a result may differ honestly, and why what is made of it need not agree."""


@dataclass(slots=True)
class Trail:
    """Grows with every judged call of a rank, in execution order; `begin_step` drops what later steps cannot meet again.

    `operands` is the format that a side's matrix products round to, where one was recognised, `bands` how far the reference is from a
    repeat of itself. `drift` is the largest distance that calls within their allowance reached. `honest` holds the values made by such
    calls, known by the fingerprints of both sides; `gradients` what the honest contributions to the gradient of a value say of their sum;
    `apart` how far honest values are apart, by the fingerprint of one side; `lone_terms` how large the gradients are that entered
    backward calls of one side only, by what was made of them; `carried` the values that carry memory that nobody wrote to, or a choice
    that nothing determines, by that rule. `behind` holds the values that need not agree, and why; `behind_anything` says so of every
    value, where one of them cannot be known again. `clean_drift` is `drift` of the calls that no such value entered. `behind_memory` says
    so of memory that was written to in place, and `made` holds what calls made and is not the same. `left` is what
    stands in the records of a step's end.
    """

    operands: DType | None = None
    bands: Bands | None = None
    drift: float = 0.0
    honest: set[Hashable] = field(default_factory=set)
    gradients: dict[Hashable, Parts] = field(default_factory=dict)
    parameters: dict[tuple[int | str, ...], JudgedSlot] = field(default_factory=dict)
    forward: ForwardCalls[JudgedCall] = field(default_factory=ForwardCalls)
    optimized: dict[Slot, JudgedSlot] = field(default_factory=dict)
    left: list[JudgedSlot] = field(default_factory=list)
    apart: dict[Hashable, float] = field(default_factory=dict)
    lone_terms: dict[Hashable, tuple[float, float]] = field(default_factory=dict)
    lone_values: dict[Hashable, float] = field(default_factory=dict)
    modules: dict[str, tuple[float, bool]] = field(default_factory=dict)
    carried: set[Hashable] = field(default_factory=set)
    behind: dict[Hashable, Behind] = field(default_factory=dict)
    behind_anything: Behind | None = None
    behind_memory: Behind | None = None
    made: set[Hashable] = field(default_factory=set)
    clean_drift: float = 0.0
    step: int | None = None
    is_continued: bool = False

    def begin_step(self, step: int) -> None:
        """`is_continued` says afterwards whether the optimizer's results of the step before are known."""
        self.is_continued = bool(self.optimized) and self.step == step - 1
        self.step = step
        stepped = [slot for slot in self.optimized.values() if slot.behind]
        self.behind = {key: slot.behind for slot in stepped if slot.behind and (key := values_key(slot.pair)) is not None}
        self.behind_anything = next((slot.behind for slot in stepped if values_key(slot.pair) is None), None)
        before = [*self.optimized.values(), *self.left]
        self.honest = {key for slot in before if (key := values_key(slot.pair)) and slot.verdict.level == "rounding"}
        self.optimized = self.optimized if self.is_continued else {}
        self.left.clear()
        self.behind_memory = None
        self.made.clear()
        self.apart.clear()
        self.lone_terms.clear()
        self.lone_values.clear()
        self.carried.clear()
        self.modules.clear()
        self.gradients.clear()
        self.parameters.clear()
        self.forward.clear()

    def forward_of(self, record: CallRecord) -> JudgedCall | None:
        return self.forward.of(record)

    def parts_of(self, record: CallRecord, slot: Slot) -> Parts:
        """What the gradient of a value was summed from, as far as that was found honest."""
        value = self.parameters.get(slot.path) if slot.role == "gradient" else self._made_forward(record, slot)
        key = values_key(value.pair) if value else None
        return self.gradients.get(key, _NO_PARTS) if key else _NO_PARTS

    def _made_forward(self, record: CallRecord, slot: Slot) -> JudgedSlot | None:
        """The result of the forward call whose gradient enters its backward record."""
        forward = self.forward_of(record)
        results = forward.slots if forward else ()
        return next((one for one in results if one.pair.slot.path == slot.path and one.pair.slot.role == "output"), None)

    def parameters_apart(self, slot: Slot) -> float:
        """How far parameters may have drifted apart over steps that were not recorded."""
        is_unseen = self.step is not None and self.step > 0 and not self.is_continued
        return threshold("late_parameters") / threshold("amplification") if is_unseen and slot.role in ("parameter", "buffer") else 0.0

    def entering_optimizer(self, slot: Slot, gradients: dict[tuple[int | str, ...], JudgedSlot]) -> tuple[JudgedSlot, ...]:
        """What one result of an optimizer is made from: the gradient, the parameter before and the state before, by name."""
        name = slot.path[:-1] if slot.role == "state" else slot.path
        own = (gradients[name],) if name in gradients else tuple(gradients.values())
        before = (self.parameters.get(name), self.optimized.get(slot))
        return (*own, *(one for one in before if one is not None))

    def block_apart(self, slot: SlotPair) -> float:
        """How far apart what entered the calls was that only one side has and that made this value; 0 where no such call did."""
        found = [self.apart.get(("lone", side, one.fingerprint)) for side, one in _sides(slot) if one.fingerprint]
        return min((apart for apart in found if apart is not None), default=0.0)

    def carries_unwritten(self, pair: Pair, made: SlotPair) -> bool:
        """Whether a result may hang on memory that nobody wrote to: as capture says of it, or as something does that enters the call.

        Of a gradient it may also enter through the forward call.
        """
        if may_carry(made.subject) and may_carry(made.reference):
            return True
        forward = self.forward_of(pair.record)
        values = [*_given(pair), *(slot.pair for slot in (forward.slots if forward else ()))]
        if self.carried and any(("unwritten", values_key(slot)) in self.carried for slot in values):
            return True
        asked = forward.pair if forward else pair
        entered = (slot for slot in _given(asked) if forward or (is_unfollowed(slot.subject) and is_unfollowed(slot.reference)))
        return any(all(_reads_unwritten(asked.record, side) for _, side in _sides(slot)) for slot in entered)

    def carries_choice(self, pair: Pair) -> bool:
        """Whether a free choice enters a call: in a value of its own or of its forward call, or in a part of a gradient."""
        if not self.carried:
            return False
        forward, given = self.forward_of(pair.record), _given(pair)
        values = [*given, *(slot.pair for slot in (forward.slots if forward else ()))]
        results = (self._made_forward(pair.record, slot.slot) for slot in given)
        keys = [*map(values_key, values), *(("gradient", values_key(one.pair)) for one in results if one is not None)]
        return any(("choice", key) in self.carried for key in keys if key is not None)

    def behind_given(self, record: CallRecord, slot: SlotPair) -> Behind | None:
        """Why a value that enters a call, or that a call makes, need not agree: it is one that was seen, or the gradient of one."""
        if not self.behind:
            return self.behind_anything
        own = values_key(slot)
        value = self.parameters.get(slot.slot.path) if slot.slot.role == "gradient" else self._made_forward(record, slot.slot)
        of_value = values_key(value.pair) if value is not None else None
        found = self.behind.get(own) if own is not None else None
        return found or (self.behind.get(("gradient", of_value)) if of_value is not None else None) or self.behind_anything

    def behind_write(self, record: CallRecord, slot: SlotPair) -> Behind | None:
        """Why a value that no recorded call made, or its gradient, need not agree: what need not was written to a view of some memory.

        Records do not tell whose memory a view looks at.
        """
        is_asked = self.behind_memory is not None and record.phase in ("forward", "backward") and values_key(slot) is not None
        return self.behind_memory if is_asked and values_key(slot) not in self.made else None

    def behind_call(self, record: CallRecord, given: Iterable[JudgedSlot]) -> Behind | None:
        """Why the results of a call need not agree: for what enters it, and for a backward record what its forward call had."""
        forward = self.forward_of(record)
        return next((slot.behind for slot in (*given, *(forward.slots if forward else ())) if slot.behind), None)

    def add_lone(self, record: CallRecord, side: str) -> None:
        """Remember a call that only one side has: what it made is as far apart as the worst of what entered it."""
        entered = [one for one in record.slots if record.receives(one.slot) and one.fingerprint]
        worst = max((self._apart_on(side, one.fingerprint) for one in entered), default=0.0)
        made = [one.fingerprint for one in record.slots if not record.receives(one.slot) and one.fingerprint]
        self.apart |= {("lone", side, fingerprint): worst for fingerprint in made}
        largest, call = max((one.summary.rms or 0.0 for one in entered if one.summary), default=0.0), (side, record.level, record.call)
        if record.phase == "forward":
            self.lone_values[call] = largest
        elif record.phase == "backward":
            before = [self.lone_terms[key] for one in entered if (key := (side, one.fingerprint)) in self.lone_terms]
            gradient = max((largest, *(size for size, _ in before)))
            factor = max((1.0, self.lone_values.get(call, 1.0), *(values for _, values in before)))
            self.lone_terms |= {(side, fingerprint): (gradient, factor) for fingerprint in made}

    def terms_of_lone(self, slot: SlotPair) -> float:
        """Give the size of the terms that backward calls of one side only made a value of; 0 where none made it.

        Those are gradients, times the values of the forward calls where they are larger than 1. Two formulas of one gradient round what
        cancels otherwise: that of a softmax that picks one element for certain is 0 in one, and the rounding of its terms in the other.
        """
        found = (self.lone_terms.get((side, one.fingerprint), (0.0, 0.0)) for side, one in _sides(slot))
        return max((gradient * factor for gradient, factor in found), default=0.0)

    def _apart_on(self, side: str, fingerprint: str | None) -> float:
        return max(self.apart.get((side, fingerprint), 0.0), self.apart.get(("lone", side, fingerprint), 0.0))

    def add(self, judged: JudgedCall) -> None:
        """Remember a judged call."""
        self.drift = max(self.drift, judged.drift)
        record = judged.pair.record
        made = [slot for slot in judged.slots if not record.receives(slot.pair.slot)]
        excused = [slot for slot in made if slot.verdict.rule in ("unwritten", "choice")]
        self.carried |= {(slot.verdict.rule, key) for slot in excused if (key := values_key(slot.pair)) is not None}
        if self.carried:
            hanging = [slot for slot in made if slot.verdict.level == "rounding" and self.carries_unwritten(judged.pair, slot.pair)]
            self.carried |= {("unwritten", key) for slot in hanging if (key := values_key(slot.pair)) is not None}
        if not self._add_behind(made):
            self.clean_drift = max(self.clean_drift, judged.drift)
        elif record.phase == "forward" and writes_in_place(record.call.op, record.arguments):
            self.behind_memory = next((slot.behind for slot in made if slot.behind), self.behind_memory)
        self.made |= {key for slot in made if slot.verdict.level != "same" and (key := values_key(slot.pair)) is not None}
        self.honest |= {key for slot in made if slot.verdict.level == "rounding" and (key := values_key(slot.pair)) is not None}
        for slot in judged.slots:
            found = distance(slot.measurement) if slot.verdict.level == "rounding" else None
            if found:
                self.apart.update(((side, one.fingerprint), min(found, 1.0)) for side, one in _sides(slot.pair))
        if record.phase == "start":
            self._add_state(slot for slot in made if slot.pair.slot.role in ("parameter", "buffer"))
        elif record.phase == "forward":
            self.forward.add(record, judged)
        elif record.phase == "backward":
            self._add_gradients(made, self.forward_of(record))
        elif record.phase == "end":
            self.left += made
        elif record.phase == "optimizer":
            self.optimized |= {slot.pair.slot: slot for slot in made}

    def _add_behind(self, made: Iterable[JudgedSlot]) -> bool:
        """Remember results that need not agree, and say whether there are any."""
        found = [(slot, kind) for slot in made if (kind := slot.behind or _source(slot)) is not None]
        for slot, kind in found:
            key = values_key(slot.pair)
            if key is None:
                self.behind_anything = kind
            else:
                self.behind[key] = kind
        return bool(found)

    def _add_state(self, slots: Iterable[JudgedSlot]) -> None:
        for slot in slots:
            path, apart = slot.pair.slot.path, distance(slot.measurement) or 0.0
            self.parameters[path] = slot
            for end in range(len(path)) if apart else ():
                module = ".".join(map(str, path[:end]))
                worst, agrees = self.modules.get(module, (0.0, True))
                self.modules[module] = max(worst, apart), agrees and slot.verdict.level != "differs"

    def behind_module(self, record: CallRecord) -> tuple[float, bool]:
        """How far apart is what enters a module without being handed over: its parameters, and what its own calls drifted.

        Also whether its parameters agree within rounding.
        """
        if record.level != "module":
            return 0.0, True
        apart, agrees = self.modules.get(record.module, (0.0, True))
        return max(apart, self.drift), agrees

    def _add_gradients(self, made: Iterable[JudgedSlot], forward: JudgedCall | None) -> None:
        entered = (
            {slot.pair.slot.path: slot.pair for slot in forward.slots if slot.pair.slot.role in ("input", "parameter")} if forward else {}
        )
        for slot in made:
            source = entered.get(slot.pair.slot.path)
            key = values_key(source) if source else None
            if key is not None and slot.verdict.level in ("same", "rounding"):
                is_choice = slot.verdict.rule == "choice"
                self.gradients[key] = self._with_part(self.gradients.get(key, _NO_PARTS), slot, is_choice=is_choice)
                self.carried |= {("choice", ("gradient", key))} if is_choice else set()
            if key is not None and (kind := slot.behind or _source(slot)) is not None:
                self.behind["gradient", key] = kind

    def _with_part(self, parts: Parts, slot: JudgedSlot, *, is_choice: bool) -> Parts:
        """The parts with one more, which was found honest."""
        size = size_of(slot.pair, slot.measurement, slot.verdict.level, self.drift)
        apart = 1.0 if is_choice else distance(slot.measurement) or 0.0
        if size is None:
            return replace(parts, apart=max(parts.apart, apart))
        error = max(size.error, absolute_error(slot.measurement)) if apart else 0.0
        return Parts(max(parts.apart, apart), parts.error + error, parts.terms + size.rms)


def _reads_unwritten(record: CallRecord, given: TensorRecord) -> bool:
    return given.note.startswith(NEVER_WRITTEN) and not is_overwritten(record.call.op, given.slot.path, record.arguments)


def _source(slot: JudgedSlot) -> Behind | None:
    return _SOURCES.get(slot.verdict.rule) if slot.verdict.level == "rounding" else None


def _given(pair: Pair) -> list[SlotPair]:
    return [slot for slot in pair.slots if pair.record.receives(slot.slot)]


_NO_PARTS = Parts()


def _sides(pair: SlotPair) -> list[tuple[str, TensorRecord]]:
    return [(side, one) for side, one in (("subject", pair.subject), ("reference", pair.reference)) if one is not None]


def values_key(pair: SlotPair) -> Hashable | None:
    """Both sides' values, as far as fingerprints or contents tell."""
    if pair.subject is None or pair.reference is None:
        return None
    ours = pair.subject.fingerprint or pair.subject.content
    theirs = pair.reference.fingerprint or pair.reference.content
    return (ours, theirs) if ours and theirs else None
