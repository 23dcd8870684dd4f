# SPDX-License-Identifier: Apache-2.0
"""What an explanation looks at: the judged calls of one rank and step, and the first of them that diverges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Literal

from ulpscope.explain.contributions import entered, is_beyond, made
from ulpscope.explain.flow import Flows, value_in
from ulpscope.explain.gaps import harmless_calls
from ulpscope.explain.masking import values_of_another_mask
from ulpscope.explain.rewritten import is_written_otherwise, values_that_vanish
from ulpscope.model import DTYPES, DType, JudgedCall, JudgedSlot, RunInfo, Side, TensorMeasurement
from ulpscope.model.nouns import dataclass
from ulpscope.model.step_index import UNKNOWN, StepIndex

__all__ = ["Divergence", "StepView", "common_levels", "first_divergence", "worst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first call, in execution order, that is not clean.

    `contributed`: the call made the difference. `entered`: the difference comes in, and no call before it made it;
    `lone` are the calls just before that only one side has, `result` what the call made of a value that could not be compared.
    """

    how: Literal["contributed", "entered"]
    call: JudgedCall
    slot: JudgedSlot
    lone: tuple[JudgedCall, ...] = ()
    is_first_call: bool = False
    result: JudgedSlot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One rank and step. `divergence` is None where every call is clean; `ends` is what was recorded at the end of the step."""

    rank: int
    step: int
    calls: Sequence[JudgedCall]
    subject: RunInfo
    reference: RunInfo
    subject_path: str = ""
    divergence: Divergence | None = None
    previous: StepView | None = None
    ends: tuple[JudgedCall, ...] = ()
    flows: Flows = field(default_factory=Flows, compare=False, repr=False)

    def flow(self, side: Side) -> StepIndex:
        """The data flow of one side; its positions are those of `calls`."""
        return self.flows.of(self.calls, side)

    def position(self, call: JudgedCall) -> int:
        return self.flows.position(self.calls, call)

    def forward_of(self, call: JudgedCall) -> JudgedCall | None:
        """The forward call of a backward one."""
        forward = self.flow("subject" if call.pair.subject is not None else "reference").forward(self.position(call))
        return None if forward == UNKNOWN else self.calls[forward]

    def maker_of(self, at: int, slot: JudgedSlot) -> tuple[int, JudgedSlot] | None:
        """The call that made what stands in a slot of the call at a position on both sides, and the slot in which it made it."""
        flows: list[tuple[Side, StepIndex]] = [("subject", self.flow("subject")), ("reference", self.flow("reference"))]
        values = [value_in(flow, at, slot, side) for side, flow in flows]
        makers = {flow.maker(value) for (_, flow), value in zip(flows, values, strict=True)}
        place = makers.pop()
        if makers or place == UNKNOWN or self.calls[place].pair.record.phase == "start":
            return None
        results = made(self.calls[place])
        found = (one for one in results if [value_in(flow, place, one, side) for side, flow in flows] == values)
        return next(((place, one) for one in found), None)

    def state(self, op: str) -> list[JudgedCall]:
        return [call for call in self.calls if call.pair.record.phase == "start" and call.pair.record.call.op == op]

    @property
    def leads_to_difference(self) -> bool:
        """Whether a call diverges; also where no call was recorded or measured that could tell."""
        calls = [call for call in self.calls if call.pair.record.phase != "start"]
        return self.divergence is not None or not calls or any(call.contribution == "unknown" for call in calls)


def worst(slots: Sequence[JudgedSlot]) -> JudgedSlot | None:
    """The slot with the largest multiple among those that differ."""
    differing = [slot for slot in slots if slot.verdict.level == "differs"]
    return max(differing, key=lambda slot: slot.verdict.multiple or 0.0, default=None)


def common_levels(calls: Sequence[JudgedCall]) -> set[str]:
    """The levels of which both sides have calls; what is of another level is not missing, it was not asked for."""
    sides = ({getattr(call.pair, side).level for call in calls if getattr(call.pair, side)} for side in ("subject", "reference"))
    return set.intersection(*sides)


def first_divergence(calls: Sequence[JudgedCall]) -> Divergence | None:
    lone: list[JudgedCall] = []
    levels = common_levels(calls)
    is_first_call = True
    excused: set[str] = set()
    harmless: Sequence[bool] | None = None
    for at, call in enumerate(calls):
        record = call.pair.record
        if record.phase == "start":
            continue
        if call.contribution == "unmatched":
            if not record.recompute and record.level in levels:
                lone = [call] if not lone or calls[at - 1] is not lone[-1] else [*lone, call]
            continue
        slot = worst([one for one in entered(call) if not _is_excused(one, excused)])
        if slot is not None and call.contribution == "masked" and made(call):
            continue
        if slot is not None and lone and _is_of_other_shape(slot):
            lone = [*lone, call]
            continue
        if slot is not None:
            harmless = harmless_calls(calls) if harmless is None else harmless
            if harmless[at] and made(call) and not is_first_call and (not lone or _is_shown_by_values(slot, calls[at:])):
                continue
            if lone and not is_first_call and (vanishing := values_that_vanish(calls, at)):
                excused |= vanishing
                continue
            return Divergence(how="entered", call=call, slot=slot, lone=tuple(lone), is_first_call=is_first_call)
        if call.contribution == "contributed" and _is_no_pair(call):
            lone = [*lone, call]
            continue
        if call.contribution == "contributed":
            call = _innermost(call, calls)
            if call.pair.record.level == "module" and _is_cleared(call, calls):
                continue
            if call.differences and (masked := values_of_another_mask(calls, at)):
                excused |= masked
                continue
            if is_written_otherwise(call) and (vanishing := values_that_vanish(calls, calls.index(call))):
                excused |= vanishing
                continue
            slot = worst([slot for slot in made(call) if is_beyond(slot)])
            assert slot is not None, "a contributing call has a slot that differs"
            given = next((one for one in entered(call) if _is_uncompared(one)), None)
            if given is None and slot.verdict.rule == "unexplained" and not call.differences:
                given = slot
            if given is not None and slot.verdict.side is None and slot.verdict.rule != "arguments":
                return Divergence(how="entered", call=call, slot=given, lone=tuple(lone), is_first_call=is_first_call, result=slot)
            return Divergence(how="contributed", call=call, slot=slot)
        is_first_call = is_first_call and not made(call)
    return None


def _is_shown_by_values(differing: JudgedSlot, later: Sequence[JudgedCall]) -> bool:
    """Whether what agrees later shows that a difference went away in calls that only one side has, as where two programs order alike terms
    otherwise: by values, in no coarser dtype and in no call that both have, which may merely hide it."""
    if any(call.contribution == "masked" for call in later):
        return False
    finest = max((dtype.eps for dtype in _floating(differing)), default=0.0)
    agreeing = (slot for call in later for slot in call.slots if slot.verdict.level == "rounding")
    return all(isinstance(slot.measurement, TensorMeasurement) and all(one.eps <= finest for one in _floating(slot)) for slot in agreeing)


def _floating(slot: JudgedSlot) -> list[DType]:
    names = [side.dtype for side in (slot.pair.subject, slot.pair.reference) if side is not None]
    return [DTYPES[name] for name in names if name in DTYPES and DTYPES[name].is_floating]


def _is_excused(slot: JudgedSlot, excused: set[str]) -> bool:
    sides = (slot.pair.subject, slot.pair.reference)
    return bool(excused) and any(one is not None and one.fingerprint in excused for one in sides)


def _is_of_other_shape(slot: JudgedSlot) -> bool:
    """Beside calls that only one side has, a pair of calls on tensors of other shapes is no pair: it belongs to them."""
    ours, theirs = slot.pair.subject, slot.pair.reference
    return ours is not None and theirs is not None and ours.shape != theirs.shape


def _is_no_pair(call: JudgedCall) -> bool:
    """Whether two operations stand for each other whose results cannot: what each contributes to a gradient is a part of another sum."""
    is_other = any(one.what == "operation" for one in call.differences)
    gradients = [slot for slot in entered(call) if slot.pair.subject is None or slot.pair.reference is None]
    return is_other and call.pair.record.phase == "backward" and bool(gradients)


def _is_uncompared(slot: JudgedSlot) -> bool:
    """Whether a value is there on both sides, laid out otherwise, so that nothing tells whether it agrees."""
    return slot.verdict.level in ("same", "unmeasured") and _is_of_other_shape(slot)


def _innermost(blamed: JudgedCall, calls: Sequence[JudgedCall]) -> JudgedCall:
    """The contributing call inside a module that was recorded before its own calls; else the call itself."""
    if blamed.pair.record.level != "module":
        return blamed
    return next((call for call in _inside(blamed, calls) if call.contribution == "contributed"), blamed)


def _is_cleared(module: JudgedCall, calls: Sequence[JudgedCall]) -> bool:
    """Whether the calls inside a module were found honest, by replay or as draws, so that it only magnifies what enters it."""
    return any(slot.subject is not None or slot.verdict.rule == "random" for call in _inside(module, calls) for slot in call.slots)


def _inside(module: JudgedCall, calls: Sequence[JudgedCall]) -> Iterator[JudgedCall]:
    record = module.pair.record
    for call in calls:
        other = call.pair.record
        is_within = f"{other.module}.".startswith(f"{record.module}.") or not record.module
        if other.level != "module" and other.phase == record.phase and is_within:
            yield call
