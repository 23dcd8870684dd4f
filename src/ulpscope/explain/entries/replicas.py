# SPDX-License-Identifier: Apache-2.0
"""Copies of one parameter that part: on other ranks, or under another name (tied weights).

Copies are known from the reference: parameters with the same values at the start of a step that still have the same values after
the optimizer's step. Where they begin a step as copies in the subject too and end it apart, what parts them is the gradient: it was
not reduced, or not with the same group. The calls before the optimizer have no fault then: each rank computed its own right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ulpscope.explain.suspects import is_varied, value_of
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import count, finding_at, listed
from ulpscope.model import Finding, JudgedCall, JudgedSlot, Slot, TensorRecord
from ulpscope.model.nouns import dataclass

__all__ = ["clue_replicas", "explain_replicas"]

_ADVICE = "look for gradients that are not reduced over all copies: a wrapper that was bypassed, a parameter left out, a missing all_reduce"
_COLLECTIVES = ("distributed.", "c10d", "_c10d")

Copy: TypeAlias = tuple[int, str]
"""A rank and the name of a parameter."""


@dataclass(frozen=True, slots=True)
class _Optimized:
    """One parameter of one rank over a step: before it, its gradient, and after it."""

    call: JudgedCall
    before: JudgedSlot
    gradient: JudgedSlot | None
    after: JudgedSlot


def explain_replicas(views: Sequence[StepView]) -> Finding | None:
    """`views` are all ranks of one step; the first group of copies that stay together in the reference and part in the subject.

    Nothing is said where a rank has a fault of its own before its optimizer: then that parted them.
    """
    if not any(view.divergence is not None for view in views) or not all(_is_clean_until_optimizer(view) for view in views):
        return None
    copies = {copy: found for view in views for copy, found in _optimized(view).items()}
    parted = [group for group in _groups(copies) if _part(copies, group)]
    return _finding(copies, parted, views) if parted else None


def clue_replicas(fault: Finding, views: Sequence[StepView]) -> list[str]:
    """Which ranks have left the others at the start of the step, where all agree in the reference."""
    if fault.kind != "parameters" or not fault.slot:
        return []
    slots = {
        view.rank: slot.pair
        for view in views
        if view.step == fault.step
        for call in view.state("state.parameters")
        for slot in call.slots
        if str(slot.pair.slot) == fault.slot
    }
    theirs = {value_of(pair.reference) for pair in slots.values()}
    ours = {rank: value_of(pair.subject) for rank, pair in slots.items()}
    if len(slots) < 2 or len(theirs) != 1 or None in theirs or None in ours.values() or len(set(ours.values())) == 1:
        return []
    left = sorted(rank for rank, value in ours.items() if value not in theirs)
    return [f"replicas disagree: {_ranks_text(left)} of the subject left the others; in the reference all {len(slots)} ranks agree"]


def _is_clean_until_optimizer(view: StepView) -> bool:
    """Whether what diverges first is the optimizer, what enters it, or a collective call: nothing that a rank computes alone."""
    found = view.divergence
    if found is None or found.call.pair.record.phase == "optimizer":
        return True
    return found.call.pair.record.call.op.startswith(_COLLECTIVES)


def _optimized(view: StepView) -> dict[Copy, _Optimized]:
    start = {slot.pair.slot.path: slot for call in view.state("state.parameters") for slot in call.slots}
    found: dict[Copy, _Optimized] = {}
    for call in view.calls:
        if call.pair.record.phase != "optimizer":
            continue
        slots = {slot.pair.slot: slot for slot in call.slots}
        for slot in call.slots:
            path = slot.pair.slot.path
            if slot.pair.slot.role == "mutated" and path in start:
                name = str(Slot("parameter", path)).partition(".")[2]
                found[view.rank, name] = _Optimized(call, start[path], slots.get(Slot("gradient", path)), slot)
    return found


def _groups(copies: Mapping[Copy, _Optimized]) -> Iterator[list[Copy]]:
    """Copies in the reference, before and after the step; equal under another name counts only where elements vary."""
    together: defaultdict[Hashable, list[Copy]] = defaultdict(list)
    for (rank, name), found in copies.items():
        before, after = value_of(found.before.pair.reference), value_of(found.after.pair.reference)
        if before is not None and after is not None:
            is_own = is_varied(found.before.pair.reference) and _numel(found.before.pair.reference) > 1
            together[before, after, "" if is_own else name].append((rank, name))
    return (group for group in together.values() if len(group) > 1)


def _numel(record: TensorRecord | None) -> int:
    return record.summary.numel if record is not None and record.summary is not None else 2


def _part(copies: Mapping[Copy, _Optimized], group: Sequence[Copy]) -> bool:
    before = {value_of(copies[copy].before.pair.subject) for copy in group}
    after = {value_of(copies[copy].after.pair.subject) for copy in group}
    gradients = {value_of(one.pair.subject) for copy in group if (one := copies[copy].gradient) is not None}
    is_apart = any(_differs(copies[copy]) for copy in group) and len(gradients) != 1
    return is_apart and len(before) == 1 and len(after) > 1 and None not in before | after


def _differs(found: _Optimized) -> bool:
    """Whether a copy is not what the reference has, by more than rounding."""
    return any(slot is not None and slot.verdict.level == "differs" for slot in (found.gradient, found.after))


def _finding(copies: Mapping[Copy, _Optimized], parted: Sequence[Sequence[Copy]], views: Sequence[StepView]) -> Finding:
    first = parted[0]
    blamed = copies[_left(copies, first)]
    slot = blamed.gradient or blamed.after
    names = list(dict.fromkeys(name for _, name in first))
    record = blamed.call.pair.record
    what = f"tied weights part: {' and '.join(names[:3])}" if len(names) > 1 else f"replicas part: {_parted_text(copies, parted)}"
    headline = f"{what}, in the optimizer's step {record.step}, {_ranks_text(sorted({rank for rank, _ in first}))}"
    evidence = [
        f"{count(len(parted), 'group')} of copies part that stay bitwise equal in the reference: {listed([_names(one) for one in parted])}",
        *_gradient_lines(copies, first),
        *_unreduced_lines(copies, first, views),
        *_collective_lines(views),
    ]
    found = finding_at("fault", "replicas", headline, blamed.call, slot, evidence, _ADVICE)
    return replace(found, module=_common_module([name for group in parted for _, name in group]))


def _parted_text(copies: Mapping[Copy, _Optimized], parted: Sequence[Sequence[Copy]]) -> str:
    name, many = parted[0][0][1], len({name for _, name in copies})
    return f"all {many} parameters, first {name}" if len(parted) == many > 1 else f"parameter {name}"


def _common_module(names: Sequence[str]) -> str:
    """The innermost module that holds all of these parameters."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _left(copies: Mapping[Copy, _Optimized], group: Sequence[Copy]) -> Copy:
    """The copy that is not what the reference has, first by rank; where several are not, the first of those."""
    others = [copy for copy in group if value_of(copies[copy].after.pair.subject) != value_of(copies[copy].after.pair.reference)]
    return min(others or group)


