# SPDX-License-Identifier: Apache-2.0
"""The sentences of findings: what differs, by how much, where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, isfinite, isinf, log10

from ulpscope._shell import as_path, command_line
from ulpscope.explain.contributions import entered
from ulpscope.explain.views import StepView
from ulpscope.model import (
    CallRecord,
    Finding,
    FindingLevel,
    JudgedCall,
    JudgedSlot,
    NotMeasured,
    Slot,
    SummaryMeasurement,
    TensorMeasurement,
    TensorRecord,
)

__all__ = [
    "against",
    "at_place",
    "call_text",
    "count",
    "difference_line",
    "differences_lines",
    "finding_at",
    "inputs_line",
    "listed",
    "number",
    "record_again",
    "replay_lines",
    "slot_text",
]


def number(value: float, digits: int = 3) -> str:
    """So many significant digits; exponents without padding."""
    if not isfinite(value):
        return "NaN" if value != value else "inf" if value > 0 else "-inf"
    text = f"{value:.{digits}g}"
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def against(subject: float, reference: float) -> str:
    """Both numbers with the digits that it takes to see two of their difference, within reason."""
    digits = _digits(subject, reference)
    return f"{number(subject, digits)} against {number(reference, digits)}"


def _digits(subject: float, reference: float) -> int:
    gap, largest = abs(subject - reference), max(abs(subject), abs(reference))
    if not gap or not isfinite(gap):
        return 3
    return min(max(floor(log10(largest)) - floor(log10(gap)) + 2, 3), 9)


def times(multiple: float) -> str:
    return f"{multiple:.0f}x" if 10 <= multiple < 1e5 else f"{number(multiple)}x"


def count(many: int, noun: str) -> str:
    return f"{many} {noun}" if many == 1 else f"{many} {noun}s"


def listed(texts: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(texts[:limit])
    return f"{shown} and {len(texts) - limit} more" if len(texts) > limit else shown


def slot_text(slot: Slot) -> str:
    """`output 0`, `parameter layers.0.weight`."""
    return str(slot).replace(".", " ", 1)


def call_text(record: CallRecord, slot: Slot | None = None) -> str:
    """`layers.1.mlp  gelu (call 1, forward, output 0)`."""
    what = [f"call {record.call.index}", record.phase + (", recomputed" if record.recompute else "")]
    if slot is not None:
        what.append(slot_text(slot))
    return f"{record.module + '  ' if record.module else ''}{record.call.short} ({', '.join(what)})"


def at_place(record: CallRecord) -> str:
    return f"step {record.step}, rank {record.rank}"


def finding_at(
    level: FindingLevel, kind: str, headline: str, call: JudgedCall, slot: JudgedSlot | None, evidence: Iterable[str], advice: str = ""
) -> Finding:
    """A finding that points at a call."""
    record = call.pair.record
    return Finding(
        level=level,
        kind=kind,
        headline=headline,
        step=record.step,
        rank=record.rank,
        phase=record.phase,
        module=record.module,
        call=str(record.call),
        slot=str(slot.pair.slot) if slot else "",
        source=record.source,
        evidence=tuple(evidence),
        next=advice,
        stack=record.stack,
        order=record.order,
    )


def difference_line(slot: JudgedSlot) -> str:
    """How far apart a slot is, against what is allowed, and where it is worst."""
    name, measurement = slot_text(slot.pair.slot), slot.measurement
    if slot.verdict.rule == "zeros":
        return f"{name}: {slot.verdict.reason}"
    if isinstance(measurement, TensorMeasurement):
        parts = [_nonfinite(measurement, slot) or f"{name} differs by {number(measurement.distance)} of its size{_against(slot)}"]
        if measurement.worst_index is not None and measurement.worst_subject is not None and measurement.worst_reference is not None:
            values = against(measurement.worst_subject, measurement.worst_reference)
            parts.append(f"worst at {list(measurement.worst_index)}: {values}")
        return "; ".join(parts)
    if isinstance(measurement, SummaryMeasurement):
        text = f"{name} differs by at least {number(measurement.distance)} of its size (only statistics were kept){_against(slot)}"
        return "; ".join([text, *_statistics(slot.pair.subject, slot.pair.reference)])
    return f"{name}: {slot.verdict.reason}"


def replay_lines(slot: JudgedSlot) -> list[str]:
    """Who errs by how much on its own inputs, as a factor where it is one, and where most."""
    side = slot.verdict.side
    found = slot.subject if side == "subject" else slot.reference if side == "reference" else None
    if side is None or found is None:
        return []
    lines = [slot.verdict.reason]
    if side == "reference":
        lines[0] += ": the subject is the more accurate one"
    if found.scale is not None and found.error and abs(found.scale) >= found.error / 2:
        lines.append(f"the {side}'s values are {number(1 + found.scale, _digits(1 + found.scale, 1.0))} times the exact ones")
    if found.num_nonfinite:
        what = "NaN or infinite where the exact result is finite, or the reverse"
        lines.append(f"{count(found.num_nonfinite, 'element')} of the {side}: {what}")
    if found.num_flipped:
        lines.append(f"{count(found.num_flipped, 'element')} of the {side} not what its inputs give, by no near tie")
    if found.worst_index is not None and found.worst_recorded is not None and found.worst_exact is not None:
        lines.append(f"worst at {list(found.worst_index)}: {against(found.worst_recorded, found.worst_exact)} in higher precision")
    return lines


def inputs_line(call: JudgedCall) -> str:
    """The state of what entered a call."""
    slots = entered(call)
    levels = {slot.verdict.level for slot in slots}
    what = "gradients that enter" if call.pair.record.phase == "backward" else "inputs"
    if not slots:
        return f"no {what} were recorded"
    if levels == {"same"}:
        is_unwritten = any(isinstance(slot.measurement, NotMeasured) for slot in slots)
        return f"{what} agree bitwise{', but for memory that nobody wrote to' if is_unwritten else ''}"
    if levels <= {"same", "rounding"}:
        largest = max((slot.verdict.multiple or 0.0 for slot in slots), default=0.0)
        return f"{what} agree within rounding ({number(largest)}x)" if largest else f"{what} agree as far as what was kept of them tells"
    if "differs" in levels:
        return f"{what} differ already"
    return f"not all {what} could be compared"


def differences_lines(call: JudgedCall, limit: int = 4) -> list[str]:
    lines = [f"{one.what}: {one.subject} against {one.reference}" for one in call.differences]
    return lines[:limit] + ([f"and {len(lines) - limit} more"] if len(lines) > limit else [])


def record_again(view: StepView, record: CallRecord) -> str:
    """The advice for a call that is to be looked at closely: the command that recorded the subject, with values kept."""
    info, path = view.subject, view.subject_path
    words = ["ulpscope", "run", "--into", as_path(f"{path.rstrip('/')}-closer") if path else "DIR", "--keep", "tensors"]
    words += ["--level", level] if (level := info.options.get("level")) in ("module", "both", "op") else []
    words += ["--steps", str(record.step)]
    words += ["--seed", str(info.seed)] if info.seed is not None else []
    words += ["--select", record.name] if record.phase in ("forward", "backward") else []
    words += info.command if info.format == "ulpscope" and info.command else ["SCRIPT"]
    return f"record its values on both sides and compare again: {command_line(*words)}"


def _against(slot: JudgedSlot) -> str:
    multiple = slot.verdict.multiple
    if not multiple or isinf(multiple) or not slot.pair.subject or slot.verdict.side is not None:
        return ""
    return f", {times(multiple)} what {slot.pair.subject.dtype} rounding explains"


def _nonfinite(measurement: TensorMeasurement, slot: JudgedSlot) -> str:
    if not measurement.num_nan_disagree and not measurement.num_inf_disagree:
        return ""
    counts = [(measurement.num_nan_disagree, "NaN"), (measurement.num_inf_disagree, "infinities")]
    places = " and ".join(f"{many} {what}" for many, what in counts if many)
    return f"{slot_text(slot.pair.slot)} has {places} where the other side has none"


def _statistics(subject: TensorRecord | None, reference: TensorRecord | None) -> list[str]:
    if subject is None or reference is None or subject.summary is None or reference.summary is None:
        return []
    pairs = [(name, getattr(subject.summary, name), getattr(reference.summary, name)) for name in ("max", "min", "mean", "rms", "num_nan")]
    texts = [(name, against(ours, theirs)) for name, ours, theirs in pairs if None not in (ours, theirs)]
    return [f"{name} {text}" for name, text in texts if len(set(text.split(" against "))) > 1][:2]
