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
from ulpscope.judge.allowance.allowances import Allowance, Rule
from ulpscope.judge.allowance.choices import free_choice
from ulpscope.judge.allowance.conditioning import HANDING_ON, Scale, plain_name
from ulpscope.judge.allowance.drawing import draws_numbers, judge_draw_of
from ulpscope.judge.allowance.entering import Entering, coarsest
from ulpscope.judge.allowance.jumps import keeps_sum
from ulpscope.judge.allowance.sizes import Size, distance, dtypes_of, is_equal, size_of
from ulpscope.judge.allowance.trail import Trail, values_key
from ulpscope.judge.allowance.zeros import has_other_zeros, tells_zeros_apart
from ulpscope.judge.derived import derived
from ulpscope.judge.differences import argument_differences
from ulpscope.judge.limits import with_own_limits
from ulpscope.judge.published.cosine_rule import ptdbg
from ulpscope.judge.replayed import judge_replayed
from ulpscope.judge.thresholds import rounding_units, threshold
from ulpscope.model import (
    RULE_NAMES,
    Behind,
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
from ulpscope.model.operations.unwritten import is_overwritten, is_unwritten, is_written_over

__all__ = ["RULES", "foresee_call", "judge_call", "learn_call", "rules_named"]

_NO_SETTINGS = ("strides of", "requires_grad of", "dtype of", "mode ")
RULES: dict[str, Rule] = dict(zip(RULE_NAMES, (derived, ptdbg), strict=True))


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
    is_lone = pair.subject is None or pair.reference is None
    return learn_call(JudgedCall(pair=pair) if is_lone else _judged(pair, measurements, rules_named(rules), trail, replay), trail)


def foresee_call(pair: Pair, measurements: Sequence[Measurement], trail: Trail) -> JudgedCall:
    """Judge a call that is on both sides by the derived rules, without a replay; the trail learns nothing."""
    return _judged(pair, measurements, derived, trail, None)


def learn_call(call: JudgedCall, trail: Trail) -> JudgedCall:
    """Let the trail learn from a call whose verdicts stand."""
    if call.pair.subject is None or call.pair.reference is None:
        trail.add_lone(call.pair.record, "reference" if call.pair.subject is None else "subject")
    else:
        trail.add(call)
    return call


def _judged(pair: Pair, measurements: Sequence[Measurement], rule: Rule, trail: Trail, replay: PairReplay | None) -> JudgedCall:
    measured = list(enumerate(zip(pair.slots, measurements, strict=True)))
    receives = {at: pair.record.receives(slot.slot) for at, (slot, _) in measured}
    is_start = pair.record.phase in ("start", "end")
    judged = {at: _judge_given(pair.record, slot, found, rule, trail) for at, (slot, found) in measured if receives[at] or is_start}
    if pair.record.phase == "optimizer":
        judged |= _within_largest_gradient(judged, trail, pair.record)
    if rule is derived and _tells_zeros(pair, measured, trail):
        judged |= {at: _with_other_zeros(pair.record, slot) for at, slot in judged.items() if has_other_zeros(slot.pair, slot.measurement)}
        entering = replace(Entering.of(pair, tuple(judged.values()), trail), agree=False)
    else:
        entering = Entering.of(pair, tuple(judged.values()), trail)
    behind = trail.behind_call(pair.record, judged.values())
    drift = 0.0
    for at, (slot, found) in measured:
        if at not in judged:
            made, reached = _judge_made(pair, slot, found, entering, rule, trail, replay)
            judged[at] = _placed_behind(made, behind, pair.record, entering, trail)
            drift = max(drift, reached)
    multiples = [slot.verdict.multiple for at, slot in judged.items() if not receives[at] and slot.verdict.multiple is not None]
    return JudgedCall(
        pair=pair,
        slots=tuple(_within_repeat(pair, judged[at], trail) for at, _ in measured),
        differences=argument_differences(pair),
        multiple=max(multiples, default=None),
        drift=drift,
    )


def _tells_zeros(pair: Pair, measured: Sequence[tuple[int, tuple[SlotPair, Measurement]]], trail: Trail) -> bool:
    """Whether zeros of other signs enter a call, or its forward call, that gives something else for them, and it did."""
    record = pair.record
    if record.phase not in ("forward", "backward") or not tells_zeros_apart(record):
        return False
    if all(is_equal(found) for _, (slot, found) in measured if not record.receives(slot.slot)):
        return False
    given = [(slot, found) for _, (slot, found) in measured if record.receives(slot.slot)] if record.phase == "forward" else []
    forward = trail.forward_of(record)
    given += [(slot.pair, slot.measurement) for slot in (forward.slots if forward else ())]
    return any(has_other_zeros(slot, found) for slot, found in given)


def _with_other_zeros(record: CallRecord, slot: JudgedSlot) -> JudgedSlot:
    return replace(slot, verdict=Verdict("differs", "zeros", f"zeros of other signs, which {record.call.short} tells apart"))


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
        is_open = slot.verdict.level == "differs" and size is not None and not trail.parts_of(record, slot.pair.slot).apart
        if is_open and size is not None and size.error <= rounding_units(coarsest(dtypes_of(slot.pair))) * largest:
            honest[at] = replace(slot, verdict=Verdict("rounding", "derived", "within the rounding of the largest gradient", 1.0))
    return honest


def _within_repeat(pair: Pair, slot: JudgedSlot, trail: Trail) -> JudgedSlot:
    """The slot as honest where a repeat of the reference is as far from it, unless a side was seen to err."""
    is_open = trail.bands is not None and slot.verdict.level == "differs" and slot.verdict.side is None
    if not is_open or trail.bands is None or not trail.bands.allows(pair, slot.pair, slot.measurement):
        return slot
    return replace(slot, verdict=Verdict("rounding", "repeat", "no farther apart than a repeat of the reference", 1.0), behind=None)


def _placed_behind(slot: JudgedSlot, behind: Behind | None, record: CallRecord, entering: Entering, trail: Trail) -> JudgedSlot:
    """The result with the reason why its two sides need not agree, where there is one and they do not."""
    if record.phase == "optimizer":
        behind = trail.behind_call(record, trail.entering_optimizer(slot.pair.slot, entering.by_path))
    if slot.verdict.level == "rounding" and slot.verdict.rule in ("random", "unwritten"):
        behind = "random" if slot.verdict.rule == "random" else "unwritten"
    behind = behind or trail.behind_given(record, slot.pair)
    return slot if behind is None or _agrees(slot, behind, trail) else replace(slot, behind=behind)


def _agrees(slot: JudgedSlot, behind: Behind, trail: Trail) -> bool:
    """Tell whether the two sides are as near as they would be if everything before them could be compared.

    Two draws of one seed in two dtypes agree in most elements, so what is made of draws has to be as near as what was not made of them.
    """
    if slot.verdict.level == "same":
        return True
    apart, known = distance(slot.measurement), dtypes_of(slot.pair)
    if apart is None or slot.verdict.rule == "random" or not all(one.is_floating for one in known) or _is_reordered(slot.measurement):
        return False
    dtype = coarsest(known)
    units = dtype.eps if behind == "random" and dtype is not None else rounding_units(dtype)
    return apart <= units + threshold("amplification") * trail.clean_drift


def _judge_given(record: CallRecord, slot: SlotPair, found: Measurement, rule: Rule, trail: Trail) -> JudgedSlot:
    parts = trail.parts_of(record, slot.slot)
    terms = max(parts.terms, trail.terms_of_lone(slot) if trail.lone_terms else 0.0)
    own = size_of(slot, found, "differs") if terms else None
    allowance = Allowance(
        units=rounding_units(coarsest(dtypes_of(slot))),
        error=own.error if own else inf,
        terms=terms,
        carried=parts.error,
        drift=max(trail.drift, parts.apart, trail.parameters_apart(slot.slot), trail.block_apart(slot)),
        is_given=True,
        is_start=record.phase in ("start", "end"),
        is_known_honest=values_key(slot) in trail.honest,
    )
    verdict = _written_on_one_side(record, slot) if rule is derived else None
    judged = JudgedSlot(slot, found, verdict or rule(slot, found, allowance))
    behind = trail.behind_given(record, slot)
    if behind is None and judged.verdict.level == "differs" and (behind := trail.behind_write(record, slot)) is not None:
        reason = "may hold, in a part that was written in place, what need not agree"
        return replace(judged, verdict=Verdict("rounding", "derived", reason, 1.0), behind=behind)
    return judged if behind is None or _agrees(judged, behind, trail) else replace(judged, behind=behind)


def _written_on_one_side(record: CallRecord, slot: SlotPair) -> Verdict | None:
    """The verdict where one side holds values and to the memory of the other nobody wrote, unless the call only writes over it."""
    if slot.subject is None or slot.reference is None or is_unwritten(slot.subject) == is_unwritten(slot.reference):
        return None
    if is_overwritten(record.call.op, slot.slot.path, record.arguments) or is_written_over(slot.subject) or is_written_over(slot.reference):
        return Verdict("same", "unwritten", "the call writes over it and does not read it", 0.0)
    side = "subject" if is_unwritten(slot.subject) else "reference"
    return Verdict("differs", "unwritten", f"nobody wrote to this memory on the {side}; the other side wrote to it", inf)


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
        inputs_known=entering.is_known,
        inputs_scaled=entering.is_scaled,
    )
    across = (_written_on_one_side(record, slot) if rule is derived else None) or rule(slot, found, allowance)
    verdict = _better_verdict(pair, slot, found, allowance, across, trail, replay) if rule is derived else None
    judged = JudgedSlot(slot, found, verdict or across, *(_replays(slot, replay) if replay else ()))
    is_honest = across.level == "rounding" and (across.multiple or 0.0) <= 1 and not allowance.can_flip and judged.verdict.rule != "choice"
    if not own or not is_honest or trail.carries_unwritten(pair, slot):  # what garbage is made of is no measure for anything else
        return judged, 0.0
    return judged, _reached(own, scale, found, allowance, trail)


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
    is_other = across.level == "differs" or _is_reordered(found)
    if is_other and allowance.inputs_agree and _draws(pair, trail, replay) and _may_draw_otherwise(pair, trail):
        return judge_draw_of(pair.record, slot)
    if replay is None:
        return None
    is_free = slot.slot.path[0] in pair.record.call.free_signs or _has_limits_of_its_own(pair, trail)
    return judge_replayed(slot, found, allowance, replay, across, is_free=is_free)


