# SPDX-License-Identifier: Apache-2.0
"""Which calls made a difference, and which only passed one on.

contributed  what entered agrees, what was made does not
inherited    what entered differs, and explains what was made
amplified    what was made differs by more than what entered explains, but what entered is not clean: not blamed
masked       what entered differs, what was made agrees
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from ulpscope.model import Contribution, JudgedCall, JudgedSlot
from ulpscope.model.step_index import ForwardCalls

__all__ = ["entered", "is_beyond", "left_behind", "made", "with_contributions"]


def with_contributions(calls: Iterable[JudgedCall]) -> list[JudgedCall]:
    """The calls of one rank and step with `contribution` set; a backward call looks at its forward call too."""
    forward = {side: ForwardCalls[JudgedCall]() for side in ("subject", "reference")}
    settled: list[JudgedCall] = []
    differing: set[Hashable] = set()
    for call in calls:
        record = call.pair.record
        own = forward["subject" if call.pair.subject is not None else "reference"]
        own.add(record, call)
        behind = own.of(record)
        contribution = _contribution(call, behind.slots if behind else ())
        beyond = {_bits(slot) for slot in made(call) if slot.verdict.level == "differs"}
        if record.phase == "start" and contribution == "contributed" and beyond <= differing:  # made by calls, and no batch
            contribution = "inherited"
        differing |= beyond - {None}
        settled.append(
            JudgedCall(pair=call.pair, slots=call.slots, differences=call.differences, contribution=contribution, multiple=call.multiple)
        )
    return settled


def left_behind(call: JudgedCall) -> JudgedCall:
    """A call of a step after the fault: parameters that differ at its start are what the fault left behind, and contribute nothing."""
    is_left = call.contribution == "contributed" and call.pair.record.call.op == "state.parameters"
    return replace(call, contribution="inherited") if is_left else call


def entered(call: JudgedCall) -> list[JudgedSlot]:
    return [slot for slot in call.slots if call.pair.record.receives(slot.pair.slot)]


def made(call: JudgedCall) -> list[JudgedSlot]:
    return [slot for slot in call.slots if not call.pair.record.receives(slot.pair.slot)]


def is_beyond(slot: JudgedSlot) -> bool:
    """Whether a slot differs by more than what entered its call explains."""
    return slot.verdict.level == "differs" and (slot.verdict.multiple is None or slot.verdict.multiple > 1)


def _bits(slot: JudgedSlot) -> Hashable | None:
    """Return both sides' values; None where nothing tells them."""
    sides = (slot.pair.subject, slot.pair.reference)
    values = tuple(one.fingerprint for one in sides if one is not None and one.fingerprint)
    return values if len(values) == len(sides) else None


def _contribution(call: JudgedCall, behind: Sequence[JudgedSlot]) -> Contribution:
    if call.level == "unmatched" and (call.pair.subject is None or call.pair.reference is None):
        return "unmatched"
    given, results = [*entered(call), *behind], made(call)
    is_given_bad = any(slot.verdict.level == "differs" for slot in given)
    if any(is_beyond(slot) for slot in results):
        is_own = any(slot.verdict.side is not None or slot.verdict.rule == "arguments" for slot in results if is_beyond(slot))
        return "contributed" if is_own or not is_given_bad else "amplified" if call.multiple is not None else "inherited"
    if is_given_bad:
        return "inherited" if not results or any(slot.verdict.level == "differs" for slot in results) else "masked"
    if any(slot.verdict.rule == "amplified" for slot in results):
        return "amplified"
    if any(slot.verdict.level == "differs" for slot in results):  # as what calls before it made explains
        return "inherited"
    return "unknown" if any(slot.verdict.level == "unmeasured" for slot in call.slots) else "clean"
