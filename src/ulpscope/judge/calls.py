# SPDX-License-Identifier: Apache-2.0
"""One pair of calls with its measurements becomes a judged call.

What enters is judged first, by what came before; then what the call made, by what entered. A backward record is entered by its
gradients and by the values of its forward call; a result of an optimizer by the gradient, parameter and state of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ulpscope.errors import InputError
from ulpscope.judge.allowances import Allowance, Rule
from ulpscope.judge.choices import free_choice
from ulpscope.judge.conditioning import HANDING_ON, Scale, plain_name
from ulpscope.judge.derived import derived
from ulpscope.judge.differences import argument_differences
from ulpscope.judge.drawing import draws_numbers, judge_drawn
from ulpscope.judge.entering import Entering, coarsest
from ulpscope.judge.jumps import keeps_sum
from ulpscope.judge.ptdbg import ptdbg
from ulpscope.judge.replayed import judge_replayed
from ulpscope.judge.sizes import Size, distance, dtypes_of, size_of
from ulpscope.judge.thresholds import rounding_units, threshold
from ulpscope.judge.trail import Trail, values_key
from ulpscope.model import (
    CallRecord,
    JudgedCall,
    JudgedSlot,
    Measurement,
    Pair,
    PairReplay,
    SlotPair,
    SlotReplay,
    SummaryMeasurement,
    Verdict,
)

__all__ = ["RULES", "foresee_call", "judge_call", "rules_named"]

_NO_SETTINGS = ("strides of", "requires_grad of", "dtype of", "mode ")
RULES: dict[str, Rule] = {"derived": derived, "ptdbg": ptdbg}


def rules_named(name: str) -> Rule:
    """The rule set of that name."""
    if name not in RULES:
        raise InputError(f"there are no rules named {name!r}; choose one of {', '.join(RULES)}")
    return RULES[name]


def judge_call(
    pair: Pair,
    measurements: Sequence[Measurement],
    rules: str = "derived",
    trail: Trail | None = None,
    replay: PairReplay | None = None,
) -> JudgedCall:
    """Judge every slot of a pair; `trail` carries what earlier calls of this rank showed, and learns from this one.

    `replay` says what each side should have made of its own inputs; without it the distance of the two sides decides.
    """
    trail = trail if trail is not None else Trail()
    if pair.subject is None or pair.reference is None:
        trail.add_lone(pair.record, "reference" if pair.subject is None else "subject")
        return JudgedCall(pair=pair)
    call, drift = _judged(pair, measurements, rules_named(rules), trail, replay)
    trail.add(call, drift)
    return call


def foresee_call(pair: Pair, measurements: Sequence[Measurement], trail: Trail) -> JudgedCall:
    """What the derived rules would say of a call that is on both sides and was not replayed; the trail learns nothing."""
    return _judged(pair, measurements, derived, trail, None)[0]


def _judged(
    pair: Pair, measurements: Sequence[Measurement], rule: Rule, trail: Trail, replay: PairReplay | None
) -> tuple[JudgedCall, float]:
    """The judged call, and how far apart its results honestly are."""
    measured = list(enumerate(zip(pair.slots, measurements, strict=True)))
    receives = {at: pair.record.receives(slot.slot) for at, (slot, _) in measured}
    is_start = pair.record.phase == "start"
    judged = {at: _judge_given(pair.record, slot, found, rule, trail) for at, (slot, found) in measured if receives[at] or is_start}
    if pair.record.phase == "optimizer":
        judged |= _within_largest_gradient(judged, trail, pair.record)
    entering = Entering.of(pair, tuple(judged.values()), trail)
    drift = 0.0
    for at, (slot, found) in measured:
        if at not in judged:
            judged[at], reached = _judge_made(pair, slot, found, entering, rule, trail, replay)
            drift = max(drift, reached)
    multiples = [slot.verdict.multiple for at, slot in judged.items() if not receives[at] and slot.verdict.multiple is not None]
    call = JudgedCall(
        pair=pair,
        slots=tuple(_within_repeat(pair, judged[at], trail) for at, _ in measured),
        differences=argument_differences(pair),
        multiple=max(multiples, default=None),
    )
    return call, drift


def _within_largest_gradient(given: dict[int, JudgedSlot], trail: Trail, record: CallRecord) -> dict[int, JudgedSlot]:
    """Gradients whose contributions did not pair, as honest where they differ by no more than the largest gradient's rounding.

    The gradient of a key bias in attention is pure rounding, and two programs that compute it otherwise share no bit of it.
    """
    gradients = {
        at: (slot, size_of(slot.pair, slot.measurement, "differs")) for at, slot in given.items() if slot.pair.slot.role == "gradient"
    }
    largest = max((size.rms for _, size in gradients.values() if size is not None), default=0.0)
    honest = {}
    for at, (slot, size) in gradients.items():
        is_open = slot.verdict.level == "differs" and size is not None and not trail.gradient_apart(record, slot.pair.slot)
        if is_open and size is not None and size.error <= rounding_units(coarsest(dtypes_of(slot.pair))) * largest:
            honest[at] = replace(slot, verdict=Verdict("rounding", "derived", "within the rounding of the largest gradient", 1.0))
    return honest


def _within_repeat(pair: Pair, slot: JudgedSlot, trail: Trail) -> JudgedSlot:
    """The slot as honest where a repeat of the reference is as far from it, unless a side was seen to err."""
    is_open = trail.bands is not None and slot.verdict.level == "differs" and slot.verdict.side is None
    if not is_open or trail.bands is None or not trail.bands.allows(pair, slot.pair, slot.measurement):
        return slot
    return replace(slot, verdict=Verdict("rounding", "repeat", "no farther apart than a repeat of the reference", 1.0))


def _judge_given(record: CallRecord, slot: SlotPair, found: Measurement, rule: Rule, trail: Trail) -> JudgedSlot:
    allowance = Allowance(
        units=rounding_units(coarsest(dtypes_of(slot))),
        drift=max(trail.drift, trail.gradient_apart(record, slot.slot), trail.parameters_apart(slot.slot), trail.block_apart(slot)),
        is_given=True,
        is_start=record.phase == "start",
        is_known_honest=values_key(slot) in trail.honest,
    )
    return JudgedSlot(slot, found, rule(slot, found, allowance))


def _judge_made(
    pair: Pair, slot: SlotPair, found: Measurement, entering: Entering, rule: Rule, trail: Trail, replay: PairReplay | None
) -> tuple[JudgedSlot, float]:
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
        jump=entering.jump if slot.slot.role != "state" else 0.0,
        drift=trail.drift,
        can_flip=entering.can_flip,
        is_step=record.phase == "optimizer",
        inputs_agree=entering.agree,
        inputs_scaled=entering.is_scaled,
    )
    across = rule(slot, found, allowance)
    verdict = _better_verdict(pair, slot, found, allowance, across, trail, replay) if rule is derived else None
    judged = JudgedSlot(slot, found, verdict or across, *(_replays(slot, replay) if replay else ()))
    is_honest = across.level == "rounding" and (across.multiple or 0.0) <= 1 and not allowance.can_flip and judged.verdict.rule != "choice"
    return judged, _reached(own, scale, found, allowance, trail) if own and is_honest else 0.0


def _better_verdict(
    pair: Pair, slot: SlotPair, found: Measurement, allowance: Allowance, across: Verdict, trail: Trail, replay: PairReplay | None
) -> Verdict | None:
    """What says more than the distance of the two sides, if anything does."""
    if across.level in ("same", "unmatched"):
        return None
    if allowance.inputs_agree and _is_handed_on_otherwise(pair, trail):
        return Verdict("rounding", "choice", "handed on to the elements that were chosen forward, and its sum is kept")
    if replay is None or not replay.subject.slots:
        unsettled = _undetermined(pair, slot, found, allowance, across, trail)
        if unsettled is not None:
            return unsettled
    if across.level == "differs" and draws_numbers(pair.record, replay) and allowance.inputs_agree and _may_draw_otherwise(pair, trail):
        return judge_drawn(slot)
    return judge_replayed(slot, found, allowance, replay, across) if replay else None


def _is_handed_on_otherwise(pair: Pair, trail: Trail) -> bool:
    """Whether a gradient goes to what was picked forward, where the two sides picked others of the same."""
    forward = trail.forward_of(pair.record)
    if forward is None or plain_name(pair.record.call) not in HANDING_ON or not keeps_sum(pair):
        return False
    return any(slot.verdict.rule in ("choice", "fork") for slot in forward.slots)


def _undetermined(pair: Pair, slot: SlotPair, found: Measurement, allowance: Allowance, across: Verdict, trail: Trail) -> Verdict | None:
    """What nothing determines, and what is made of it, where no replay tells what each side should have made of its own inputs."""
    if across.level == "differs" and trail.carries_unwritten(pair):
        return Verdict("rounding", "unwritten", "carries memory that nobody wrote to, which differs as it may", 0.0)
    if not allowance.inputs_agree:
        return None
    if across.level == "differs" and (reason := free_choice(pair, slot, allowance)):
        return Verdict("rounding", "choice", reason)
    if _shows_choice(slot, found, allowance) and trail.carries_choice(pair) and keeps_sum(pair):
        return Verdict("rounding", "choice", "made of values that carry a free choice, so only values can tell")
    return None


def _shows_choice(slot: SlotPair, found: Measurement, allowance: Allowance) -> bool:
    """Whether a value differs by more than rounding, or is the same in another order: then no statistic has moved at all."""
    apart = distance(found)
    is_exact = not any(one.is_floating for one in dtypes_of(slot))
    is_reordered = isinstance(found, SummaryMeasurement) and found.equal is False and apart == 0
    return is_exact or is_reordered or (apart or 0.0) > allowance.units + threshold("amplification") * allowance.drift


def _may_draw_otherwise(pair: Pair, trail: Trail) -> bool:
    """Not with other arguments. A backward call does not draw again: it may differ only where its forward call drew other numbers."""
    forward = trail.forward_of(pair.record)
    if any(not one.what.startswith(_NO_SETTINGS) for one in argument_differences(pair)):
        return False
    return forward is None or any(slot.verdict.rule == "random" for slot in forward.slots)


def _replays(slot: SlotPair, replay: PairReplay) -> tuple[SlotReplay | None, SlotReplay | None]:
    return replay.subject.of(slot.slot), replay.reference.of(slot.slot)


def _reached(own: Size, scale: Scale, found: Measurement, allowance: Allowance, trail: Trail) -> float:
    """How far honest values have come apart; statistics do not show it, so there a narrower format counts with its unit."""
    if scale.terms > 2 * own.rms:
        return 0.0
    hidden = trail.operands.eps / 2 if trail.operands and allowance.narrowed and isinstance(found, SummaryMeasurement) else 0.0
    return max(own.distance, hidden)