def _has_limits_of_its_own(pair: Pair, trail: Trail) -> bool:
    """Return true if each side was given the limit of its own dtype, as a mask: one argument, and another number in the result."""
    forward = trail.forward_of(pair.record)
    called = forward.pair if forward is not None else pair
    if called.subject is None or called.reference is None:
        return False
    return with_own_limits(called.subject, called.reference) != called.reference.arguments


def _is_handed_on_otherwise(pair: Pair, trail: Trail) -> bool:
    """Whether a gradient goes to what was picked forward, where the two sides picked others of the same."""
    forward = trail.forward_of(pair.record)
    if forward is None or plain_name(pair.record.call) not in HANDING_ON or not keeps_sum(pair):
        return False
    return any(slot.verdict.rule in ("choice", "fork") for slot in forward.slots)


def _undetermined(pair: Pair, slot: SlotPair, found: Measurement, allowance: Allowance, across: Verdict, trail: Trail) -> Verdict | None:
    """What nothing determines, and what is made of it, where no replay tells what each side should have made of its own inputs."""
    if across.level == "differs" and trail.carries_unwritten(pair, slot):
        return Verdict("rounding", "unwritten", "carries memory that nobody wrote to, which differs as it may", 0.0)
    if not (allowance.inputs_agree and allowance.inputs_known):
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
    return is_exact or _is_reordered(found) or (apart or 0.0) > allowance.units + threshold("amplification") * allowance.drift


