# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step diverges on agreeing gradients: its settings, its state or its arithmetic."""

from __future__ import annotations

from ulpscope.explain.contributions import is_beyond, made
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, count, difference_line, differences_lines, finding_at, inputs_line, listed, slot_text
from ulpscope.model import Finding

__all__ = ["explain_optimizer"]


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
