# SPDX-License-Identifier: Apache-2.0
"""A random call drew other numbers. Where both sides could have drawn the same, that is a cause; where they could not, what is made of it
is not compared.

Equal seeds give equal draws on devices of one kind: there other numbers come from a generator that stood otherwise, from a draw that only
one side made, or from a broken generator. Devices of two kinds draw different numbers from the same seed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ulpscope.explain.contributions import entered, made
from ulpscope.explain.flow import value_in
from ulpscope.explain.programs.settings import is_setting
from ulpscope.explain.suspects import value_of
from ulpscope.explain.views import StepView, worst
from ulpscope.explain.wording import at_place, call_text, count, difference_line, differences_lines, finding_at, inputs_line
from ulpscope.model import (
    DTYPES,
    ArgumentDifference,
    CallRecord,
    Finding,
    FingerprintMeasurement,
    JudgedCall,
    JudgedSlot,
    Side,
    SummaryMeasurement,
    TensorMeasurement,
)
from ulpscope.model.operations.randomness import draws
from ulpscope.model.step_index import UNKNOWN

__all__ = [
    "clue_generators",
    "draws_alike",
    "explain_rng",
    "generator_lines",
    "is_lone_draw",
    "is_random",
    "remark_on_draws",
    "rng_differences",
]

SEED_ADVICE = "seed both runs alike (ulpscope run --seed 1 --deterministic), and generators of your own too; then compare again"
DEVICE_ADVICE = (
    "devices of two kinds draw different numbers from the same seed, so what is made of them is not compared: switch random operations off "
    "(dropout 0), or draw on the CPU and move the numbers to the device"
)
DTYPE_ADVICE = (
    "the same seed gives other numbers in another dtype, so what is made of them is not compared: draw in one dtype on both sides and "
    "convert, or switch random operations off (dropout 0)"
)
_SIDES: tuple[Side, Side] = ("subject", "reference")
_NEAR = 2.0**-5
"""Values closer than this are the same draw in another precision: other numbers in one of a thousand elements are farther apart."""


def explain_rng(view: StepView) -> Finding | None:
    """A random call with other settings, numbers of another distribution, or other numbers where they could have been the same."""
    for call, slot in _drawn(view):
        if any(is_setting(one) for one in call.differences):
            return _set_otherwise(call, slot)
    found = view.divergence
    is_blamed = found is not None and found.how == "contributed" and found.call.pair.record.phase == "forward"
    if found is not None and is_blamed and found.slot.verdict.side is None and found.slot.verdict.rule == "random":
        return _of_another_kind(view, found.call, found.slot)
    if (cause := _first_cause(view)) is not None:
        return cause
    if found is not None and is_blamed and found.slot.verdict.side is None:
        return _drawn_in_module(view, found.call, found.slot)
    return None


def _first_cause(view: StepView) -> Finding | None:
    """Find the first draw that could have been the same on both sides and was not, if anything hangs on it.

    A draw in another dtype takes another share of its generator's stream, so no later draw on that device has to agree.
    """
    moved = {_kind(call.pair.record) for call in _draws_that_moved_generators(view)}
    for call, slot in _drawn(view):
        kind = _kind(call.pair.record)
        if _is_plain_draw(call, slot) and kind not in moved and _could_agree(view, call, slot) and _leads_on(view, call):
            return _other_numbers(view, call, slot)
        if _is_of_two_dtypes(call):
            moved.add(kind)
    return None


def remark_on_draws(views: Sequence[StepView]) -> list[Finding]:
    """Say once that calls drew other numbers of the same distribution."""
    drawn = [(view, call, slot) for view in views for call, slot in _drawn(view) if _is_plain_draw(call, slot)]
    if not drawn:
        return []
    view, call, slot = drawn[0]
    headline = f"other random numbers were drawn: {call_text(call.pair.record, slot.pair.slot)}, {at_place(call.pair.record)}"
    is_other_device = len({_kind(record) for record in _records(call)}) > 1
    advice = DEVICE_ADVICE if is_other_device else DTYPE_ADVICE if _is_of_two_dtypes(call) else SEED_ADVICE
    ways = {
        DEVICE_ADVICE: ["to compare what is made of them: dropout 0, or draw on the CPU and move the numbers to the device"],
        DTYPE_ADVICE: ["to compare what is made of them: draw in one dtype on both sides and convert, or dropout 0"],
    }
    evidence = [slot.verdict.reason, *ways.get(advice, []), *_reasons(view, call)]
    if len(drawn) > 1:
        evidence.append(f"{count(len(drawn) - 1, 'later call')} drew other numbers too")
    evidence.append("values that follow from them differ between the runs; calls are judged by their own inputs where those were kept")
    return [finding_at("note", "rng", headline, call, slot, evidence, advice)]


def rng_differences(view: StepView) -> list[ArgumentDifference]:
    """The random generators whose state differs at the start of the step; one that only one side has is no difference."""
    generators = [_generators(call) for call in view.state("state.rng")]
    both = {name for ours, theirs in generators for name in ours if name in theirs}
    return [one for call in view.state("state.rng") for one in call.differences if one.what.partition(".")[0] in both]


def generator_lines(view: StepView) -> list[str]:
    """Return what is known of why random numbers may differ: generators, since when, and seeds."""
    lines, differing = [], rng_differences(view)
    if differing:
        lines.append(f"random generators differ at the start of the step: {', '.join(one.what for one in differing)}")
    if differing and view.previous is not None and view.previous.state("state.rng") and not rng_differences(view.previous):
        since = f"they agreed at the start of step {view.previous.step}"
        why = "something re-seeded them, or drew unseen or on one side only, in between"
        moved_by = next(iter(_draws_that_moved_generators(view)), None)
        if moved_by is not None:
            why = f"{call_text(moved_by.pair.record)} drew in another dtype since, which takes another share of the stream"
        lines.append(f"{since}: {why}")
    if view.subject.seed != view.reference.seed:
        lines.append(f"seed {view.subject.seed} against {view.reference.seed}")
    return lines


def _draws_that_moved_generators(view: StepView) -> list[JudgedCall]:
    """Return the draws in two dtypes of the step in which the generators came apart; none where they never agreed."""
    before: StepView | None = view
    while before is not None and rng_differences(before):
        before = before.previous
    return [call for call in before.calls if _is_of_two_dtypes(call)] if before is not None and before is not view else []


def _is_of_two_dtypes(call: JudgedCall) -> bool:
    """Tell whether both sides drew, each in a dtype of its own."""
    return call.pair.record.phase == "forward" and is_random(call.pair.record) and _is_made_in_two_dtypes(call)


def _is_made_in_two_dtypes(call: JudgedCall) -> bool:
    sides = [(slot.pair.subject, slot.pair.reference) for slot in made(call)]
    return any(ours is not None and theirs is not None and ours.dtype != theirs.dtype for ours, theirs in sides)


def clue_generators(fault: Finding, views: Sequence[StepView]) -> list[str]:
    """What the generators tell of a batch, of parameters, or of a module that nobody looked into."""
    is_opaque = fault.call.startswith("module.") and fault.kind == "contributed"
    view = next((view for view in views if (view.step, view.rank) == (fault.step, fault.rank)), None)
    if view is None or not rng_differences(view) or not (is_opaque or fault.kind in ("batch", "parameters")):
        return []
    return [*generator_lines(view), *(["calls inside were not recorded; it may draw there"] if is_opaque else [])]


def draws_alike(view: StepView) -> bool:
    """Tell whether equal seeds give both sides equal numbers: one torch, the same devices, every call on one kind and in one dtype."""
    ours, theirs = view.subject, view.reference
    is_same_machine = sorted(ours.devices) == sorted(theirs.devices) and ours.versions.get("torch") == theirs.versions.get("torch")
    return is_same_machine and not any(_is_made_in_two_dtypes(call) or len(set(map(_kind, _records(call)))) > 1 for call in view.calls)


def is_lone_draw(call: JudgedCall) -> bool:
    """Tell whether only one side made this call, which draws."""
    return len(_records(call)) == 1 and call.pair.record.phase == "forward" and is_random(call.pair.record)


def is_random(record: CallRecord) -> bool:
    return draws(record.call.op, record.arguments)


def _records(call: JudgedCall) -> list[CallRecord]:
    return [side for side in (call.pair.subject, call.pair.reference) if side is not None]


def _could_agree(view: StepView, call: JudgedCall, slot: JudgedSlot) -> bool:
    """Whether equal seeds would have given equal numbers: on devices of one kind, with what is drawn laid out alike.

    A generator that is known to differ is a cause in any case.
    """
    kinds = [_kind(record) for record in _records(call)]
    if len(set(kinds)) > 1:
        return False
    if _is_seeded_otherwise(view, kinds[0]):
        return True
    ours, theirs = slot.pair.subject, slot.pair.reference
    if not kinds[0] or ours is None or theirs is None or not view.state("state.rng"):
        return False
    models = [sorted(one for one in info.devices if one.startswith(kinds[0])) for info in (view.subject, view.reference)]
    versions = [info.versions.get("torch") for info in (view.subject, view.reference)]
    is_same_machine = versions[0] == versions[1] and (kinds[0] == "cpu" or models[0] == models[1])
    return is_same_machine and ours.dtype == theirs.dtype and (ours.strides == theirs.strides or None in (ours.strides, theirs.strides))


def _is_seeded_otherwise(view: StepView, kind: str) -> bool:
    """Whether the generator that a device of this kind draws from stands otherwise at the start of the step."""
    name = "torch" if kind == "cpu" else kind
    return any(not name or one.what.partition(".")[0] == name for one in rng_differences(view))


def _generators(call: JudgedCall) -> tuple[dict[str, Any], dict[str, Any]]:
    sides = [side.arguments if side else None for side in (call.pair.subject, call.pair.reference)]
    subject, reference = ((one.kwargs or {}) if one else {} for one in sides)
    return subject, reference


def _leads_on(view: StepView, drawn: JudgedCall) -> bool:
    """Whether something that hangs on a draw differs in the end: weights, a batch, a gradient, a step, or a value that nothing follows.

    Values are followed through the data flow of both sides. Numbers that were overwritten before the parameters were recorded, as by a
    checkpoint that is loaded, lead to nothing.
    """
    start = view.position(drawn)
    hanging = set(_differing_values(view, start, made(drawn)))
    open_ends: dict[Hashable, bool] = dict.fromkeys(hanging, False)
    has_followers = False
    for at in range(start + 1, len(view.calls)):
        call = view.calls[at]
        record = call.pair.record
        if record.phase == "start":
            if record.call.op == "state.parameters":
                open_ends = {key: False for key in open_ends}
            if not hanging.isdisjoint(_differing_values(view, at, call.slots)):
                return True
            continue
        received = hanging.intersection(_differing_values(view, at, entered(call)))
        is_draw = is_random(record)
        has_followers = has_followers or (not is_draw and bool(made(call)))
        if record.phase == "backward" and any(not _is_alike(slot) for slot in made(call)) and received:
            return True
        if not received:
            continue
        for key in received:
            open_ends.pop(key, None)
        fresh = set(_differing_values(view, at, [slot for slot in made(call) if not _is_alike(slot)]))
        if fresh and record.phase == "optimizer":
            return True
        hanging |= fresh
        open_ends |= dict.fromkeys(fresh, not is_draw)
    return any(open_ends.values()) or not has_followers


def _differing_values(view: StepView, at: int, slots: Sequence[JudgedSlot]) -> Iterator[Hashable]:
    """Both sides' values in slots of the call at a position, where they are told and not the same."""
    for slot in slots:
        ours, theirs = (value_in(view.flow(side), at, slot, side) for side in _SIDES)
        if UNKNOWN not in (ours, theirs) and value_of(slot.pair.subject) != value_of(slot.pair.reference):
            yield ours, theirs


