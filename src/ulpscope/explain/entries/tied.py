# SPDX-License-Identifier: Apache-2.0
"""One parameter on one side and two on the other: weights that are tied in one program only."""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.explain.suspects import is_varied, value_of
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import difference_line, finding_at, slot_text
from ulpscope.model import Finding, JudgedCall, JudgedSlot

__all__ = ["explain_tied"]

_ADVICE = "tie the weights on both sides, after loading and after moving the model to its device"


def explain_tied(view: StepView) -> Finding | None:
    """Asked where the optimizer's gradient or result of a parameter differs of which one side has a second copy."""
    found = view.divergence
    if found is None or found.call.pair.record.phase != "optimizer":
        return None
    for call in view.state("state.parameters"):
        for lone in call.slots:
            twin = _twin(lone, call.slots)
            if twin is not None and twin.pair.slot.path == _parameter(found.slot):
                return _finding(call, lone, twin, found.slot)
    return None


def _twin(lone: JudgedSlot, slots: Sequence[JudgedSlot]) -> JudgedSlot | None:
    """The parameter of both sides that has the values of one that only one side has."""
    side = "subject" if lone.pair.reference is None else "reference"
    record = getattr(lone.pair, side)
    if lone.verdict.level != "unmatched" or value_of(record) is None or not is_varied(record):
        return None
    both = (one for one in slots if one.pair.subject is not None and one.pair.reference is not None)
    return next((one for one in both if value_of(getattr(one.pair, side)) == value_of(record)), None)


def _parameter(slot: JudgedSlot) -> tuple[int | str, ...]:
    path = slot.pair.slot.path
    return path[:-1] if slot.pair.slot.role == "state" else path


def _finding(call: JudgedCall, lone: JudgedSlot, twin: JudgedSlot, diverging: JudgedSlot) -> Finding:
    apart, tied = ("subject", "reference") if lone.pair.reference is None else ("reference", "subject")
    record = call.pair.record
    headline = f"weights are tied in the {tied} only: {slot_text(lone.pair.slot)}, step {record.step}, rank {record.rank}"
    evidence = [
        f"the {apart} has it as a parameter of its own with the values of {slot_text(twin.pair.slot)}; the {tied} has only the one",
        difference_line(diverging),
    ]
    return finding_at("fault", "parameters", headline, call, lone, evidence, _ADVICE)
