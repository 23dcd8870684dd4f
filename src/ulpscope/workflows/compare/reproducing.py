# SPDX-License-Identifier: Apache-2.0
"""Write the first fault that points at a call into a folder: a script that runs without ulpscope, its inputs, and both sides' results.

Inputs are shrunk along each dimension of the result where the call treats its slices apart. That is checked and not assumed: the call on
some slices has to give those slices of the exact result. The smallest number is kept on which the recorded result still errs beyond every
honest kernel and, where this machine's own kernel has the fault, on which it still has it. Where slices are summed (a gradient of a
weight), a recorded result cannot be cut; then only a fault that this machine has is shrunk, by running it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save

from ulpscope.errors import InputError, UlpscopeError
from ulpscope.judge import multiple_of, replay_limits
from ulpscope.model import CallRecord, Comparison, Finding, JudgedCall, OperandFormat, Run, Slot, SlotReplay, SystemicPrecision, TensorData
from ulpscope.model.step_index import StepIndex
from ulpscope.replay import NotReplayable, Program, Yardstick, backward_program, forward_program, is_random, recorded_results
from ulpscope.replay.calls.arguments import data_of
from ulpscope.replay.formulas.fused import formula_of
from ulpscope.report.comparison.repro import ReproCall, ReproYardstick, file_stem, readme_text, script_text
from ulpscope.report.replacing import replacing
from ulpscope.store import open_run

__all__ = ["with_repro"]

Tensors: TypeAlias = Mapping[Slot, torch.Tensor]
Places: TypeAlias = tuple[tuple[Slot, int], ...]

_MOST_WHOLE_BYTES = 64_000_000
_MOST_PLACES = 6
_ALIKE = 1e-9
_SIDES = ("subject", "reference")


def with_repro(
    comparison: Comparison, folder: Path, *, subject: Run | None = None, reference: Run | None = None, is_asked_for: bool = True
) -> Comparison:
    """Add the path of a repro to the first fault that can have one; if none can and it was asked for, add the reason.

    The runs are opened by the paths of the comparison where they are not given.
    """
    reason = "no fault points at a call"
    for at, finding in enumerate(comparison.findings):
        call = _culprit(finding, comparison.calls)
        if call is None:
            continue
        try:
            runs = (subject or open_run(comparison.subject_path), reference or _opened(comparison.reference_path))
            return _replaced(comparison, at, repro=str(_write(finding, call, runs, folder, comparison.precision)))
        except Exception as error:  # an error in a user's operation must not cost the report
            reason = str(error).partition("\n")[0] or type(error).__name__
    faults = [at for at, finding in enumerate(comparison.findings) if finding.level == "fault"]
    if not is_asked_for or not faults:
        return comparison
    return _replaced(comparison, faults[0], evidence=(*comparison.findings[faults[0]].evidence, f"no repro: {reason}"))


def _opened(path: str) -> Run | None:
    """Open a run; return None for a baseline, which has no values to show."""
    return open_run(path) if Path(path).is_dir() else None


def _replaced(comparison: Comparison, at: int, **changes: Any) -> Comparison:
    findings = list(comparison.findings)
    findings[at] = replace(findings[at], **changes)
    return replace(comparison, findings=tuple(findings))


def _culprit(finding: Finding, calls: Sequence[JudgedCall]) -> JudgedCall | None:
    if finding.level != "fault" or finding.phase not in ("forward", "backward"):
        return None
    wanted = (finding.rank, finding.step, finding.phase, finding.order, finding.call)
    found = (call for call in calls if (r := call.pair.record) and (r.rank, r.step, r.phase, r.order, str(r.call)) == wanted)
    return next(found, None)


@dataclass(frozen=True)
class _Case:
    """One side of the call, whole or shrunk: its records (forward and its own), its inputs and its recorded results."""

    call: CallRecord
    record: CallRecord
    program: Program
    recorded: Tensors
    operands: OperandFormat | None = None

    @property
    def inputs(self) -> Tensors:
        return self.program.inputs

    def restricted(self, places: Places, rows: Sequence[int], dims: Mapping[Slot, int]) -> _Case:
        """Keep only these slices of some inputs, and of each result along its dimension; drop a result without one."""
        at = torch.tensor(rows)
        inputs = dict(self.inputs)
        for slot, dim in places:
            inputs[slot] = inputs[slot].index_select(dim, at)
        kept = {slot: value.index_select(dims[slot], at) for slot, value in self.recorded.items() if slot in dims}
        call, record = _cut(self.call, inputs), _cut(self.record, inputs)
        contents = {str(slot): value for slot, value in inputs.items()}
        program = _program(call, record, lambda content: data_of(contents[content]))
        return replace(self, call=call, record=record, program=program, recorded=kept)

    @cached_property
    def yardstick(self) -> Yardstick:
        return Yardstick(self.program, operands=self.operands)

    @cached_property
    def measured(self) -> dict[Slot, SlotReplay]:
        """Measure the recorded results against the exact ones on these inputs."""
        return self.against_exact(self.recorded)

    def against_exact(self, results: Tensors) -> dict[Slot, SlotReplay]:
        return {found.slot: found for found in self.yardstick.measure(results)} if results else {}

    def exact(self) -> dict[Slot, torch.Tensor]:
        return self.yardstick.exact()

    @cached_property
    def computed(self) -> dict[Slot, torch.Tensor]:
        """Run this machine's own kernel."""
        return self.program(self.inputs)