def _is_alike(slot: JudgedSlot) -> bool:
    """Whether a result agrees within rounding."""
    dtype = DTYPES.get(slot.pair.subject.dtype) if slot.pair.subject is not None else None
    measured = slot.measurement
    if slot.verdict.level == "same" or dtype is None:
        return slot.verdict.level == "same"
    return isinstance(measured, (TensorMeasurement, SummaryMeasurement)) and dtype.is_floating and measured.distance <= 64 * dtype.eps


def _other_numbers(view: StepView, call: JudgedCall, slot: JudgedSlot) -> Finding:
    """A draw that is the first cause, or the extra draw before it."""
    record = call.pair.record
    extra = None if rng_differences(view) and view.previous is None else _extra_draw(view, call)
    if extra is not None:
        side = "reference" if extra.pair.subject is None else "subject"
        headline = f"random numbers were drawn by the {side} only: {call_text(extra.pair.record)}, {at_place(extra.pair.record)}"
        evidence = [f"{call_text(record, slot.pair.slot)}, {at_place(record)}, drew other numbers afterwards", *_reasons(view, call)]
        advice = "make the call on both sides or on neither, or let it draw from a generator of its own"
        return finding_at("fault", "rng", headline, extra, None, evidence, advice)
    headline = f"other random numbers were drawn: {call_text(record, slot.pair.slot)}, {at_place(record)}"
    evidence = [slot.verdict.reason, *_why(view, call)]
    return finding_at("fault", "rng", headline, call, slot, evidence, SEED_ADVICE)


