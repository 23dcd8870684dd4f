# SPDX-License-Identifier: Apache-2.0
"""One pair of calls with its measurements becomes a judged call.

What enters is judged first, by what came before; then what the call made, by what entered. A backward record is entered by its
gradients and by the values of its forward call; a result of an optimizer by the gradient, parameter and state of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ulpscope.errors import InputError
from ulpscope.judge.allowances import Allowance, Rule
from ulpscope.judge.conditioning import Scale, can_flip, jump_of
from ulpscope.judge.derived import derived
from ulpscope.judge.differences import argument_differences
from ulpscope.judge.entering import Entering, coarsest
from ulpscope.judge.ptdbg import ptdbg
from ulpscope.judge.sizes import Size, dtypes_of, size_of
from ulpscope.judge.thresholds import rounding_units
from ulpscope.judge.trail import Trail, values_key
from ulpscope.model import JudgedCall, JudgedSlot, Measurement, Pair, SlotPair, SummaryMeasurement

__all__ = ["RULES", "judge_call", "rules_named"]

RULES: dict[str, Rule] = {"derived": derived, "ptdbg": ptdbg}


def rules_named(name: str) -> Rule:
    """The rule set of that name."""
    if name not in RULES:
        raise InputError(f"there are no rules named {name!r}; choose one of {', '.join(RULES)}")
    return RULES[name]


def judge_call(pair: Pair, measurements: Sequence[Measurement], rules: str = "derived", trail: Trail | None = None) -> JudgedCall:
    """Judge every slot of a pair; `trail` carries what earlier calls of this rank showed, and learns from this one."""
    rule, trail = rules_named(rules), trail if trail is not None else Trail()
    if pair.subject is None or pair.reference is None:
        trail.add_lone(pair.record, "reference" if pair.subject is None else "subject")
        return JudgedCall(pair=pair)
    measured = list(enumerate(zip(pair.slots, measurements, strict=True)))
    receives = {at: pair.record.receives(slot.slot) for at, (slot, _) in measured}
    is_start = pair.record.phase == "start"
    judged = {at: _judge_given(slot, found, rule, trail, is_start) for at, (slot, found) in measured if receives[at] or is_start}
    entering = Entering.of(pair, tuple(judged.values()), trail)
    drift = 0.0
    for at, (slot, found) in measured:
        if at not in judged:
            judged[at], reached = _judge_made(pair, slot, found, entering, rule, trail)
            drift = max(drift, reached)
    multiples = [slot.verdict.multiple for at, slot in judged.items() if not receives[at] and slot.verdict.multiple is not None]
    call = JudgedCall(
        pair=pair,
        slots=tuple(judged[at] for at, _ in measured),
        differences=argument_differences(pair),
        multiple=max(multiples, default=None),
    )
    trail.add(call, drift)
    return call


def _judge_given(slot: SlotPair, found: Measurement, rule: Rule, trail: Trail, is_start: bool) -> JudgedSlot:
    allowance = Allowance(
        units=rounding_units(coarsest(dtypes_of(slot))),
        drift=max(trail.drift, trail.gradient_apart(slot.slot), trail.parameters_apart(slot.slot), trail.block_apart(slot)),
        is_given=True,
        is_start=is_start,
        is_known_honest=values_key(slot) in trail.honest,
    )
    return JudgedSlot(slot, found, rule(slot, found, allowance))


def _judge_made(pair: Pair, slot: SlotPair, found: Measurement, entering: Entering, rule: Rule, trail: Trail) -> tuple[JudgedSlot, float]:
    """The judged slot, and how far apart it is where that is honest and not mere cancellation."""
    record, own = pair.record, size_of(slot, found, "differs")
    if record.phase == "optimizer":
        entering = entering.narrowed_to(trail.entering_optimizer(slot.slot, entering.by_path))
    scale = entering.scale(record, slot.slot, own) if own else Scale(0.0, 0.0)
    dtype = coarsest([*entering.dtypes, *dtypes_of(slot)])
    allowance = Allowance(
        units=rounding_units(dtype),
        entering=entering.apart,
        error=own.error if own else inf,
        terms=scale.terms + (dtype.tiny if dtype else 0.0),
        carried=scale.carried,
        narrowed=entering.narrowed_error(record, own, trail.operands) if own and trail.operands else 0.0,
        jump=jump_of(pair, slot.slot),
        drift=trail.drift,
        can_flip=can_flip(record),
        inputs_agree=entering.agree,
        inputs_scaled=entering.is_scaled,
    )
    judged = JudgedSlot(slot, found, rule(slot, found, allowance))
    is_honest = judged.verdict.level == "rounding" and (judged.verdict.multiple or 0.0) <= 1 and not allowance.can_flip
    return judged, _reached(own, scale, found, allowance, trail) if own and is_honest else 0.0


def _reached(own: Size, scale: Scale, found: Measurement, allowance: Allowance, trail: Trail) -> float:
    """How far honest values have come apart; statistics do not show it, so there a narrower format counts with its unit."""
    if scale.terms > 2 * own.rms:
        return 0.0
    hidden = trail.operands.eps / 2 if trail.operands and allowance.narrowed and isinstance(found, SummaryMeasurement) else 0.0
    return max(own.distance, hidden)
