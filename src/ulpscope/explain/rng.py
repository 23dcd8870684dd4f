# SPDX-License-Identifier: Apache-2.0
"""A random operation drew other numbers: the seed, the generator or the device differs, not the arithmetic."""

from __future__ import annotations

from ulpscope.explain.views import StepView
from ulpscope.explain.wording import at_place, call_text, difference_line, finding_at, inputs_line
from ulpscope.model import ArgumentDifference, CallRecord, Finding

__all__ = ["explain_rng", "is_random", "rng_differences"]

ADVICE = (
    "fix the seed on both sides (ulpscope run --seed 1 --deterministic), or switch random operations off (dropout 0); "
    "devices draw different numbers from the same seed"
)
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_", "poisson", "rrelu", "gumbel")


def explain_rng(view: StepView) -> Finding | None:
    found = view.divergence
    if found is None or found.how != "contributed" or not is_random(found.call.pair.record) or found.call.differences:
        return None
    differing = rng_differences(view)
    devices = [_device(side) for side in (found.call.pair.subject, found.call.pair.reference) if side is not None]
    is_known_same = bool(view.state("state.rng")) and not differing and len(set(devices)) == 1
    if is_known_same:
        return None
    record = found.call.pair.record
    headline = f"random numbers differ: {call_text(record, found.slot.pair.slot)}, {at_place(record)}"
    evidence = [difference_line(found.slot), inputs_line(found.call), *_reasons(view, differing, devices)]
    return finding_at("fault", "rng", headline, found.call, found.slot, evidence, ADVICE)


def rng_differences(view: StepView) -> list[ArgumentDifference]:
    """The random generators whose state differs at the start of the step."""
    return [one for call in view.state("state.rng") for one in call.differences]


def is_random(record: CallRecord) -> bool:
    name = record.call.op.rpartition(".")[2].lower()
    return any(word in name for word in _RANDOM)


def _reasons(view: StepView, differing: list[ArgumentDifference], devices: list[str]) -> list[str]:
    lines = []
    if differing:
        lines.append(f"random generators differ at the start of the step: {', '.join(one.what for one in differing)}")
    if view.subject.seed != view.reference.seed:
        lines.append(f"seed {view.subject.seed} against {view.reference.seed}")
    if len(set(devices)) > 1:
        lines.append(f"the numbers were drawn on {' and '.join(devices)}")
    return lines


def _device(record: CallRecord) -> str:
    return record.slots[0].device.partition(":")[0] if record.slots else ""
