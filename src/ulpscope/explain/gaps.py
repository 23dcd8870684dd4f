# SPDX-License-Identifier: Apache-2.0
"""What one rank and step leaves uncompared: calls without partner, and slots of which nothing tells whether they agree.

Such a part is harmless if all that is made of it was compared and agrees. Values are followed through the data flow of each side, from
what a call makes to the calls that receive it. Of a value that no later call receives nothing is made: it is harmless where the step goes
on in both runs, or ends in optimizer steps that agree, and a gap where it is what the step ends in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ulpscope.explain.contributions import entered, made
from ulpscope.explain.flow import flow_of
from ulpscope.model import Behind, CallRecord, Gap, JudgedCall, JudgedSlot, Phase, Side, TensorRecord, joined_gaps
from ulpscope.model.operations.unwritten import writes_in_place

__all__ = ["TOLD_GAPS", "UNBLAMED", "count_opaque", "gaps_of", "harmless_calls", "with_behind_told"]

UNBLAMED = "differs, and no call is to blame"
"""Why a slot tells nothing that differs; beside a fault it is a consequence, and no gap."""

_SIDES: tuple[Side, Side] = ("subject", "reference")
_BEHIND: dict[Behind, str] = {
    "fork": "made of a decision that fell the other way",
    "choice": "made of a free choice",
    "random": "made of other random numbers",
    "unwritten": "made of memory that nobody wrote to",
}
_COPIES = frozenset("to type type_as float double half bfloat16 clone contiguous detach alias _to_copy".split())
TOLD_GAPS = frozenset((*_BEHIND.values(), UNBLAMED))
"""Reasons of which no other note speaks."""


def gaps_of(calls: Sequence[JudgedCall]) -> tuple[Gap, ...]:
    """The gaps in the calls of one rank and step, given in execution order."""
    if not any(_side(call) or any(map(_why_open, call.slots)) for call in calls):
        return ()
    lone_phases = {(side, phase) for side in _SIDES for phase in _phases(calls, side) - _phases(calls, _other(side)) - {"start"}}
    step = _Step(calls)
    return joined_gaps([*_phase_gaps(calls, lone_phases), *_call_gaps(step, lone_phases), *_slot_gaps(step)])


def harmless_calls(calls: Sequence[JudgedCall]) -> Sequence[bool]:
    """Say of each call of one rank and step whether all that is made of its results was compared and agrees.

    A result that differs and that nobody receives is none of those: that shows no harmlessness, and a step after it may hang on it.
    """
    return _Step(calls, has_dead_ends=False).is_fine


def with_behind_told(call: JudgedCall) -> JudgedCall:
    """Give slots whose sides need not agree, and do not, the verdict `unmeasured`: `rounding` would say that they were compared."""
    slots = tuple(map(_with_behind_told, call.slots))
    if slots == call.slots:
        return call
    return replace(call, slots=slots, contribution="unknown" if call.contribution == "clean" else call.contribution)


def count_opaque(calls: Sequence[JudgedCall]) -> int:
    """How many modules were compared as one; where single calls were recorded, no recording looks into these."""
    return sum(call.pair.record.level == "module" and call.pair.record.phase == "forward" and _side(call) is None for call in calls)


def _phases(calls: Sequence[JudgedCall], side: Side) -> set[Phase]:
    records = (_record(call, side) for call in calls)
    return {record.phase for record in records if record is not None and (record.slots or record.phase != "end")}


def _phase_gaps(calls: Sequence[JudgedCall], lone: set[tuple[Side, Phase]]) -> Iterator[Gap]:
    for side, phase in sorted(lone):
        record = next(one for call in calls if (one := _record(call, side)) is not None and one.phase == phase)
        yield Gap(kind="phase", why=f"only in the {side}", places=(f"{phase} of step {record.step}, rank {record.rank}",))


def _call_gaps(step: _Step, lone_phases: set[tuple[Side, Phase]]) -> Iterator[Gap]:
    for at, call in enumerate(step.calls):
        side = _side(call)
        if side is not None and not step.is_fine[at] and (side, call.pair.record.phase) not in lone_phases:
            yield Gap(kind="call", why=f"only in the {side}", places=(_place(call.pair.record),))


def _slot_gaps(step: _Step) -> Iterator[Gap]:
    for call, slot in step.open_slots:
        yield Gap(kind="slot", why=_why_open(slot) or "", places=(f"{slot.pair.slot} of {_place(call.pair.record)}",))


class _Step:
    """The calls of a rank and step from the last to the first: `is_fine` says of each whether all that it made is harmless.

    `open_slots` are those of calls on both sides that are not.
    """

    def __init__(self, calls: Sequence[JudgedCall], *, has_dead_ends: bool = True) -> None:
        self.calls = calls
        self._has_dead_ends = has_dead_ends
        self.is_fine = [True] * len(calls)
        self.open_slots: list[tuple[JudgedCall, JudgedSlot]] = []
        self._flows = {side: flow_of(calls, side) for side in _SIDES}
        self._known = {side: _compared_values(calls, side) for side in _SIDES}
        both = (at for at, call in enumerate(calls) if _side(call) is None and call.pair.record.phase not in ("start", "end"))
        self._last_pair = max(both, default=-1)
        self._ends_in_agreement = _ends_in_agreement(calls)
        self._num_bad = 0
        for at in reversed(range(len(calls))):
            self._look_at(at)
        self.open_slots.reverse()

    def _look_at(self, at: int) -> None:
        call = self.calls[at]
        side = _side(call)
        if side is not None:
            record = call.pair.record
            values = [slot for slot in record.slots if not record.receives(slot.slot)]
            is_harmless = self._only_copies(side, record) or all(self._is_harmless_on(side, at, value) for value in values)
            self.is_fine[at] = record.phase != "optimizer" and is_harmless
        else:
            bad = [slot for slot in made(call) if _why_open(slot) and not self._is_harmless(at, slot)]
            self.is_fine[at] = not bad
            is_lost = bool(bad) or not (made(call) or self._is_dead_end_harmless(at))
            given = [slot for slot in entered(call) if _why_open(slot)] if is_lost else []
            self.open_slots += [(call, slot) for slot in (*bad, *given)]
        self._num_bad += not self.is_fine[at]

    def _is_harmless(self, at: int, slot: JudgedSlot) -> bool:
        """Whether all that is made of a result that does not agree was compared and agrees.

        Nobody has to receive it now if it was written over what there was: it stays, for a later step.
        """
        sides = [(side, record) for side in _SIDES if (record := _tensor(slot, side)) is not None]
        receivers = {later for side, record in sides for later in self._later(side, at, record)}
        if receivers:
            return all(self.is_fine[later] for later in receivers)
        if not all(record.fingerprint for _, record in sides):
            return self._is_followed_by_agreement(at)
        call = self.calls[at].pair.record
        return not writes_in_place(call.call.op, call.arguments) and self._is_dead_end_harmless(at)

    def _is_harmless_on(self, side: Side, at: int, value: TensorRecord) -> bool:
        """The same for a result of a call that only one side has."""
        receivers = self._later(side, at, value)
        if receivers:
            return all(self.is_fine[later] for later in receivers)
        if not value.fingerprint:
            return self._is_followed_by_agreement(at)
        if any(value.fingerprint in self._known[one] for one in _SIDES):
            return True
        is_tail = at > self._last_pair
        return not is_tail or (self._ends_in_agreement and self.calls[at].pair.record.phase == "forward")

    def _only_copies(self, side: Side, record: CallRecord) -> bool:
        """Whether a call gives on what was compared and agrees, at most in another precision."""
        given = [slot.fingerprint for slot in record.slots if record.receives(slot.slot)]
        return record.call.short in _COPIES and bool(given) and all(one in self._known[side] for one in given)

    def _is_dead_end_harmless(self, at: int) -> bool:
        if not self._has_dead_ends:
            return False
        return self._ends_in_agreement or (_is_start(self.calls[at]) and self._last_pair > at)

    def _is_followed_by_agreement(self, at: int) -> bool:
        """Where nothing tells who receives a value, everything later on both sides has to agree."""
        return at < self._last_pair and not self._num_bad

    def _later(self, side: Side, at: int, value: TensorRecord) -> list[int]:
        flow = self._flows[side]
        return [one for one in flow.readers(flow.value(at, value.slot)) if one > at and _makes_something(flow.records[one])]


def _makes_something(record: CallRecord | None) -> bool:
    return record is not None and not all(record.receives(slot.slot) for slot in record.slots)


def _compared_values(calls: Sequence[JudgedCall], side: Side) -> set[str]:
    """The values of one side that stand in a slot that agrees."""
    slots = (slot for call in calls if _side(call) is None for slot in call.slots if _why_open(slot) is None)
    return {record.fingerprint for slot in slots if (record := _tensor(slot, side)) is not None and record.fingerprint}


def _ends_in_agreement(calls: Sequence[JudgedCall]) -> bool:
    """Whether optimizer steps end the step on both sides, with gradients and results that agree, and with what the step leaves behind."""
    steps = [call for call in calls if call.pair.record.phase in ("optimizer", "end")]
    is_stepped = any(call.pair.record.phase == "optimizer" for call in steps)
    return is_stepped and all(_side(call) is None and not any(map(_why_open, call.slots)) for call in steps if call.pair.record.slots)


def _why_open(slot: JudgedSlot) -> str | None:
    """Why a slot on both sides tells nothing about whether the runs agree; None where it agrees."""
    if slot.behind is not None:
        return None if _is_judged_apart(slot) else _BEHIND[slot.behind]
    match slot.verdict.level:
        case "unmatched":
            return "only in the subject" if slot.pair.reference is None else "only in the reference"
        case "unmeasured":
            reason = slot.verdict.reason.partition(" (")[0].partition(":")[0]
            return "other bits, and nothing tells by how much" if slot.differs_by_unknown else reason
        case "differs":
            return UNBLAMED
    return None


def _with_behind_told(slot: JudgedSlot) -> JudgedSlot:
    if slot.behind is None or slot.verdict.level != "rounding" or _is_judged_apart(slot):
        return slot
    is_source = slot.verdict.rule in ("random", "unwritten")
    reason = slot.verdict.reason if is_source else f"not compared: {_BEHIND[slot.behind]}"
    return replace(slot, verdict=replace(slot.verdict, level="unmeasured", reason=reason))


def _is_judged_apart(slot: JudgedSlot) -> bool:
    """Whether each side was replayed on its own inputs and found honest: then a decision that fell the other way hides nothing."""
    is_replayed = slot.subject is not None and slot.reference is not None and slot.verdict.side is None
    return is_replayed and slot.behind in ("fork", "choice")


def _side(call: JudgedCall) -> Side | None:
    """The only side that has a call; None where both do."""
    if call.pair.reference is None:
        return "subject"
    return "reference" if call.pair.subject is None else None


def _other(side: Side) -> Side:
    return "reference" if side == "subject" else "subject"


def _record(call: JudgedCall, side: Side) -> CallRecord | None:
    return call.pair.subject if side == "subject" else call.pair.reference


def _tensor(slot: JudgedSlot, side: Side) -> TensorRecord | None:
    return slot.pair.subject if side == "subject" else slot.pair.reference


def _is_start(call: JudgedCall) -> bool:
    return call.pair.record.phase == "start"


def _place(record: CallRecord) -> str:
    name = f"{record.module}/{record.call}" if record.module else str(record.call)
    return f"{name} ({record.phase}), step {record.step}, rank {record.rank}"