def _cut(record: CallRecord, inputs: Tensors) -> CallRecord:
    """Return the record of the same call on other inputs: with their shapes, and their slots as contents.

    A gradient has the shape of its input.
    """
    slots = []
    for one in record.slots:
        given = Slot("gradient", one.slot.path) if record.phase == "backward" and one.slot.role == "input" else one.slot
        if given in inputs:
            one = replace(one, shape=tuple(inputs[given].shape), content=str(given))
        elif record.phase == "backward" and (like := inputs.get(Slot("input", one.slot.path))) is not None:
            one = replace(one, shape=tuple(like.shape))
        slots.append(one)
    return replace(record, slots=tuple(slots))


def _write(finding: Finding, call: JudgedCall, runs: tuple[Run, Run | None], folder: Path, precision: Sequence[SystemicPrecision]) -> Path:
    """Write the folder for one call; raise if the call cannot be shown alone."""
    cases = _cases(call, runs, precision)
    slot = Slot.parse(finding.slot) if finding.slot else None
    blamed = "subject" if finding.kind == "arguments" and "subject" in cases else _blamed(call, cases)
    whole = {blamed: cases.pop(blamed), **cases}
    if finding.kind != "arguments" and _worst(whole[blamed].measured) <= 1:
        raise NotReplayable("on its own inputs the call errs no more than an honest kernel does")
    small, is_rerun = _shrunk(whole, slot)
    versions = {"small": small}
    if small is not whole and not is_rerun and _size(whole) <= _MOST_WHOLE_BYTES:
        versions["whole"] = whole
    repro = _described(finding, call, versions, runs)
    text = script_text(repro)
    stem = file_stem(call.pair.record.call.short, call.pair.record.call.index)
    _make(folder)
    for version, sides in versions.items():
        for side, case in sides.items():
            _save(case, folder / repro.files[version][side])
    for name, content in (
        (f"{stem}.py", text),
        ("README.txt", readme_text(finding.headline, f"{stem}.py", _rows_text(versions, is_rerun))),
    ):
        with replacing(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8", newline="\n")
    return folder / f"{stem}.py"


def _blamed(call: JudgedCall, cases: Mapping[str, _Case]) -> str:
    """Find the side that errs: by the verdict where replay gave it, else by measuring both; the subject where neither does."""
    named = next((slot.verdict.side for slot in call.slots if slot.verdict.side in cases), None)
    if named is not None or len(cases) == 1:
        return named or next(iter(cases))
    return "reference" if _worst(cases["reference"].measured) > max(1.0, _worst(cases["subject"].measured)) else "subject"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder '{folder}' for the repro cannot be made: {error.strerror}; give another with --repro DIR") from error


def _cases(call: JudgedCall, runs: tuple[Run, Run | None], precision: Sequence[SystemicPrecision]) -> dict[str, _Case]:
    """Collect the sides that can be run again; raise the reason if there is none."""
    found: dict[str, _Case] = {}
    reason: UlpscopeError = InputError("the call is not in both runs")
    for side, run, record in zip(_SIDES, runs, (call.pair.subject, call.pair.reference), strict=True):
        if run is None or record is None:
            continue
        try:
            operands = next((one.operands for one in precision if one.side in (None, side)), None)
            found[side] = replace(_case(record, run), operands=operands)
        except UlpscopeError as error:
            reason = error
    if not found:
        raise reason
    return found


def _case(record: CallRecord, run: Run) -> _Case:
    def read(content: str) -> TensorData:
        return run.tensor(record.rank, record.step, content)

    forward, earlier = _forward_of(record, run)
    if formula_of(forward.call.op) is not None:
        raise NotReplayable(f"{forward.call.short} is a vendor's operation, which only its own machine can run")
    program = _program(forward, record, read, earlier)
    if is_random(program):
        raise NotReplayable(f"{forward.call.short} draws random numbers")
    exact = Yardstick(program).exact()
    recorded = {slot: value for slot, value in recorded_results(record, read).items() if slot in exact}
    return _Case(call=forward, record=record, program=program, recorded=recorded)


def _program(forward: CallRecord, record: CallRecord, read: Callable[[str], TensorData], earlier: Sequence[CallRecord] = ()) -> Program:
    return forward_program(record, read) if record.phase == "forward" else backward_program(forward, record, read, earlier=earlier)


def _forward_of(record: CallRecord, run: Run) -> tuple[CallRecord, Sequence[CallRecord]]:
    """Find the forward call of a record, and the backward records of that call before this one."""
    if record.phase == "forward":
        return record, ()
    step = StepIndex(run.records(record.rank, record.step))
    forward = step.forward_of(record)
    if forward is None:
        raise NotReplayable("the forward call of this backward record was not recorded")
    return forward, step.earlier_backward(record)


def _worst(found: Mapping[Slot, SlotReplay]) -> float:
    return max(map(multiple_of, found.values()), default=0.0)


def _size(cases: Mapping[str, _Case]) -> int:
    return sum(value.nbytes for case in cases.values() for value in (*case.inputs.values(), *case.recorded.values()))


# ---- shrinking


def _shrunk(cases: Mapping[str, _Case], slot: Slot | None) -> tuple[Mapping[str, _Case], bool]:
    """Shrink the fault to fewer slices; tell also whether the result is only known from running it again."""
    blamed = next(iter(cases.values()))
    found = blamed.measured
    if _worst(found) <= 1:
        return cases, False
    slot = slot if slot in found and multiple_of(found[slot]) > 1 else max(found, key=lambda one: multiple_of(found[one]))
    is_here = _multiple(blamed, slot, blamed.computed) > 1
    smaller = cases
    for dim in range(blamed.recorded[slot].dim()):
        smaller = _along(smaller, slot, dim, is_here=is_here)
    if smaller is cases and is_here:
        return _rerun(cases, slot)
    return smaller, False


def _multiple(case: _Case, slot: Slot, results: Tensors) -> float:
    return _worst(case.against_exact({slot: results[slot]})) if slot in results else 0.0


def _along(cases: Mapping[str, _Case], slot: Slot, dim: int, *, is_here: bool) -> Mapping[str, _Case]:
    """Keep the fewest slices of one dimension of the result that still show the fault; all of them where none can be left out."""
    blamed = next(iter(cases.values()))
    recorded, exact = blamed.recorded[slot], blamed.exact()
    num = recorded.shape[dim]
    places = _separate(blamed, slot, dim, exact) if num > 1 else None
    if places is None:
        return cases
    order = _by_error(recorded, exact[slot], dim)
    many = 1
    while many < num:
        rows = sorted(order[:many])
        dims = _dims_like(blamed, places, rows, exact, dim)
        smaller = {side: case.restricted(places, rows, dims) for side, case in cases.items()}
        if _still_shows(next(iter(smaller.values())), slot, is_here=is_here):
            return smaller
        many *= 2
    return cases


def _still_shows(case: _Case, slot: Slot, *, is_here: bool) -> bool:
    try:
        if slot not in case.recorded or _multiple(case, slot, case.recorded) <= 1:
            return False
        return not is_here or _multiple(case, slot, case.computed) > 1
    except (UlpscopeError, RuntimeError, IndexError):
        return False


def _separate(case: _Case, slot: Slot, dim: int, exact: Tensors) -> Places | None:
    """Find the dimensions of inputs that go with one of a result: slices of them give just these slices of the result."""
    num = exact[slot].shape[dim]
    rows = [0, num - 1] if num > 2 else [num - 1]
    candidates = [(given, at) for given, value in case.inputs.items() for at, size in enumerate(value.shape) if size == num]
    for places in _subsets(candidates[:_MOST_PLACES]):
        if _gives(case, places, rows, slot, exact[slot].index_select(dim, torch.tensor(rows))):
            return places
    return None


def _subsets(places: Sequence[tuple[Slot, int]]) -> Iterator[Places]:
    """Yield subsets of the places, small ones first, each input once."""
    for many in range(1, len(places) + 1):
        for chosen in combinations(places, many):
            if len({slot for slot, _ in chosen}) == many:
                yield chosen


def _gives(case: _Case, places: Places, rows: Sequence[int], slot: Slot, expected: torch.Tensor) -> bool:
    try:
        found = case.restricted(places, rows, {}).exact().get(slot)
    except (UlpscopeError, RuntimeError, IndexError):
        return False
    if found is None or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, rtol=_ALIKE, atol=_ALIKE * _rms(expected), equal_nan=True)


