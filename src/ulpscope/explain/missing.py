# SPDX-License-Identifier: Apache-2.0
"""Calls that only one side has, and what leaves them differs: the programs are not the same."""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, call_text, count, difference_line, finding_at, listed
from ulpscope.model import Finding, JudgedCall

__all__ = ["explain_missing", "lone_text"]


def explain_missing(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "entered" or not found.lone:
        return None
    first = found.lone[0]
    record = first.pair.record
    headline = f"calls only in the {_side(first)}: {call_text(record)}, {at_place(record)}"
    if any(_side(call) != _side(first) for call in found.lone):
        headline = f"calls differ between the runs: {call_text(record)}, {at_place(record)}"
    evidence = [
        lone_text(found.lone),
        f"the next call on both sides, {call_text(found.call.pair.record)}, receives something else",
        difference_line(found.slot),
    ]
    return finding_at(
        "fault", "calls", headline, first, None, evidence, "make both programs compute the same, or map renamed calls with --mapping"
    )


def lone_text(calls: Sequence[JudgedCall]) -> str:
    sides = [(side, [call for call in calls if _side(call) == side]) for side in ("subject", "reference")]
    return "; ".join(
        f"{count(len(lone), 'call')} only in the {side}: {listed([_name(call) for call in lone])}" for side, lone in sides if lone
    )


def _side(call: JudgedCall) -> str:
    return "subject" if call.pair.reference is None else "reference"


def _name(call: JudgedCall) -> str:
    record = call.pair.record
    return f"{record.module}/{record.call.short}" if record.module else record.call.short
