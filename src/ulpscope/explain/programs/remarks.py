# SPDX-License-Identifier: Apache-2.0
"""What differs between the runs and leads to nothing beyond rounding: said once, for all calls together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ulpscope.explain.programs.draws import remark_on_draws, rng_differences
from ulpscope.explain.programs.missing import lone_text
from ulpscope.explain.views import StepView, common_levels
from ulpscope.explain.wording import count, listed, slot_text
from ulpscope.model import Finding, JudgedCall, JudgedSlot

__all__ = ["remark_on_arguments", "remark_on_missing", "remark_on_parameters", "remark_on_rng"]


def remark_on_rng(views: Sequence[StepView]) -> list[Finding]:
    """Other numbers that were drawn; else generators that differ and were not used."""
    if drawn := remark_on_draws(views):
        return drawn
    view = next((view for view in views if rng_differences(view)), None)
    if view is None:
        return []
    names = ", ".join(one.what for one in rng_differences(view))
    headline = f"random generators differ at the start of step {view.step}, rank {view.rank}: {names}"
    return [Finding(level="note", kind="rng", headline=headline, step=view.step, rank=view.rank)]


def remark_on_parameters(views: Sequence[StepView]) -> list[Finding]:
    """Parameters that are not the same bits at the very start and lead to nothing, or exist on one side only."""
    for view in views:
        slots = [slot for call in view.state("state.parameters") for slot in call.slots]
        apart = [slot for slot in slots if view.previous is None and slot.verdict.level not in ("same", "unmatched")]
        groups = [
            (apart, "are not the same bits"),
            ([slot for slot in slots if slot.verdict.level == "unmatched"], "exist on one side only"),
        ]
        found = [_parameters_note(view, group, what) for group, what in groups if group]
        if found:
            return found
    return []


def _parameters_note(view: StepView, slots: Sequence[JudgedSlot], what: str) -> Finding:
    names = listed([slot_text(slot.pair.slot) for slot in slots])
    many = f"{len(slots)} parameter{'s' if len(slots) > 1 else ''} or buffer{'s' if len(slots) > 1 else ''}"
    headline = f"{many} {what} at the start of step {view.step}, rank {view.rank}: {names}"
    return Finding(level="note", kind="parameters", headline=headline, step=view.step, rank=view.rank, evidence=(slots[0].verdict.reason,))


def remark_on_arguments(views: Sequence[StepView]) -> list[Finding]:
    groups: defaultdict[str, list[JudgedCall]] = defaultdict(list)
    examples: dict[str, str] = {}
    for call in _calls(views):
        for one in call.differences:
            kind = one.what.partition(" of ")[0]
            if not groups[kind] or groups[kind][-1] is not call:
                groups[kind].append(call)
            examples.setdefault(kind, f"{call.pair.record.name}: {one.what}: {one.subject} against {one.reference}")
    if not groups:
        return []
    calls = {id(call) for members in groups.values() for call in members}
    lines = [f"{kind} in {count(len(members), 'call')}, first {examples[kind]}" for kind, members in groups.items()]
    return [
        Finding(
            level="note",
            kind="arguments",
            headline=f"{count(len(calls), 'call')} {'differs' if len(calls) == 1 else 'differ'} in arguments, dtypes, strides or modes",
            evidence=tuple(lines[:6]),
        )
    ]


def remark_on_missing(views: Sequence[StepView]) -> list[Finding]:
    calls = _calls(views)
    levels = common_levels(calls)
    lone = [call for call in calls if call.contribution == "unmatched"]
    texts = []
    if again := [call for call in lone if call.pair.record.recompute]:
        texts.append(f"{count(len(again), 'recomputed call')} on one side only: activation checkpointing differs")
    if missing := [call for call in lone if not call.pair.record.recompute and call.pair.record.level in levels]:
        texts.append(lone_text(missing))
    for level in sorted({call.pair.record.level for call in lone} - levels):
        texts.append(f"only one side was recorded at level {level}: those calls are not compared")
    return [Finding(level="note", kind="calls", headline=text) for text in texts]


def _calls(views: Sequence[StepView]) -> list[JudgedCall]:
    return [call for view in views for call in view.calls if call.pair.record.phase != "start"]
