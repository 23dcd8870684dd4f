# SPDX-License-Identifier: Apache-2.0
"""The first call that made an error on agreeing inputs: forward by position, then backward from the last call to the first."""

from __future__ import annotations

from ulpscope._shell import as_glob, as_path, command_line
from ulpscope.explain.contributions import entered, is_beyond, made
from ulpscope.explain.views import Divergence, StepView
from ulpscope.explain.wording import (
    at_place,
    call_text,
    difference_line,
    differences_lines,
    finding_at,
    inputs_line,
    listed,
    record_again,
    replay_lines,
    slot_text,
)
from ulpscope.model import Finding, JudgedCall, Phase, TensorMeasurement

__all__ = ["explain_backward", "explain_forward"]


def explain_forward(view: StepView) -> Finding | None:
    return _explain(view, "forward", "contributed")


def explain_backward(view: StepView) -> Finding | None:
    return _explain(view, "backward", "backward")


def _explain(view: StepView, phase: Phase, kind: str) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "contributed" or found.call.pair.record.phase != phase:
        return None
    record = found.call.pair.record
    where = " of the reference" if found.slot.verdict.side == "reference" else ""
    headline = f"first contributed error{where}: {call_text(record, found.slot.pair.slot)}, {at_place(record)}"
    evidence = [
        *replay_lines(found.slot),
        difference_line(found.slot),
        *_nonfinite_lines(found),
        inputs_line(found.call),
        *_other_slots(found),
        *differences_lines(found.call),
    ]
    return finding_at("fault", kind, headline, found.call, found.slot, evidence, _advice(view, found))


def _nonfinite_lines(found: Divergence) -> list[str]:
    measurement = found.slot.measurement
    if isinstance(measurement, TensorMeasurement) and not (measurement.num_nan_disagree or measurement.num_inf_disagree):
        return []
    ours = found.slot.pair.subject
    if ours is None or ours.summary is None or not ours.summary.num_nonfinite or not _has_finite_inputs(found.call):
        return []
    return [f"{ours.summary.num_nonfinite} NaN or infinite elements are made here: everything that enters the subject's call is finite"]


def _has_finite_inputs(call: JudgedCall) -> bool:
    records = [slot.pair.subject for slot in entered(call)]
    return all(record is not None and record.summary is not None and record.summary.num_nonfinite == 0 for record in records)


def _other_slots(found: Divergence) -> list[str]:
    others = [slot_text(slot.pair.slot) for slot in made(found.call) if is_beyond(slot) and slot is not found.slot]
    return [f"so do {listed(others)}"] if others else []


def _advice(view: StepView, found: Divergence) -> str:
    record = found.call.pair.record
    if isinstance(found.slot.measurement, TensorMeasurement):
        shown = command_line("ulpscope", "show", as_path(view.subject_path or "RUN"), as_glob(record.name))
        return f"run {record.call.short} alone on these inputs on both sides; both runs keep its tensors ({shown})"
    return record_again(view, record)