def _dims_like(case: _Case, places: Places, rows: Sequence[int], exact: Tensors, dim: int) -> dict[Slot, int]:
    """Find the results that are cut along with the blamed one: the same slices of inputs give these slices of them."""
    small = case.restricted(places, rows, {}).exact()
    dims: dict[Slot, int] = {}
    for slot, value in case.recorded.items():
        for at in dict.fromkeys([dim, *range(value.dim())]):
            if at < value.dim() and max(rows) < value.shape[at]:
                expected = exact[slot].index_select(at, torch.tensor(rows))
                if small[slot].shape == expected.shape and torch.allclose(
                    small[slot].to(torch.float64), expected.to(torch.float64), rtol=_ALIKE, atol=_ALIKE * _rms(expected), equal_nan=True
                ):
                    dims[slot] = at
                    break
    return dims


def _rms(value: torch.Tensor) -> float:
    finite = torch.nan_to_num(value.abs().to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.square().mean().sqrt()) if value.numel() else 0.0


def _by_error(recorded: torch.Tensor, exact: torch.Tensor, dim: int) -> list[int]:
    """Sort the slices of a result, the one with the largest error first."""
    error = (recorded.to(exact.dtype) - exact).abs() if exact.is_floating_point() or exact.is_complex() else (recorded != exact).double()
    misplaced = torch.isfinite(recorded) != torch.isfinite(exact.to(recorded.dtype))
    error = torch.nan_to_num(error.double(), nan=0.0, posinf=0.0, neginf=0.0).masked_fill(misplaced, torch.inf)
    worst = error.movedim(dim, 0).reshape(error.shape[dim], -1).amax(1)
    return torch.argsort(worst, descending=True, stable=True).tolist()


