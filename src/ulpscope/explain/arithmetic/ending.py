# SPDX-License-Identifier: Apache-2.0
"""Find buffers and random generators that differ at the end of a step.

A buffer is a result of the step. Where it differs by more than calls before it explain, and nothing else in the step is to blame, it is a
fault of its own: running statistics with another momentum, a cache that is filled otherwise, a counter that is not raised.
A generator that agrees at the start of a step and not at its end is a result too: one side drew more, and every later draw will differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ulpscope.explain.contributions import is_beyond
from ulpscope.explain.programs.draws import draws_alike, is_lone_draw
from ulpscope.explain.views import StepView, worst
from ulpscope.explain.wording import at_place, call_text, count, difference_line, differences_lines, finding_at, listed, slot_text
from ulpscope.model import DTYPES, Finding, JudgedCall, JudgedSlot, TensorMeasurement, Undefined

__all__ = ["explain_end", "explain_generators", "remark_on_end", "with_ends"]

_UNITS = 128.0
"""How many rounding units of what enters its module a buffer may be off: the mean of many values is often nearly zero."""


_ADVICE = "draw alike on both sides, or from a generator of its own (torch.Generator) where only one side has to draw"
_AGREED = "they agree at its start: in this step one side drew more numbers than the other, or was seeded again"
_UNSEEN = "no recorded call drew on one side only: a library drew unseen, or something seeded them again"


def explain_end(view: StepView) -> Finding | None:
    """Buffers that differ at the end of a step in which no call is to blame."""
    if view.divergence is not None:
        return None
    for call in view.ends:
        own = [slot for slot in call.slots if _is_own(view, slot)]
        slot = worst(own)
        if slot is not None:
            return _finding(view, call, slot, own)
    return None


def explain_generators(view: StepView) -> Finding | None:
    """Find random generators that came apart in a step in which equal seeds give both sides equal numbers."""
    names = _parted_generators(view)
    if not names or view.divergence is not None or not draws_alike(view):
        return None
    lone = {"subject" if call.pair.reference is None else "reference": call for call in reversed(view.calls) if is_lone_draw(call)}
    if len(lone) == 2:  # both compute something in a way of their own
        return None
    side, call = next(iter(lone.items()), ("", view.ends[0]))
    why = f"only the {side} calls {call_text(call.pair.record)}, {at_place(call.pair.record)}" if lone else _UNSEEN
    evidence = [_AGREED, why, "every later draw from them will differ"]
    return finding_at("fault", "rng", _generators_headline(view, names), call, None, evidence, _ADVICE)


def remark_on_end(views: Sequence[StepView]) -> list[Finding]:
    """Say once that random generators agree at the start of a step and not at its end."""
    view = next((view for view in views if _parted_generators(view)), None)
    if view is None:
        return []
    headline = _generators_headline(view, _parted_generators(view))
    return [Finding(level="note", kind="rng", headline=headline, step=view.step, rank=view.rank, evidence=(_AGREED,))]


def _parted_generators(view: StepView) -> list[str]:
    before = {one.what for call in view.state("state.rng") for one in call.differences}
    return [one.what for call in view.ends for one in call.differences if one.what not in before and _is_on_both(call, one.what)]


def _generators_headline(view: StepView, names: Sequence[str]) -> str:
    return f"random generators differ at the end of step {view.step}, rank {view.rank}: {', '.join(names)}"


def _is_on_both(call: JudgedCall, generator: str) -> bool:
    """Whether both sides have such a generator: a device has its own, which the other machine cannot have."""
    sides = (call.pair.subject, call.pair.reference)
    return all(side is not None and side.arguments is not None and generator in (side.arguments.kwargs or {}) for side in sides)


def with_ends(view: StepView) -> list[JudgedCall]:
    """What was recorded at the end of a step, with its contribution: its own where it is a fault, else what calls before it made."""
    return [_with_contribution(view, call) for call in view.ends]


def _with_contribution(view: StepView, call: JudgedCall) -> JudgedCall:
    if call.pair.subject is None or call.pair.reference is None:
        return replace(call, contribution="unmatched")
    if call.level != "differs":
        return replace(call, contribution="clean")
    is_own = view.divergence is None and any(_is_own(view, slot) for slot in call.slots)
    return replace(call, contribution="contributed" if is_own else "inherited")


def _is_own(view: StepView, slot: JudgedSlot) -> bool:
    """Whether a buffer differs although it agreed before and all that entered its module did."""
    if not is_beyond(slot) or slot.pair.slot.role != "buffer":
        return False
    path = slot.pair.slot.path
    starts = (one for call in view.state("state.parameters") for one in call.slots if one.pair.slot.path == path)
    if any(one.verdict.level not in ("same", "rounding") for one in starts):
        return False
    module = ".".join(map(str, path[:-1]))
    near = [call for call in view.calls if call.pair.record.phase == "forward" and _is_near(call.pair.record.module, module)]
    if any(call.level == "differs" for call in near):
        return False
    return _error(slot) > _UNITS * _unit(slot) * max((_largest(call) for call in near), default=0.0)


def _is_near(module: str, owner: str) -> bool:
    """Whether calls of a module may write to a buffer of another: they are the same, or one is inside the other."""
    return module == owner or not owner or module.startswith(f"{owner}.")


def _largest(call: JudgedCall) -> float:
    """The largest size of what enters a call."""
    sizes = [
        side.summary.rms
        for slot in call.slots
        if call.pair.record.receives(slot.pair.slot)
        for side in (slot.pair.subject, slot.pair.reference)
        if side is not None and side.summary is not None and side.summary.rms is not None
    ]
    return max(sizes, default=0.0)


def _unit(slot: JudgedSlot) -> float:
    known = [DTYPES[side.dtype] for side in (slot.pair.subject, slot.pair.reference) if side is not None and side.dtype in DTYPES]
    return max((dtype.eps / 2 for dtype in known if dtype.is_floating), default=0.0)


def _error(slot: JudgedSlot) -> float:
    """How far apart the two sides are, at least."""
    found = slot.measurement
    if isinstance(found, TensorMeasurement) and not isinstance(found.rms_error, Undefined):
        return found.rms_error
    sides = [side.summary for side in (slot.pair.subject, slot.pair.reference) if side is not None and side.summary is not None]
    if len(sides) < 2:
        return float("inf")
    pairs = ((getattr(sides[0], name), getattr(sides[1], name)) for name in ("min", "max", "mean", "rms"))
    return max((abs(ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None), default=float("inf"))


def _finding(view: StepView, call: JudgedCall, slot: JudgedSlot, own: list[JudgedSlot]) -> Finding:
    module = ".".join(map(str, slot.pair.slot.path[:-1]))
    headline = f"buffers differ at the end of a step: {slot_text(slot.pair.slot)}, step {view.step}, rank {view.rank}"
    names = [slot_text(one.pair.slot) for one in own]
    evidence = [
        difference_line(slot),
        f"it agrees at the start of the step, and so does what enters {f'module {module}' if module else 'the model'}",
        *_left_alone(view, slot),
        f"{count(len(own), 'buffer')} of this kind: {listed(names)}",
        *_settings(view, module),
    ]
    what = f"{module or 'the model'} updates {slot.pair.slot.path[-1]}"
    advice = f"compare how {what} on both sides: its momentum, its mode, and code that writes to it"
    return replace(finding_at("fault", "parameters", headline, call, slot, evidence, advice), module=module)


def _left_alone(view: StepView, slot: JudgedSlot) -> list[str]:
    """Which side's buffer is at the end what it was at the start."""
    starts = [one.pair for call in view.state("state.parameters") for one in call.slots if one.pair.slot == slot.pair.slot]
    sides = (("subject", slot.pair.subject, starts[0].subject), ("reference", slot.pair.reference, starts[0].reference)) if starts else ()
    return [
        f"the {side} leaves it as it was"
        for side, end, start in sides
        if end is not None and start is not None and end.fingerprint and end.fingerprint == start.fingerprint
    ]


def _settings(view: StepView, module: str) -> list[str]:
    return [line for call in view.calls if call.differences and call.pair.record.module == module for line in differences_lines(call)][:4]