def _gradient_lines(copies: Mapping[Copy, _Optimized], group: Sequence[Copy]) -> list[str]:
    gradients = [copies[copy].gradient for copy in group]
    ours = {value_of(one.pair.subject) if one is not None else None for one in gradients}
    theirs = {value_of(one.pair.reference) if one is not None else None for one in gradients}
    is_reduced = len(ours) > 1 and len(theirs) == 1 and None not in theirs
    return ["the gradients that enter the optimizer differ between the copies; in the reference they are equal"] if is_reduced else []


def _unreduced_lines(copies: Mapping[Copy, _Optimized], group: Sequence[Copy], views: Sequence[StepView]) -> list[str]:
    """Whether each copy's gradient is the very value that a backward call of its own rank made."""
    made = {view.rank: _made_backward(view) for view in views}
    values = [(rank, value_of(one.pair.subject)) for rank, name in group if (one := copies[rank, name].gradient) is not None]
    is_own = bool(values) and all(value is not None and value in made.get(rank, set()) for rank, value in values)
    return ["each is what the backward calls of its own rank made: nothing reduced it"] if is_own else []


def _made_backward(view: StepView) -> set[Hashable]:
    records = [call.pair.subject for call in view.calls if call.pair.subject is not None and call.pair.subject.phase == "backward"]
    return {value_of(slot) for record in records for slot in record.slots if not record.receives(slot.slot)}


def _collective_lines(views: Sequence[StepView]) -> list[str]:
    """Collective calls that only one side has."""
    lone = [call for view in views for call in view.calls if call.contribution == "unmatched"]
    lines = []
    for side, other in (("reference", "subject"), ("subject", "reference")):
        records = [call.pair.record for call in lone if getattr(call.pair, other) is None]
        names = [str(record.call) for record in records if record.call.op.startswith(_COLLECTIVES)]
        if names:
            lines.append(f"{count(len(names), 'collective call')} only in the {side}: {listed(list(dict.fromkeys(names)))}")
    return lines


def _names(group: Sequence[Copy]) -> str:
    return " = ".join(dict.fromkeys(name for _, name in group))


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