def _extra_draw(view: StepView, drawn: JudgedCall) -> JudgedCall | None:
    """The first draw that only one side made since the generators were last seen to agree."""
    before = []
    for call in view.calls:
        if call is drawn:
            break
        before.append(call)
    if rng_differences(view):
        previous = view.previous
        if previous is None or rng_differences(previous) or not previous.state("state.rng"):
            return None
        before = list(previous.calls)
    return next((call for call in before if is_lone_draw(call)), None)


def _why(view: StepView, call: JudgedCall) -> list[str]:
    """Why a call drew other numbers, as far as the generators tell."""
    lines = _reasons(view, call)
    if any(map(_has_own_generator, _records(call))):
        return [*lines, "it draws from a generator of its own, whose state is not recorded"]
    kind = _kind(call.pair.record)
    if not _is_seeded_otherwise(view, kind) and view.state("state.rng"):
        return [
            *lines,
            "the generators agreed at the start of the step, and no recorded call drew on one side only: something re-seeded them or drew "
            "unseen since (torch.manual_seed, a library), or the generator itself draws otherwise",
        ]
    return lines


def _has_own_generator(record: CallRecord) -> bool:
    given = (record.arguments.kwargs or {}).get("generator") if record.arguments else None
    return isinstance(given, dict) and "Generator" in str(given.get("$object", ""))


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
    return slot.verdict.level != "differs" and not any(is_setting(one) for one in call.differences)


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
    is_fault = _could_agree(view, source, worst(made(source)) or slot)
    advice = SEED_ADVICE if is_fault else DEVICE_ADVICE
    return finding_at("fault" if is_fault else "note", "rng", headline, source, None, evidence, advice)


def _is_inside(record: CallRecord, module: CallRecord) -> bool:
    is_below = not module.module or f"{record.module}.".startswith(f"{module.module}.")
    return record.phase == "forward" and is_below and record.order <= module.order


def _zeros(slot: JudgedSlot) -> list[str]:
    sides = [record.summary if record else None for record in (slot.pair.subject, slot.pair.reference)]
    shares = [side.num_zero / side.numel for side in sides if side is not None and side.num_zero is not None and side.numel]
    return [f"zeros: {shares[0]:.1%} against {shares[1]:.1%}"] if len(shares) == 2 and any(shares) else []


def _reasons(view: StepView, call: JudgedCall) -> list[str]:
    lines = generator_lines(view)
    kinds = list(dict.fromkeys(_kind(record) for record in _records(call)))
    if len(kinds) > 1:
        lines.append(f"the numbers were drawn on {' and '.join(kinds)}")
    return lines


def _kind(record: CallRecord) -> str:
    """The kind of device that a call draws on: that of its result."""
    results = [slot for slot in record.slots if not record.receives(slot.slot)] or list(record.slots)
    return results[0].device.partition(":")[0] if results else ""
