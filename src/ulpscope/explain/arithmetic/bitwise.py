# SPDX-License-Identifier: Apache-2.0
"""Bits differ and nothing was kept that tells by how much: no fault, but no clean bill either."""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.explain.contributions import entered, made
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, call_text, count, finding_at, inputs_line, record_again
from ulpscope.model import Finding, JudgedCall

__all__ = ["remark_on_bits"]


def remark_on_bits(views: Sequence[StepView]) -> list[Finding]:
    """The first call that makes such a difference on inputs that agree; else the first that has one."""
    calls = [(view, call) for view in views for call in view.calls if any(slot.differs_by_unknown for slot in call.slots)]
    if not calls:
        return []
    view, first = next(((view, call) for view, call in calls if _makes_it(call)), calls[0])
    record = first.pair.record
    slot = next(slot for slot in [*made(first), *entered(first)] if slot.differs_by_unknown)
    headline = f"first bitwise difference: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [_rest(len(calls) - 1)] if record.phase == "start" else [inputs_line(first), _rest(len(calls) - 1)]
    return [finding_at("note", "bitwise", headline, first, slot, evidence, record_again(view, record))]


def _makes_it(call: JudgedCall) -> bool:
    is_given_same = all(slot.verdict.level == "same" for slot in entered(call))
    return is_given_same and any(slot.differs_by_unknown for slot in made(call))


def _rest(later: int) -> str:
    too = f"{count(later, 'later call')} {'differs' if later == 1 else 'differ'} bitwise too; " if later else ""
    return f"{too}nothing was kept that tells by how much"
