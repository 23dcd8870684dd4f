# SPDX-License-Identifier: Apache-2.0
"""A random call drew other numbers. Another valid stream is a note; other settings, or another distribution, are a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ulpscope.explain.contributions import made
from ulpscope.explain.settings import is_setting
from ulpscope.explain.views import StepView, worst
from ulpscope.explain.wording import at_place, call_text, count, difference_line, differences_lines, finding_at, inputs_line
from ulpscope.model import (
    ArgumentDifference,
    CallRecord,
    Finding,
    FingerprintMeasurement,
    JudgedCall,
    JudgedSlot,
    SummaryMeasurement,
    TensorMeasurement,
)

__all__ = ["explain_rng", "is_random", "remark_on_draws", "rng_differences"]

ADVICE = (
    "to compare values after it, fix the seed on both sides (ulpscope run --seed 1 --deterministic), or switch random operations off "
    "(dropout 0); devices draw different numbers from the same seed"
)
_NEAR = 2.0**-5
"""Values closer than this are the same draw in another precision: other numbers in one of a thousand elements are farther apart."""


def explain_rng(view: StepView) -> Finding | None:
    """A random call with other settings, or whose numbers are not of the same distribution.

    Where only a module tells that other numbers were drawn inside it, that is a note, and nothing after it is blamed.
    """
    for call, slot in _drawn(view):
        if any(is_setting(one) for one in call.differences):
            return _set_otherwise(call, slot)
    found = view.divergence
    if found is None or found.how != "contributed" or found.call.pair.record.phase != "forward" or found.slot.verdict.side is not None:
        return None
    if found.slot.verdict.rule == "random":
        return _of_another_kind(view, found.call, found.slot)
    return _drawn_in_module(view, found.call, found.slot)


def remark_on_draws(views: Sequence[StepView]) -> list[Finding]:
    """Calls that drew other numbers of the same distribution, said once."""
    drawn = [(view, call, slot) for view in views for call, slot in _drawn(view) if _is_plain_draw(call, slot)]
    if not drawn:
        return []
    view, call, slot = drawn[0]
    headline = f"other random numbers were drawn: {call_text(call.pair.record, slot.pair.slot)}, {at_place(call.pair.record)}"
    evidence = [slot.verdict.reason, *_reasons(view, call)]
    if len(drawn) > 1:
        evidence.append(f"{count(len(drawn) - 1, 'later call')} drew other numbers too")
    evidence.append("values that follow from them differ between the runs; calls are judged by their own inputs where those were kept")
    return [finding_at("note", "rng", headline, call, slot, evidence, ADVICE)]


def rng_differences(view: StepView) -> list[ArgumentDifference]:
    """The random generators whose state differs at the start of the step."""
    return [one for call in view.state("state.rng") for one in call.differences]


def is_random(record: CallRecord) -> bool:
    return record.call.sounds_random


def _drawn(view: StepView) -> Iterator[tuple[JudgedCall, JudgedSlot]]:
    """Forward calls, with their first result, that are judged as draws and drew other numbers."""
    for call in view.calls:
        if call.pair.record.phase == "forward":
            slot = next((slot for slot in made(call) if slot.verdict.rule == "random" and _is_drawn_otherwise(slot)), None)
            if slot is not None:
                yield call, slot


def _is_drawn_otherwise(slot: JudgedSlot) -> bool:
    """Other zeros, or farther apart than rounding and what enters make them: a dropout of nothing draws nothing."""
    zeros = [record.summary.num_zero for record in (slot.pair.subject, slot.pair.reference) if record is not None and record.summary]
    if len(zeros) == 2 and None not in zeros and zeros[0] != zeros[1]:
        return True
    measured = slot.measurement
    if isinstance(measured, TensorMeasurement):
        return measured.distance > _NEAR
    return isinstance(measured, FingerprintMeasurement) or (isinstance(measured, SummaryMeasurement) and measured.distance > _NEAR)


def _is_plain_draw(call: JudgedCall, slot: JudgedSlot) -> bool:
    return slot.verdict.level == "rounding" and not any(is_setting(one) for one in call.differences)


def _set_otherwise(call: JudgedCall, slot: JudgedSlot) -> Finding:
    record = call.pair.record
    headline = f"arguments differ: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [*differences_lines(call), *_zeros(slot), inputs_line(call)]
    return finding_at("fault", "arguments", headline, call, slot, evidence, "call it alike on both sides and compare again")


def _of_another_kind(view: StepView, call: JudgedCall, slot: JudgedSlot) -> Finding:
    record = call.pair.record
    headline = f"random numbers are not of one distribution: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [slot.verdict.reason, difference_line(slot), *_zeros(slot), inputs_line(call), *_reasons(view, call)]
    advice = f"look at what {record.call.short} does with its probability and scale on the subject"
    return finding_at("fault", "rng", headline, call, slot, evidence, advice)


def _drawn_in_module(view: StepView, module: JudgedCall, slot: JudgedSlot) -> Finding | None:
    """A module is not judged as a draw itself; what it draws with stands before it, or is its name."""
    record = module.pair.record
    if record.level != "module" or any(is_setting(one) for one in module.differences) or worst(made(module)) is None:
        return None
    inside = (call for call in view.calls if _is_inside(call.pair.record, record) and is_random(call.pair.record))
    source = next((call for call in inside if call.level not in ("same", "unmatched")), None)
    if source is None:
        return None
    headline = f"other random numbers were drawn: {call_text(source.pair.record)}, {at_place(record)}"
    evidence = [difference_line(slot), *_reasons(view, source)]
    if source.pair.record.level == "module":
        evidence.append("nothing after it is compared: record at level api, so that every call can be judged by its own inputs")
    return finding_at("note", "rng", headline, source, None, evidence, ADVICE)


def _is_inside(record: CallRecord, module: CallRecord) -> bool:
    is_below = not module.module or f"{record.module}.".startswith(f"{module.module}.")
    return record.phase == "forward" and is_below and record.order <= module.order


def _zeros(slot: JudgedSlot) -> list[str]:
    sides = [record.summary if record else None for record in (slot.pair.subject, slot.pair.reference)]
    shares = [side.num_zero / side.numel for side in sides if side is not None and side.num_zero is not None and side.numel]
    return [f"zeros: {shares[0]:.1%} against {shares[1]:.1%}"] if len(shares) == 2 and any(shares) else []


def _reasons(view: StepView, call: JudgedCall) -> list[str]:
    lines, differing = [], rng_differences(view)
    devices = [_device(side) for side in (call.pair.subject, call.pair.reference) if side is not None]
    if differing:
        lines.append(f"random generators differ at the start of the step: {', '.join(one.what for one in differing)}")
    if view.subject.seed != view.reference.seed:
        lines.append(f"seed {view.subject.seed} against {view.reference.seed}")
    if len(set(devices)) > 1:
        lines.append(f"the numbers were drawn on {' and '.join(devices)}")
    return lines


def _device(record: CallRecord) -> str:
    return record.slots[0].device.partition(":")[0] if record.slots else ""
