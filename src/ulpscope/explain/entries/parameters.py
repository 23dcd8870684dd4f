# SPDX-License-Identifier: Apache-2.0
"""Parameters or buffers differ before any call: a checkpoint, an initialisation, or something that wrote to them between steps."""

from __future__ import annotations

from collections.abc import Iterable

from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import StepView, worst
from ulpscope.explain.wording import count, difference_line, finding_at, listed, slot_text
from ulpscope.model import Finding, JudgedCall, JudgedSlot, Slot, SlotPair, TensorRecord

__all__ = ["explain_parameters"]

FIRST_ADVICE = "load the same checkpoint on both sides, or initialise both with the same seed (ulpscope run --seed 1)"
LATER_ADVICE = (
    "look for code that writes to parameters or buffers outside the optimizer's step (clipping, averaging, weight tying, broadcasts)"
)


def explain_parameters(view: StepView) -> Finding | None:
    for call in view.state("state.parameters"):
        slot = worst([one for one in call.slots if not _is_only_met_elsewhere(view, one)])
        if slot is not None and view.leads_to_difference:
            return _finding(view, call, slot)
    return None


def _is_only_met_elsewhere(view: StepView, slot: JudgedSlot) -> bool:
    """Whether two modules were paired that are called in another order: each side has the other's tensor of that name, with its bits."""
    ours, theirs = slot.pair.subject, slot.pair.reference
    if ours is None or theirs is None or ours.slot == theirs.slot:
        return False
    slots = [one.pair for call in view.state("state.parameters") for one in call.slots]
    subject, reference = ({record.slot: value_of(record) for record in side if record is not None} for side in _sides(slots))
    return all(
        value is not None and side.get(name) == value
        for side, name, value in ((reference, ours.slot, value_of(ours)), (subject, theirs.slot, value_of(theirs)))
    )


def _sides(slots: Iterable[SlotPair]) -> tuple[list[TensorRecord | None], list[TensorRecord | None]]:
    pairs = list(slots)
    return [one.subject for one in pairs], [one.reference for one in pairs]


def _finding(view: StepView, call: JudgedCall, slot: JudgedSlot) -> Finding:
    differing = [slot_text(one.pair.slot) for one in call.slots if one.verdict.level == "differs"]
    roles = sorted({one.pair.slot.role + "s" for one in call.slots if one.verdict.level == "differs"}, reverse=True)
    headline = f"{' and '.join(roles)} differ before any call: {slot_text(slot.pair.slot)}, step {view.step}, rank {view.rank}"
    evidence = [difference_line(slot), f"{len(differing)} of {count(len(call.slots), 'tensor')} differ: {listed(differing)}"]
    evidence += _changed_between_steps(view, slot)
    return finding_at("fault", "parameters", headline, call, slot, evidence, FIRST_ADVICE if view.previous is None else LATER_ADVICE)


def _changed_between_steps(view: StepView, slot: JudgedSlot) -> list[str]:
    """Which side's value is not what its own optimizer left in the step before."""
    after = _left_by_optimizer(view.previous, slot.pair.slot) if view.previous else None
    if after is None or view.previous is None or view.previous.step != view.step - 1:
        return []
    sides = (("subject", slot.pair.subject, after.pair.subject), ("reference", slot.pair.reference, after.pair.reference))
    return [
        f"the {side}'s value is not what its optimizer left in step {view.previous.step}"
        for side, now, then in sides
        if _changed(now, then)
    ]


def _left_by_optimizer(view: StepView, slot: Slot) -> JudgedSlot | None:
    steps = (call for call in view.calls if call.pair.record.phase == "optimizer")
    return next(
        (one for call in steps for one in call.slots if one.pair.slot.path == slot.path and one.pair.slot.role in ("mutated", "parameter")),
        None,
    )


def _changed(now: TensorRecord | None, then: TensorRecord | None) -> bool:
    return now is not None and then is not None and bool(now.fingerprint) and bool(then.fingerprint) and now.fingerprint != then.fingerprint