def _is_reordered(found: Measurement) -> bool:
    """Whether every statistic is the same and the values are not: they stand in another order."""
    return isinstance(found, SummaryMeasurement) and found.equal is False and found.distance == 0


def _draws(pair: Pair, trail: Trail, replay: PairReplay | None) -> bool:
    forward = trail.forward_of(pair.record)
    return draws_numbers(pair.record, replay, forward.pair.record if forward else None)


def _may_draw_otherwise(pair: Pair, trail: Trail) -> bool:
    """Tell whether a call may draw other numbers than its partner: not with other arguments than a dtype.

    A backward call does not draw again: it may differ only where its forward call drew other numbers.
    """
    forward = trail.forward_of(pair.record)
    if any(not one.what.startswith(_NO_SETTINGS) and not one.is_of_dtypes for one in argument_differences(pair)):
        return False
    return forward is None or any(slot.verdict.rule == "random" for slot in forward.slots)


def _replays(slot: SlotPair, replay: PairReplay) -> tuple[SlotReplay | None, SlotReplay | None]:
    return replay.subject.of(slot.slot), replay.reference.of(slot.slot)


def _reached(own: Size, scale: Scale, found: Measurement, allowance: Allowance, trail: Trail) -> float:
    """How far honest values have come apart; statistics do not show it, so there a narrower format counts with its unit.

    What is small because its terms cancel may be as far apart as it is large, and so may all that is made of it; others may not.
    """
    if scale.terms > 2 * own.rms or allowance.entering > allowance.units + threshold("amplification") * trail.drift:
        return 0.0
    hidden = trail.operands.eps / 2 if trail.operands and allowance.narrowed and isinstance(found, SummaryMeasurement) else 0.0
    return max(own.distance, hidden)
