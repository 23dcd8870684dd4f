# SPDX-License-Identifier: Apache-2.0
"""Settings that differ where values alone do not tell: those of an optimizer, and of a call that exceeds what it may and is excused.

A learning rate or a weight decay acts on a parameter by a known amount. A call that magnifies rounding is excused only if it was
called alike on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ulpscope.explain.contributions import made
from ulpscope.explain.programs.arguments import is_telling
from ulpscope.explain.views import StepView
from ulpscope.explain.wording import (
    at_place,
    call_text,
    difference_line,
    differences_lines,
    finding_at,
    inputs_line,
    listed,
    number,
    slot_text,
)
from ulpscope.model import DTYPES, ArgumentDifference, CallRecord, Finding, JudgedCall, JudgedSlot, TensorRecord

__all__ = ["explain_optimizer_settings", "explain_unexcused", "is_setting"]

_PRECISION = ("dtype of", "mode autocast", "mode grad", "mode inference", "mode deterministic")
_UNITS = 128.0
_NORMALISING = ("adam", "rmsprop", "rprop", "adagrad", "adadelta", "adafactor", "lion", "lamb", "sign", "muon")


def is_setting(difference: ArgumentDifference) -> bool:
    """Whether a difference changes what is computed; layout, bookkeeping and the precision it is computed in do not."""
    return is_telling(difference) and not difference.is_of_dtypes and not difference.what.startswith((*_PRECISION, "shape of"))


def explain_unexcused(view: StepView) -> Finding | None:
    """The first call that exceeds its allowance, is taken to magnify its inputs, and was called otherwise."""
    end = view.divergence.call if view.divergence is not None else None
    for call in view.calls:
        if call is end:
            break
        slot = next((slot for slot in made(call) if slot.verdict.rule == "amplified" and slot.subject is None), None)
        if slot is not None and call.pair.record.phase == "forward" and any(map(is_setting, call.differences)):
            record = call.pair.record
            headline = f"arguments differ: {call_text(record, slot.pair.slot)}, {at_place(record)}"
            evidence = [*differences_lines(call), difference_line(slot), inputs_line(call)]
            return finding_at("fault", "arguments", headline, call, slot, evidence, "call it alike on both sides and compare again")
    return None


def explain_optimizer_settings(view: StepView) -> Finding | None:
    """A learning rate or weight decay that moves a parameter by more than rounding; asked where nothing else diverges."""
    if view.divergence is not None:
        return None
    for call in view.calls:
        subject, reference = call.pair.subject, call.pair.reference
        if call.pair.record.phase != "optimizer" or subject is None or reference is None:
            continue
        moved = [(slot, text) for slot, text in _moved(call, subject, reference) if slot.verdict.level != "same"]
        if moved:
            return _finding(call, moved)
    return None


def _finding(call: JudgedCall, moved: list[tuple[JudgedSlot, str]]) -> Finding:
    slot, text = moved[0]
    record = call.pair.record
    headline = f"optimizer settings differ: {record.call.short} (call {record.call.index}, {slot_text(slot.pair.slot)}), {at_place(record)}"
    names = [slot_text(one.pair.slot).partition(" ")[2] for one, _ in moved]
    evidence = [f"{text} for {listed(names)}", *differences_lines(call), "the step that they make differs by more than rounding explains"]
    return finding_at("fault", "optimizer", headline, call, slot, evidence, "use the same settings on both sides")


def _moved(call: JudgedCall, subject: CallRecord, reference: CallRecord) -> Iterator[tuple[JudgedSlot, str]]:
    """Parameters that other settings move by more than rounding, and which settings."""
    ours, theirs = _by_parameter(subject), _by_parameter(reference)
    gradients = {slot.pair.slot.path: slot.pair.subject for slot in call.slots if slot.pair.slot.role == "gradient"}
    is_normalising = any(word in subject.call.op.lower() for word in _NORMALISING)
    for slot in call.slots:
        name = slot_text(slot.pair.slot).partition(" ")[2]
        parameter = slot.pair.subject
        if slot.pair.slot.role != "mutated" or name not in ours or name not in theirs or parameter is None:
            continue
        left, right = ours[name], theirs[name]
        size, gradient = _rms(parameter), 1.0 if is_normalising else _rms(gradients.get(slot.pair.slot.path))
        effects = {
            "lr": abs(left["lr"] - right["lr"]) * gradient,
            "weight_decay": max(left["lr"], right["lr"]) * abs(left["weight_decay"] - right["weight_decay"]) * size,
        }
        setting = max(effects, key=lambda one: effects[one])
        if effects[setting] > _UNITS * _unit(parameter) * size and effects[setting] > 0:
            yield slot, f"{setting}: {number(left[setting])} against {number(right[setting])}"


def _by_parameter(record: CallRecord) -> dict[str, dict[str, float]]:
    groups = (record.arguments.kwargs or {}).get("groups") if record.arguments else None
    found: dict[str, dict[str, float]] = {}
    for group in groups if isinstance(groups, list) else ():
        settings = _numbers(group) if isinstance(group, Mapping) else None
        names = group.get("params") if settings is not None else None
        found |= {str(name): settings for name in names} if settings is not None and isinstance(names, list) else {}
    return found


def _numbers(group: Mapping[str, Any]) -> dict[str, float] | None:
    values = {name: group.get(name, 0.0) for name in ("lr", "weight_decay")}
    is_plain = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values.values())
    return {name: float(value) for name, value in values.items()} if is_plain else None


def _rms(record: TensorRecord | None) -> float:
    rms = record.summary.rms if record is not None and record.summary is not None else None
    return rms if rms is not None else 0.0


def _unit(record: TensorRecord) -> float:
    dtype = DTYPES.get(record.dtype)
    return dtype.eps / 2 if dtype is not None else 0.0