def _rerun(cases: Mapping[str, _Case], slot: Slot) -> tuple[Mapping[str, _Case], bool]:
    """Run this machine's kernel on the first few slices that the result sums over, and keep the fewest that show the fault."""
    side, case = next(iter(cases.items()))
    sizes = {size for value in case.inputs.values() for size in value.shape[:1] if size > 1}
    for num in sorted(sizes, reverse=True):
        places = tuple((given, 0) for given, value in case.inputs.items() if value.shape[:1] == (num,))
        many = 1
        while many < num:
            try:
                smaller = case.restricted(places, range(many), {})
                if _multiple(smaller, slot, smaller.computed) > 1:
                    return {side: smaller}, True
            except (UlpscopeError, RuntimeError, IndexError):
                break
            many *= 2
    return cases, False


# ---- writing


def _described(finding: Finding, call: JudgedCall, versions: Mapping[str, Mapping[str, _Case]], runs: tuple[Run, Run | None]) -> ReproCall:
    whole = next(iter(list(versions.values())[-1].values()))
    stem = file_stem(call.pair.record.call.short, call.pair.record.call.index)
    files = {
        version: {side: f"{stem}.{'' if version == 'small' else version + '.'}{side}.safetensors" for side in sides}
        for version, sides in versions.items()
    }
    forward = whole.call
    assert forward.arguments is not None, "a call without arguments cannot be run again"
    strides = {slot: value.stride() for slot, value in whole.inputs.items() if not value.is_contiguous()}
    modes = forward.modes
    yardsticks = {version: _yardsticks(next(iter(sides.values()))) for version, sides in versions.items()}
    dtype = next((one.dtype for one in whole.measured.values()), "float32")
    return ReproCall(
        headline=finding.headline,
        op=forward.call.op,
        arguments=forward.arguments,
        phase=finding.phase or "forward",
        files=files,
        yardsticks=yardsticks,
        limits=replay_limits(dtype),
        dtype=dtype,
        device=next((one.device for one in whole.record.slots if one.device), "cpu"),
        autocast=modes.autocast if modes else None,
        deterministic=bool(modes and modes.deterministic),
        strides=strides,
        leaves=_leaves(whole) if finding.phase == "backward" else {},
        mutated=tuple(Slot("input", one.slot.path) for one in forward.slots if one.slot.role == "mutated"),
        is_writing=_may_write(forward),
        other_arguments=_other_arguments(finding, call, runs),
        operands={side: case.operands for side, case in versions["small"].items() if case.operands},
    )


