# SPDX-License-Identifier: Apache-2.0
"""The first call that diverges was called otherwise: another argument, dtype or mode."""

from __future__ import annotations

from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, call_text, difference_line, differences_lines, finding_at, inputs_line
from ulpscope.model import ArgumentDifference, Finding

__all__ = ["explain_arguments", "is_telling"]


def explain_arguments(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "contributed" or found.call.pair.record.phase == "optimizer":
        return None
    if not any(is_telling(one) for one in found.call.differences) or found.slot.verdict.side is not None:
        return None
    record = found.call.pair.record
    headline = f"arguments differ: {call_text(record, found.slot.pair.slot)}, {at_place(record)}"
    evidence = [*differences_lines(found.call), difference_line(found.slot), inputs_line(found.call)]
    return finding_at("fault", "arguments", headline, found.call, found.slot, evidence, "call it alike on both sides and compare again")


def is_telling(difference: ArgumentDifference) -> bool:
    """Layout and bookkeeping change no result of an honest kernel; everything else may."""
    return not difference.what.startswith(("strides of", "requires_grad of", "operation"))
