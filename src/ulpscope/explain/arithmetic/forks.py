# SPDX-License-Identifier: Apache-2.0
"""Large differences that no call is to blame for: a decision on a near tie, or rounding that an ill-conditioned call magnifies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ulpscope.explain.contributions import entered
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, call_text, count, difference_line, finding_at, inputs_line, number, record_again
from ulpscope.model import Amplification, Finding, JudgedCall, JudgedSlot, SummaryMeasurement, TensorMeasurement

__all__ = ["remark_on_amplification", "remark_on_choices", "remark_on_forks"]


def remark_on_forks(views: Sequence[StepView]) -> list[Finding]:
    """The first decision that fell the other way, with the size of what tipped it."""
    found = list(_judged_by(views, "fork"))
    if not found:
        return []
    call, slot = found[0]
    record = call.pair.record
    headline = f"a decision falls the other way on a near tie: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [_flipped(slot), _entering_text(call), slot.verdict.reason]
    if len(found) > 1:
        evidence.append(f"{count(len(found) - 1, 'other result')} of the kind")
    advice = "what follows took another path and need not agree; judge it by each side's own inputs (--replay all)"
    return [finding_at("note", "fork", headline, call, slot, evidence, advice)]


def remark_on_choices(views: Sequence[StepView]) -> list[Finding]:
    """The first result that an honest machine may choose otherwise, where values would be needed to tell a choice from a fault."""
    found = [(view, call, slot) for view in views for call, slot in _judged_by([view], "choice") if slot.subject is None]
    if not found or found[0][1].pair.record.phase != "forward":
        return []
    view, call, slot = found[0]
    record = call.pair.record
    headline = f"not determined by its inputs, and chosen otherwise: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [slot.verdict.reason, difference_line(slot)]
    if len(found) > 1:
        evidence.append(f"{count(len(found) - 1, 'result')} made of such choices, or of the kind, not judged without values")
    return [finding_at("note", "fork", headline, call, slot, evidence, record_again(view, record))]


def remark_on_amplification(views: Sequence[StepView]) -> list[Finding]:
    """Name the call that magnifies honest differences most."""
    found = [(gain, call, slot) for view in views for call, slot in _judged_by([view], "amplified") if (gain := _gain(view, call, slot))]
    if not found:
        return []
    gain, call, slot = max(found, key=lambda one: one[0].factor)
    record = call.pair.record
    unblamed = "" if any(one.divergence for one in views) else ", no call is to blame"
    headline = f"rounding is magnified{unblamed}: most by {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [difference_line(slot), f"{number(gain.factor)} times the difference of what enters", slot.verdict.reason]
    return [finding_at("note", "amplified", headline, call, slot, evidence)]


def _judged_by(views: Sequence[StepView], rule: str) -> Iterator[tuple[JudgedCall, JudgedSlot]]:
    return ((call, slot) for view in views for call in view.calls for slot in call.slots if slot.verdict.rule == rule)


def _entering_text(call: JudgedCall) -> str:
    apart = _apart(call)
    return f"what enters differs by {number(apart)} of its size" if apart else inputs_line(call)


def _flipped(slot: JudgedSlot) -> str:
    measurement = slot.measurement
    if isinstance(measurement, TensorMeasurement):
        return f"{measurement.num_different} of {count(measurement.numel, 'element')} differ"
    return slot.verdict.reason


def _apart(call: JudgedCall, *, of_all: bool = False) -> float:
    found = [slot.measurement for slot in (call.slots if of_all else entered(call))]
    return max((one.distance for one in found if isinstance(one, (TensorMeasurement, SummaryMeasurement))), default=0.0)


def _gain(view: StepView, call: JudgedCall, slot: JudgedSlot) -> Amplification | None:
    """By how much a result that was replayed is farther apart than all that its call is made of."""
    after = slot.measurement.distance if isinstance(slot.measurement, TensorMeasurement) else None
    forward = view.forward_of(call)
    before = max(_apart(call), _apart(forward, of_all=True) if forward is not None else 0.0)
    return Amplification.of(before, after) if slot.subject is not None else None