def _yardsticks(case: _Case) -> dict[Slot, ReproYardstick]:
    """Measure the error of honest kernels for each result: from the recorded one, else from what this machine computes."""
    results = case.recorded or case.computed
    found, exact = case.against_exact(results), case.exact()
    return {slot: _yardstick(one, results[slot], exact[slot]) for slot, one in found.items()}


def _yardstick(found: SlotReplay, result: torch.Tensor, exact: torch.Tensor) -> ReproYardstick:
    if not exact.is_floating_point() and not exact.is_complex():
        return ReproYardstick(spared=int((result != exact).sum()) - found.num_flipped)
    misplaced = int((torch.isfinite(result) != torch.isfinite(exact.to(result.dtype))).sum())
    is_placed = found.worst_index is not None and found.worst_recorded is not None and found.worst_exact is not None
    at = found.worst_index if is_placed and 0 < found.max_ratio < float("inf") and not exact.is_complex() else None
    error = abs((found.worst_recorded or 0.0) - (found.worst_exact or 0.0)) / found.max_ratio if at is not None else 0.0
    honest = (found.honest_error or 0.0) * _rms(exact)
    is_shown = isfinite(error) and error > 0
    return ReproYardstick(rms=honest, at=at if is_shown else None, error=error, spared=max(misplaced - found.num_nonfinite, 0))


def _leaves(case: _Case) -> dict[Slot, tuple[Slot, ...]]:
    """Find the inputs that each recorded gradient sums over: a tensor in several slots has one gradient, under the first."""
    given = {one.slot: one for one in case.call.slots if one.slot.role == "input"}
    wanted = [one.slot for one in case.record.slots if one.slot.role == "output"]
    leaves: dict[Slot, tuple[Slot, ...]] = {}
    for slot in wanted:
        first = Slot("input", slot.path)
        own = given[first]
        others = [one for one in given.values() if one.slot != first and Slot("output", one.slot.path) not in wanted and one.requires_grad]
        same = [one.slot for one in others if (one.content, one.shape, one.strides) == (own.content, own.shape, own.strides)]
        leaves[slot] = (first, *same)
    return leaves


def _may_write(record: CallRecord) -> bool:
    arguments = record.arguments
    named = (arguments.kwargs or {}) if arguments else {}
    is_positional = record.call.op.startswith("functional.") and any(value is True for value in (arguments.args if arguments else ()))
    is_named = record.call.short.endswith("_") or "out" in named or named.get("inplace") is True
    return is_named or is_positional or any(one.slot.role == "mutated" for one in record.slots)


def _other_arguments(finding: Finding, call: JudgedCall, runs: tuple[Run, Run | None]) -> Any:
    """Return the reference's arguments if they were blamed."""
    record = call.pair.reference
    if finding.kind != "arguments" or record is None or runs[1] is None:
        return None
    return _forward_of(record, runs[1])[0].arguments


def _save(case: _Case, path: Path) -> None:
    tensors = {str(slot): value for slot, value in case.inputs.items()}
    tensors |= {f"recorded.{slot}": value for slot, value in case.recorded.items()}
    with replacing(path) as temporary:
        temporary.write_bytes(save({name: value.detach().contiguous().clone() for name, value in tensors.items()}))


def _rows_text(versions: Mapping[str, Mapping[str, _Case]], is_rerun: bool) -> str:
    small = next(iter(versions["small"].values()))
    shapes = ", ".join(f"{slot} {list(value.shape)}" for slot, value in list(small.inputs.items())[:4])
    if is_rerun:
        return f"the inputs are shrunk to {shapes}, on which this machine's kernel still errs; what was recorded was left out"
    if "whole" in versions:
        return f"the inputs are shrunk to {shapes}, on which what was recorded still errs; --whole takes all of them"
    return f"the inputs are {shapes}"
