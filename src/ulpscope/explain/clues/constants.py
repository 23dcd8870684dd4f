# SPDX-License-Identifier: Apache-2.0
"""A clue: the subject's value is constant where the reference's varies, over the elements or from step to step."""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.explain.suspects import Suspect, in_steps, is_varied, value_of
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import number, slot_text
from ulpscope.model import SlotPair, TensorRecord

__all__ = ["clue_constant"]


def clue_constant(suspect: Suspect, views: Sequence[StepView]) -> list[str]:
    pair, name = suspect.slot.pair, slot_text(suspect.slot.pair.slot)
    if _is_flat(pair.subject) and is_varied(pair.reference) and not _is_flat(pair.reference):
        return [f"constant: every element of the subject's {name} is {_value(pair.subject)}; the reference's vary"]
    steps = in_steps(suspect, views)
    if len(steps) >= 2 and suspect.view.step == min(steps) and _is_constant(steps):
        text = f" ({_value(pair.subject)})" if _is_flat(pair.subject) or _is_single(pair.subject) else ""
        return [f"constant: the subject's {name} is the same{text} in {_steps_text(sorted(steps))}; the reference's varies"]
    return []


def _is_constant(steps: dict[int, SlotPair]) -> bool:
    ours = [value_of(pair.subject) for pair in steps.values()]
    theirs = [value_of(pair.reference) for pair in steps.values()]
    is_known = None not in ours and None not in theirs
    return is_known and len(set(ours)) == 1 and len(set(theirs)) == len(theirs)


def _is_flat(record: TensorRecord | None) -> bool:
    """More than one element, all known to be the same."""
    summary = record.summary if record is not None else None
    return summary is not None and summary.numel > 1 and summary.min is not None and summary.min == summary.max and not summary.num_nan


def _is_single(record: TensorRecord | None) -> bool:
    return record is not None and record.summary is not None and record.summary.numel == 1


def _value(record: TensorRecord | None) -> str:
    value = record.summary.min if record is not None and record.summary is not None else None
    return number(value) if value is not None else "NaN"


def _steps_text(steps: Sequence[int]) -> str:
    if len(steps) == 2:
        return f"steps {steps[0]} and {steps[1]}"
    return f"all {len(steps)} steps from {steps[0]} to {steps[-1]}"
