# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step diverges on agreeing gradients: its settings, its state or its arithmetic, or a parameter it leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from ulpscope.explain.contributions import is_beyond, made
from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, count, difference_line, differences_lines, finding_at, inputs_line, listed, slot_text
from ulpscope.model import Finding, JudgedCall, JudgedSlot

__all__ = ["explain_left_out", "explain_optimizer"]


def explain_optimizer(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "contributed" or found.call.pair.record.phase != "optimizer":
        return None
    record, settings = found.call.pair.record, differences_lines(found.call)
    what = "optimizer settings differ" if settings else "the optimizer's step diverges"
    headline = f"{what}: {record.call.short} (call {record.call.index}, {slot_text(found.slot.pair.slot)}), {at_place(record)}"
    beyond = [slot_text(slot.pair.slot) for slot in made(found.call) if is_beyond(slot)]
    evidence = [
        *settings,
        difference_line(found.slot),
        f"{count(len(beyond), 'result')} beyond rounding: {listed(beyond)}",
        inputs_line(found.call),
    ]
    advice = "use the same settings on both sides" if settings else "try the optimizer with foreach=False and fused=False on the subject"
    return finding_at("fault", "optimizer", headline, found.call, found.slot, evidence, advice)


def explain_left_out(view: StepView) -> Finding | None:
    """Parameters that both sides have and only one side's optimizers update."""
    if view.divergence is not None and view.divergence.call.pair.record.phase != "optimizer":
        return None
    left_out = [(call, slot) for call, slot in _updated(view) if _is_left_out(view, slot)]
    if not left_out:
        return None
    call, slot = left_out[0]
    side, other = ("reference", "subject") if slot.pair.subject is None else ("subject", "reference")
    names = [slot_text(one.pair.slot).partition(" ")[2] for _, one in left_out]
    headline = f"{count(len(names), 'parameter')} updated by the {side}'s optimizer only: {names[0]}, {at_place(call.pair.record)}"
    evidence = [f"the {other}'s optimizers leave out {listed(names)}", *differences_lines(call)]
    return finding_at("fault", "optimizer", headline, call, slot, evidence, "give the optimizers of both sides the same parameters")


def _updated(view: StepView) -> Iterator[tuple[JudgedCall, JudgedSlot]]:
    optimizers = (call for call in view.calls if call.pair.record.phase == "optimizer")
    return ((call, slot) for call in optimizers for slot in call.slots if slot.pair.slot.role == "mutated")


def _is_left_out(view: StepView, slot: JudgedSlot) -> bool:
    """Updated on one side by any optimizer and changed there; a parameter of both sides; not updated on the other side by any."""
    side, other = ("reference", "subject") if slot.pair.subject is None else ("subject", "reference")
    if slot.verdict.level != "unmatched" or getattr(slot.pair, other) is not None:
        return False
    path = slot.pair.slot.path
    starts = (one for call in view.state("state.parameters") for one in call.slots if one.pair.slot.path == path)
    start = next((one for one in starts if one.pair.subject is not None and one.pair.reference is not None), None)
    optimizers = [record for call in view.calls if (record := getattr(call.pair, other)) is not None and record.phase == "optimizer"]
    is_elsewhere = any(one.slot.role == "mutated" and one.slot.path == path for record in optimizers for one in record.slots)
    return start is not None and not is_elsewhere and value_of(getattr(slot.pair, side)) != value_of(getattr(start.pair, side))
