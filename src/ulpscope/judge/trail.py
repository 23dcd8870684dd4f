# SPDX-License-Identifier: Apache-2.0
"""What was found honest so far in one rank's run: how a value that comes back as an input is recognised."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import field

from ulpscope.judge.sizes import NEVER_WRITTEN, distance
from ulpscope.judge.thresholds import threshold
from ulpscope.model import Bands, CallRecord, DType, JudgedCall, JudgedSlot, Pair, Slot, SlotPair, TensorRecord
from ulpscope.model.nouns import dataclass

__all__ = ["Trail", "values_key"]


@dataclass(slots=True)
class Trail:
    """Grows with every judged call of a rank, in execution order; `begin_step` drops what later steps cannot meet again.

    `operands` is the format that a side's matrix products round to, where one was recognised, `bands` how far the reference is from a
    repeat of itself. `drift` is the largest distance that calls
    within their allowance reached. `honest` holds the values made by such calls, known by the fingerprints of both sides; `gradients`
    how far the gradients of a value are apart where each contribution was honest; `apart` how far honest values are apart, by the
    fingerprint of one side; `carried` the values that carry memory that nobody wrote to, or a choice that nothing determines, by that rule.
    """

    operands: DType | None = None
    bands: Bands | None = None
    drift: float = 0.0
    honest: set[Hashable] = field(default_factory=set)
    gradients: dict[Hashable, float] = field(default_factory=dict)
    parameters: dict[tuple[int | str, ...], JudgedSlot] = field(default_factory=dict)
    forward: dict[Hashable, JudgedCall] = field(default_factory=dict)
    optimized: dict[Slot, JudgedSlot] = field(default_factory=dict)
    apart: dict[Hashable, float] = field(default_factory=dict)
    modules: dict[str, tuple[float, bool]] = field(default_factory=dict)
    carried: set[Hashable] = field(default_factory=set)
    step: int | None = None
    is_continued: bool = False

    def begin_step(self, step: int) -> None:
        """`is_continued` says afterwards whether the optimizer's results of the step before are known."""
        self.is_continued = bool(self.optimized) and self.step == step - 1
        self.step = step
        self.honest = {key for slot in self.optimized.values() if (key := values_key(slot.pair)) and slot.verdict.level == "rounding"}
        self.optimized = self.optimized if self.is_continued else {}
        self.apart.clear()
        self.carried.clear()
        self.modules.clear()
        self.gradients.clear()
        self.parameters.clear()
        self.forward.clear()

    def forward_of(self, record: CallRecord) -> JudgedCall | None:
        return self.forward.get((record.level, record.call, record.module)) if record.phase == "backward" else None

    def gradient_apart(self, record: CallRecord, slot: Slot) -> float:
        """How far the gradient of a value may be apart: as far as the contributions to it are."""
        value = self.parameters.get(slot.path) if slot.role == "gradient" else self._made_forward(record, slot)
        key = values_key(value.pair) if value else None
        return self.gradients.get(key, 0.0) if key else 0.0

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

    def carries_unwritten(self, pair: Pair) -> bool:
        """Whether memory that nobody wrote to enters a call, by itself or inside of what an earlier call made of it."""
        given = _given(pair)
        sides = (one for slot in given for one in (slot.subject, slot.reference) if one is not None)
        return any(one.note.startswith(NEVER_WRITTEN) for one in sides) or any(
            ("unwritten", values_key(slot)) in self.carried for slot in given
        )

    def carries_choice(self, pair: Pair) -> bool:
        """Whether a free choice enters a call: in a value of its own or of its forward call, or in a part of a gradient."""
        if not self.carried:
            return False
        forward, given = self.forward_of(pair.record), _given(pair)
        values = [*given, *(slot.pair for slot in (forward.slots if forward else ()))]
        results = (self._made_forward(pair.record, slot.slot) for slot in given)
        keys = [*map(values_key, values), *(("gradient", values_key(one.pair)) for one in results if one is not None)]
        return any(("choice", key) in self.carried for key in keys if key is not None)

    def add_lone(self, record: CallRecord, side: str) -> None:
        """Remember a call that only one side has: what it made is as far apart as the worst of what entered it."""
        entered = [one for one in record.slots if record.receives(one.slot) and one.fingerprint]
        worst = max((self._apart_on(side, one.fingerprint) for one in entered), default=0.0)
        made = [one.fingerprint for one in record.slots if not record.receives(one.slot) and one.fingerprint]
        self.apart |= {("lone", side, fingerprint): worst for fingerprint in made}

    def _apart_on(self, side: str, fingerprint: str | None) -> float:
        return max(self.apart.get((side, fingerprint), 0.0), self.apart.get(("lone", side, fingerprint), 0.0))

    def add(self, judged: JudgedCall, drift: float) -> None:
        """Remember a judged call, and how far apart its honest results are as far as that is not mere cancellation."""
        self.drift = max(self.drift, drift)
        record = judged.pair.record
        made = [slot for slot in judged.slots if not record.receives(slot.pair.slot)]
        excused = [slot for slot in made if slot.verdict.rule in ("unwritten", "choice")]
        self.carried |= {(slot.verdict.rule, key) for slot in excused if (key := values_key(slot.pair)) is not None}
        self.honest |= {key for slot in made if slot.verdict.level == "rounding" and (key := values_key(slot.pair)) is not None}
        for slot in judged.slots:
            found = distance(slot.measurement) if slot.verdict.level == "rounding" else None
            if found:
                self.apart.update(((side, one.fingerprint), min(found, 1.0)) for side, one in _sides(slot.pair))
        if record.phase == "start":
            self._add_state(slot for slot in made if slot.pair.slot.role in ("parameter", "buffer"))
        elif record.phase == "forward":
            self.forward[record.level, record.call, record.module] = judged
        elif record.phase == "backward":
            self._add_gradients(made, self.forward_of(record))
        elif record.phase == "optimizer":
            self.optimized |= {slot.pair.slot: slot for slot in made}

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
            if key is not None and slot.verdict.level == "rounding":
                is_choice = slot.verdict.rule == "choice"
                self.gradients[key] = max(self.gradients.get(key, 0.0), 1.0 if is_choice else distance(slot.measurement) or 0.0)
                self.carried |= {("choice", ("gradient", key))} if is_choice else set()


def _given(pair: Pair) -> list[SlotPair]:
    return [slot for slot in pair.slots if pair.record.receives(slot.slot)]


def _sides(pair: SlotPair) -> list[tuple[str, TensorRecord]]:
    return [(side, one) for side, one in (("subject", pair.subject), ("reference", pair.reference)) if one is not None]


def values_key(pair: SlotPair) -> Hashable | None:
    """Both sides' values, as far as fingerprints or contents tell."""
    if pair.subject is None or pair.reference is None:
        return None
    ours = pair.subject.fingerprint or pair.subject.content
    theirs = pair.reference.fingerprint or pair.reference.content
    return (ours, theirs) if ours and theirs else None
