# SPDX-License-Identifier: Apache-2.0
"""The two runs were given different batches: nothing that follows can be blamed on a call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ulpscope.explain.contributions import entered, made
from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import StepView, worst
from ulpscope.explain.wording import difference_line, finding_at, slot_text
from ulpscope.model import DTYPES, Finding, JudgedCall, JudgedSlot, Side, SummaryMeasurement, TensorMeasurement

__all__ = ["clue_batch", "explain_batch"]

ADVICE = "give both runs the same data: fix the seed and the order of the loader (ulpscope run --seed 1 --deterministic)"
_NEAR = 2.0**-5
_MOST_ROUNDING = 0.25
"""No dtype's rounding moves a tensor by more than this of its size; statistics of two draws are much closer than the draws."""


def explain_batch(view: StepView) -> Finding | None:
    """A note where a step has the same batches in another order and the optimizer is given the same gradients.

    What is taken for a batch is given to an outermost module; where one side calls other modules there, batches do not pair.
    """
    batches = view.state("state.batch")
    if any(call.contribution == "unmatched" for call in batches):
        return None
    for call in batches:
        slot = worst([one for one in call.slots if not _is_computed(view, call, one)])
        if slot is not None and view.leads_to_difference:
            return _reordered(view, call, slot) if _is_reordered(view) else _finding(view, call, slot, difference_line(slot))
        drawn = next((slot for slot in call.slots if _is_drawn_otherwise(view, slot)), None)
        if drawn is not None:
            return _finding(view, call, drawn, "it is drawn at random, with other numbers on the two sides")
    return None


def _is_computed(view: StepView, batch: JudgedCall, slot: JudgedSlot) -> bool:
    """Whether recorded calls made this value from something: then they are asked, not the data.

    One that is called otherwise may have picked other data; it counts where it was given what an earlier call made.
    """
    value = value_of(slot.pair.subject)
    made_before: set[Hashable] = set()
    for call in view.calls:
        if value is None or call.pair.record.order >= batch.pair.record.order:
            break
        results = {value_of(one.pair.subject) for one in made(call)}
        given = {value_of(one.pair.subject) for one in entered(call)}
        if value in results and given and (not call.differences or not made_before.isdisjoint(given - {None})):
            return True
        if given:
            made_before |= results
    return any(_is_made_alone(view, batch, slot, side) for side in ("subject", "reference"))


def _is_made_alone(view: StepView, batch: JudgedCall, slot: JudgedSlot, side: Side) -> bool:
    """Whether a call that only one side has made this value after a batch had come in, between modules that are called otherwise."""
    record, value = getattr(batch.pair, side), value_of(getattr(slot.pair, side))
    first = min(getattr(one.pair, side).order for one in view.state("state.batch"))
    if value is None or record is None:
        return False
    lone = (call.pair for call in view.calls if call.contribution == "unmatched")
    records = (one for pair in lone if (one := getattr(pair, side)) is not None and first < one.order < record.order)
    return any(value == value_of(made) for one in records for made in one.slots if not one.receives(made.slot))


def _finding(view: StepView, call: JudgedCall, slot: JudgedSlot, line: str) -> Finding:
    headline = f"the batches differ: {slot_text(slot.pair.slot)}, step {view.step}, rank {view.rank}"
    return finding_at("fault", "batch", headline, call, slot, [line], ADVICE)


def _reordered(view: StepView, call: JudgedCall, slot: JudgedSlot) -> Finding:
    headline = f"the same batches in another order: step {view.step}, rank {view.rank}"
    evidence = ["the gradients that enter the optimizer agree", "calls on one batch are not compared with those on another"]
    return finding_at("note", "batch", headline, call, slot, evidence, ADVICE)


def _is_reordered(view: StepView) -> bool:
    batches = view.state("state.batch")
    ours, theirs = (sorted(map(str, _batch_values(batches, side))) for side in ("subject", "reference"))
    slots = [slot for call in view.calls if call.pair.record.phase == "optimizer" for slot in call.slots]
    gradients = [slot for slot in slots if slot.pair.slot.role == "gradient"]
    return len(batches) > 1 and bool(ours) and ours == theirs and bool(gradients) and all(_is_near(slot) for slot in gradients)


def _batch_values(batches: Sequence[JudgedCall], side: str) -> list[Hashable]:
    slots = [getattr(slot.pair, side) for call in batches for slot in call.slots]
    return [value for slot in slots if (value := value_of(slot)) is not None]


def _is_near(slot: JudgedSlot) -> bool:
    measured = slot.measurement
    is_close = isinstance(measured, (TensorMeasurement, SummaryMeasurement)) and measured.distance <= _NEAR
    return slot.verdict.level in ("same", "rounding") or is_close


def _is_drawn_otherwise(view: StepView, slot: JudgedSlot) -> bool:
    """A batch that the program draws itself may pass for another honest draw; it is another batch all the same."""
    if slot.verdict.level not in ("rounding", "unmeasured") or not any(_is_drawn(call) for call in view.calls):
        return False
    dtype = DTYPES.get(slot.pair.subject.dtype) if slot.pair.subject is not None else None
    if dtype is not None and not dtype.is_floating:
        return value_of(slot.pair.subject) != value_of(slot.pair.reference) and value_of(slot.pair.reference) is not None
    measured = slot.measurement
    is_far = isinstance(measured, TensorMeasurement) and measured.distance > _MOST_ROUNDING
    return is_far or (isinstance(measured, SummaryMeasurement) and measured.distance > _MOST_ROUNDING / 32)


def _is_drawn(call: JudgedCall) -> bool:
    """Whether a call made other random numbers out of nothing, as data are made."""
    is_given_nothing = not any(call.pair.record.receives(slot.pair.slot) for slot in call.slots)
    return is_given_nothing and any(slot.verdict.rule == "random" for slot in call.slots)


def clue_batch(fault: Finding, views: Sequence[StepView]) -> list[str]:
    """Where else the subject's batch is found: another step or rank of the reference, or every rank of the subject."""
    if fault.kind != "batch" or fault.step is None:
        return []
    batches = {(view.step, view.rank): slot for view in views if (slot := _batch(view)) is not None}
    here = batches.get((fault.step, fault.rank or 0))
    ours = value_of(here.pair.subject) if here is not None else None
    if ours is None:
        return []
    elsewhere = next((at for at, slot in batches.items() if value_of(slot.pair.reference) == ours and at != (fault.step, fault.rank)), None)
    lines = [f"the subject's batch is the reference's of step {elsewhere[0]}, rank {elsewhere[1]}"] if elsewhere is not None else []
    same = [slot for (step, _), slot in batches.items() if step == fault.step]
    if len(same) > 1 and _num_values(same, "subject") == 1 and _num_values(same, "reference") == len(same):
        lines.append(f"all {len(same)} ranks of the subject were given the same batch; in the reference each has its own")
    return lines


def _batch(view: StepView) -> JudgedSlot | None:
    """The first tensor of the first batch of a step that can be told from others."""
    return next((slot for call in view.state("state.batch") for slot in call.slots if value_of(slot.pair.subject) is not None), None)


def _num_values(slots: Sequence[JudgedSlot], side: str) -> int:
    values: set[Hashable] = {value_of(getattr(slot.pair, side)) for slot in slots}
    return len(values)
