# SPDX-License-Identifier: Apache-2.0
"""Beginnings to events: what to call each, what to say of it, and which rank was first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ulpscope._shell import as_glob, as_path, command_line
from ulpscope.explain.nonfinite.origins import Beginning, StepTrace
from ulpscope.explain.nonfinite.reasons import cause_of, maker_of, remedy_of
from ulpscope.explain.wording import at_place, call_text
from ulpscope.model import DTYPES, CallRecord, FindingLevel, NonFiniteEvent, NonFiniteKind, TensorRecord
from ulpscope.numerics.nonfinite_rule import Kinds

__all__ = ["event_of", "order_events"]

_WORDS = {Kinds.NAN: "NaN", Kinds.POSINF: "+inf", Kinds.NEGINF: "-inf", Kinds.LIMIT: "the largest number of the dtype"}
_VERBS: dict[NonFiniteKind, str] = {
    "made": "made by",
    "given": "came in with",
    "received": "came from another rank into",
    "swallowed": "made and swallowed again:",
    "masked": "used as a mask:",
    "expected": "expected under loss scaling:",
}
_MOST_INPUTS = 4


def event_of(
    trace: StepTrace,
    beginning: Beginning,
    *,
    path: str = "RUN",
    command: Sequence[str] = (),
    needed: float | None = None,
    lost_since: int | None = None,
) -> NonFiniteEvent:
    """One beginning in words. `command` is what made the run, `lost_since` an earlier step that left parameters which are not finite."""
    kind, level = _kind(trace, beginning)
    maker = maker_of(beginning)
    if kind == "given" and maker:
        kind = "made"
    if lost_since is not None and kind == "given":
        level = "note"
    record, slot = beginning.record, beginning.slots[0] if beginning.slots else None
    summary = slot.summary if slot is not None else None
    entry = DTYPES.get(slot.dtype) if slot is not None else None
    cause, remedy = cause_of(beginning), remedy_of(beginning, needed)
    if lost_since is not None and kind == "given":
        cause, remedy = f"the parameters were lost in step {lost_since}", ""
    swallower = beginning.swallowed_by if kind == "swallowed" else None
    return NonFiniteEvent(
        kind=kind,
        level=level,
        rank=record.rank,
        step=record.step,
        order=record.order,
        phase=record.phase,
        module=record.module,
        call=str(record.call),
        slot=str(slot.slot) if slot is not None else "",
        dtype=slot.dtype if slot is not None else "",
        headline=_headline(kind, beginning, slot, maker),
        numel=summary.numel if summary is not None else 0,
        num_nan=summary.num_nan if summary is not None else None,
        num_posinf=summary.num_posinf if summary is not None else None,
        num_neginf=summary.num_neginf if summary is not None else None,
        cause=cause,
        remedy=_scaling_remedy(trace) if kind == "expected" else remedy,
        needed=needed,
        limit=entry.max if entry is not None and entry.is_floating else None,
        num_passed=beginning.num_passed,
        swallowed_by=call_text(swallower) if swallower is not None else "",
        reached=tuple(trace.reached),
        evidence=(*_evidence(trace, beginning, kind), *_closer(record, level, path, command)),
        source=record.source,
        stack=record.stack,
        next=_next(record, slot, path),
    )


def _kind(trace: StepTrace, beginning: Beginning) -> tuple[NonFiniteKind, FindingLevel]:
    if trace.is_expected(beginning):
        return "expected", "note"
    if trace.is_fault(beginning):
        return ("made" if beginning.kind == "soft" else beginning.kind), "fault"
    return ("masked" if beginning.kind == "soft" else "swallowed"), "note"


def _headline(kind: NonFiniteKind, beginning: Beginning, slot: TensorRecord | None, maker: str) -> str:
    record = beginning.record
    what = " and ".join(word for one, word in _WORDS.items() if one in beginning.kinds)
    if kind == "made" and maker:
        return f"{what} {maker} before {call_text(record)}, {at_place(record)}"
    return f"{what} {_VERBS[kind]} {call_text(record, slot.slot if slot is not None else None)}, {at_place(record)}"


def _scaling_remedy(trace: StepTrace) -> str:
    scale = f" from {trace.scale:g}" if trace.scale else ""
    return f"nothing: the scaler skipped the step and lowers its scale{scale}; look again if every step is skipped"


def _evidence(trace: StepTrace, beginning: Beginning, kind: NonFiniteKind) -> Iterable[str]:
    record = beginning.record
    for slot in beginning.slots[:_MOST_INPUTS]:
        yield f"{slot.slot}: {_bad(slot)}"
    if record.level == "module" and record.phase == "backward" and beginning.slots and beginning.slots[0].note:
        yield beginning.slots[0].note
    entering = [slot for slot in record.slots if record.receives(slot.slot) and slot not in beginning.slots]
    for slot in entering[:_MOST_INPUTS]:
        if slot.summary is not None or slot.note:
            yield f"{slot.slot}: {_range(slot)}"
    if record.level == "module" and record.phase == "backward" and beginning.before is not None and beginning.before.phase == "backward":
        yield f"the gradient at {call_text(beginning.before)} was finite: it was made in the backward of what lies between the two"
    if beginning.num_passed:
        yield f"passed on by {beginning.num_passed} later call{'' if beginning.num_passed == 1 else 's'}"
    if trace.reached and kind not in ("swallowed", "masked"):
        yield f"it reached the {', the '.join(trace.reached)}"
    if beginning.swallowed_by is not None and kind == "swallowed":
        yield f"swallowed by {call_text(beginning.swallowed_by)}"


def _closer(record: CallRecord, level: FindingLevel, path: str, command: Sequence[str]) -> Iterable[str]:
    """How to learn which call it was, where only modules were watched."""
    if record.level != "module" or level != "fault":
        return
    into = as_path(f"{path.rstrip('/')}-calls")
    words = ["ulpscope", "run", "--into", into, "--watch", "nonfinite", "--watch-calls", *(command or ["SCRIPT"])]
    yield f"only modules were watched; this names the call: {command_line(*words)}"


def _bad(slot: TensorRecord) -> str:
    summary = slot.summary
    if summary is None:
        return "not finite"
    counts = {"NaN": summary.num_nan, "+inf": summary.num_posinf, "-inf": summary.num_neginf}
    found = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "at the end of the dtype"
    rest = f", else {summary.min:.6g} to {summary.max:.6g}" if _has_finite_range(slot) else ""
    return f"{slot.dtype} {list(slot.shape)}, {found} of {summary.numel}{rest}"


def _has_finite_range(slot: TensorRecord) -> bool:
    summary = slot.summary
    return summary is not None and summary.min is not None and summary.max is not None and not summary.num_posinf and not summary.num_neginf


def _range(slot: TensorRecord) -> str:
    summary = slot.summary
    if summary is None or summary.min is None or summary.max is None:
        return f"{slot.dtype} {list(slot.shape)}{f', {slot.note}' if slot.note else ''}"
    zeros = f", {summary.num_zero} zero" if summary.num_zero else ""
    return f"{slot.dtype} {list(slot.shape)}, {summary.min:.6g} to {summary.max:.6g}{zeros}"


def _next(record: CallRecord, slot: TensorRecord | None, path: str) -> str:
    if record.level == "state" or slot is None:
        return ""
    if slot.content is not None:
        words = ["ulpscope", "show", as_path(path), as_glob(record.name), "--phase", record.phase, "--tensor", str(slot.slot)]
        return command_line(*words)
    if record.level == "module":
        return "watch every call, to name it within the module: NonFinite(calls=True), or --watch-calls"
    return "its values were not kept: run once more with --watch nonfinite, or with --keep tensors"


def order_events(events: Sequence[NonFiniteEvent]) -> tuple[NonFiniteEvent, ...]:
    """In order of time; what came from another rank is no fault of its own where that rank is known."""
    ordered = sorted(events, key=lambda event: (event.step, event.order, event.rank))
    makers = [event for event in ordered if event.level == "fault" and event.kind != "received"]
    return tuple(_with_carrier(event, makers) for event in ordered)


def _with_carrier(event: NonFiniteEvent, makers: list[NonFiniteEvent]) -> NonFiniteEvent:
    if event.kind != "received":
        return event
    carrier = next((maker for maker in makers if maker.rank != event.rank and maker.step == event.step), None)
    if carrier is None:
        return event
    said = f"rank {carrier.rank} contributed it: {carrier.headline}"
    return replace(event, level="note", evidence=(said, *event.evidence), cause=f"the contribution of rank {carrier.rank} carried it")
