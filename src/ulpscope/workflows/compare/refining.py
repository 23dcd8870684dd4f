# SPDX-License-Identifier: Apache-2.0
"""Choose the few calls to record again with their values, where a comparison could not be sure.

Chosen are the suspect, the calls around it, the calls that made its inputs, and earlier calls that differ by an unknown amount. The
patterns name calls of both sides, so one file serves both recordings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ulpscope._shell import as_path, command_line
from ulpscope.model import (
    DTYPES,
    CallRecord,
    Comparison,
    Finding,
    JudgedCall,
    JudgedSlot,
    Phase,
    Run,
    RunInfo,
    SummaryMeasurement,
    TensorMeasurement,
)
from ulpscope.report.escaping import visible
from ulpscope.store import open_run
from ulpscope.workflows.compare.comparing import compare_runs

__all__ = ["ChosenCall", "Refinement", "pattern_of", "refine_runs"]

_AROUND = 2
_MOST_UNKNOWN = 32
_NEAR = 1 / 8
_PLAIN = re.compile(r"(?!re:|module:|range:|phase:|slot:)[A-Za-z0-9_][A-Za-z0-9_./:-]*|/[A-Za-z0-9_./-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCall:
    """A call to record again, under its names on both sides, and why."""

    names: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """The calls to record again. `patterns` is empty where nothing needs a closer look; `reason` says what was found.

    The sizes are of one side: the tensors of the chosen calls, and every tensor of the same step.
    """

    comparison: Comparison
    reason: str
    step: int | None = None
    rank: int | None = None
    phases: tuple[Phase, ...] = ()
    chosen: tuple[ChosenCall, ...] = ()
    num_left_out: int = 0
    size_bytes: int = 0
    whole_bytes: int = 0

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the lines of the selection file, without comments."""
        names = dict.fromkeys(pattern_of(name) for call in self.chosen for name in call.names)
        return (*(f"phase:{phase}" for phase in self.phases), *names)

    def text(self) -> str:
        """Return the selection file, for `--select @FILE`."""
        about = f"# step {self.step}, rank {self.rank}: {visible(self.reason)}"
        lines = [about, *(f"phase:{phase}" for phase in self.phases)]
        for call in self.chosen:
            lines += [f"# {visible(call.why)}", *dict.fromkeys(map(pattern_of, call.names))]
        return "\n".join(lines) + "\n"

    def commands(self, file: Path) -> tuple[str, str]:
        """Return the commands that record the subject and the reference again, each on its own machine."""
        compared = self.comparison
        return (
            self._command(compared.subject, compared.subject_path, file),
            self._command(compared.reference, compared.reference_path, file),
        )

    def _command(self, info: RunInfo, path: str, file: Path) -> str:
        words = ["ulpscope", "run"]
        if info.world_size > 1:
            words = ["torchrun", "--nproc-per-node", str(info.world_size), "-m", *words]
        words += ["--into", _closer(path), "--keep", "tensors", "--steps", str(self.step)]
        words += ["--level", level] if (level := info.options.get("level")) in ("module", "both", "op") else []
        words += ["--ranks", str(self.rank)] if info.world_size > 1 else []
        words += ["--seed", str(info.seed)] if info.seed is not None else []
        words += ["--deterministic"] if self._is_deterministic() else []
        words += ["--select", f"@{file}"]
        return command_line(*words, *(info.command if info.format == "ulpscope" and info.command else ["SCRIPT"]))

    def comparing_command(self) -> str:
        """Return the command that compares the two new recordings."""
        compared = self.comparison
        return command_line("ulpscope", "compare", _closer(compared.subject_path), _closer(compared.reference_path))

    def _is_deterministic(self) -> bool:
        modes = [call.pair.record.modes for call in self.comparison.calls if call.pair.record.phase == "forward"]
        return bool(modes) and all(mode is not None and mode.deterministic for mode in modes)


def _closer(path: str) -> str:
    return as_path(f"{path.rstrip('/')}-closer")


def refine_runs(
    subject: Run | str | Path,
    reference: Run | str | Path,
    *,
    mapping: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Refinement:
    """Compare two runs and choose the calls whose values would settle what their statistics or fingerprints leave open."""
    ours = open_run(subject) if isinstance(subject, (str, Path)) else subject
    comparison = compare_runs(ours, reference, mapping=mapping, progress=progress)
    suspect = next((one for one in comparison.findings if one.level == "fault" or one.kind == "bitwise"), None)
    place = _place(suspect, comparison.calls)
    if place is None:
        return Refinement(comparison=comparison, reason=_nothing_open(comparison, suspect))
    step, rank = place
    calls = [call for call in comparison.calls if (call.pair.record.step, call.pair.record.rank) == place]
    at = _position(suspect, calls)
    if at is not None and _is_settled(calls[at]):
        return Refinement(comparison=comparison, reason=f"both runs keep the values already: {suspect.headline if suspect else ''}")
    if at is not None and calls[at].pair.record.phase in ("start", "optimizer"):
        return _of_state(comparison, suspect, calls[at], calls)
    chosen = _chosen(calls, at)
    unknown = [call for call in _unknown(calls[:at]) if id(call) not in chosen]
    chosen |= {id(call): (call, _why_open(call)) for call in unknown[:_MOST_UNKNOWN]}
    picked = sorted(chosen.values(), key=lambda one: one[0].pair.record.order)
    return Refinement(
        comparison=comparison,
        reason=suspect.headline if suspect else "no fault, but calls differ by amounts that only their values would tell",
        step=step,
        rank=rank,
        phases=("forward", "backward"),
        chosen=tuple(ChosenCall(names=_names(call), why=why) for call, why in picked),
        num_left_out=max(len(unknown) - _MOST_UNKNOWN, 0),
        size_bytes=_size(_with_both_phases([call for call, _ in picked], calls)),
        whole_bytes=_size(calls),
    )


def pattern_of(name: str) -> str:
    """Return the pattern that selects exactly this `module/call`: the name itself, or an expression if it holds signs of a pattern.

    >>> pattern_of("layers.1.mlp/functional.gelu.1")
    'layers.1.mlp/functional.gelu.1'
    """
    if _PLAIN.fullmatch(name):
        return name
    return "re:" + "".join(char if char.isascii() and (char.isalnum() or char in "_/") else _escaped(char) for char in name)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _place(suspect: Finding | None, calls: Sequence[JudgedCall]) -> tuple[int, int] | None:
    """Return the step and rank to look at: the suspect's, else those of the first call that leaves something open."""
    if suspect is not None and suspect.step is not None and suspect.rank is not None:
        return suspect.step, suspect.rank
    places = [(call.pair.record.step, call.pair.record.rank) for call in _unknown(calls)] if suspect is None else []
    return min(places, default=None)


def _nothing_open(comparison: Comparison, suspect: Finding | None) -> str:
    if suspect is not None:
        return f"this fault is not about one call, so values would not tell more: {suspect.headline}"
    if comparison.verdict == "same":
        return "the runs agree bitwise"
    return "nothing diverges, and no call differs by so much that its values would tell more"


def _position(suspect: Finding | None, calls: Sequence[JudgedCall]) -> int | None:
    if suspect is None:
        return None
    wanted = (suspect.phase, suspect.order, suspect.call)
    found = (at for at, call in enumerate(calls) if (r := call.pair.record) and (r.phase, r.order, str(r.call)) == wanted)
    return next(found, None)


def _is_settled(call: JudgedCall) -> bool:
    slots = [slot for slot in call.slots if slot.verdict.level != "same"]
    return bool(slots) and all(isinstance(slot.measurement, TensorMeasurement) for slot in slots)


def _of_state(comparison: Comparison, suspect: Finding | None, call: JudgedCall, calls: Sequence[JudgedCall]) -> Refinement:
    """Choose whole phases for parameters, batches and optimizers, which have a phase of their own; no call needs to be named."""
    record = call.pair.record
    return Refinement(
        comparison=comparison,
        reason=suspect.headline if suspect else "",
        step=record.step,
        rank=record.rank,
        phases=("start", "optimizer"),
        size_bytes=_size([one for one in calls if one.pair.record.phase in ("start", "optimizer")]),
        whole_bytes=_size(calls),
    )


def _chosen(calls: Sequence[JudgedCall], at: int | None) -> dict[int, tuple[JudgedCall, str]]:
    """Choose the suspect, the calls around it and the calls that made its inputs, by identity."""
    if at is None:
        return {}
    suspect = calls[at]
    around = [call for call in _nearest(calls[at + 1 :]) + _nearest(calls[:at][::-1])]
    chosen = {id(call): (call, "next to the suspect") for call in around}
    chosen |= {id(call): (call, "made what enters the suspect") for call in _makers(suspect, calls[:at])}
    return chosen | {id(suspect): (suspect, "the suspect")}


def _nearest(calls: Iterable[JudgedCall]) -> list[JudgedCall]:
    return [call for call in calls if call.pair.record.phase in ("forward", "backward")][:_AROUND]


def _makers(suspect: JudgedCall, before: Sequence[JudgedCall]) -> list[JudgedCall]:
    entered = {slot.fingerprint for slot in suspect.pair.record.slots if suspect.pair.record.receives(slot.slot) and slot.fingerprint}
    return [call for call in before if call.pair.record.phase in ("forward", "backward") and _made(call.pair.record) & entered]


def _made(record: CallRecord) -> set[str]:
    return {slot.fingerprint for slot in record.slots if slot.fingerprint and not record.receives(slot.slot)}


def _unknown(calls: Iterable[JudgedCall]) -> list[JudgedCall]:
    """Return calls whose results differ by an amount that statistics bound from below only, or not at all; the worst first.

    They made the difference from equal bits, or it is close to the limit.
    """
    found = [call for call in calls if call.pair.record.phase in ("forward", "backward") and _why_open(call)]
    return sorted(found, key=lambda call: -(call.multiple or 0.0))


def _why_open(call: JudgedCall) -> str:
    record = call.pair.record
    given = [slot for slot in call.slots if record.receives(slot.pair.slot)]
    made = [slot for slot in call.slots if not record.receives(slot.pair.slot)]
    if call.pair.subject is None or call.pair.reference is None or not any(map(_is_guess, made)):
        return ""
    if all(slot.verdict.level == "same" for slot in given):
        return "makes a difference from equal bits"
    return "differs by no less than an eighth of what is allowed" if (call.multiple or 0.0) >= _NEAR else ""


def _is_guess(slot: JudgedSlot) -> bool:
    return slot.differs_by_unknown or (isinstance(slot.measurement, SummaryMeasurement) and not slot.measurement.equal)


def _names(call: JudgedCall) -> tuple[str, ...]:
    return tuple(dict.fromkeys(record.name for record in (call.pair.subject, call.pair.reference) if record is not None))


def _with_both_phases(chosen: Sequence[JudgedCall], calls: Sequence[JudgedCall]) -> list[JudgedCall]:
    names = {name for call in chosen for name in _names(call)}
    return [call for call in calls if call.pair.record.phase in ("forward", "backward") and names & set(_names(call))]


def _size(calls: Iterable[JudgedCall]) -> int:
    """Sum the bytes of the tensors of these calls, equal ones once."""
    sizes: dict[object, int] = {}
    for call in calls:
        for slot in call.pair.record.slots:
            key = (slot.fingerprint, slot.dtype, slot.shape) if slot.fingerprint else (id(call), slot.slot)
            sizes[key] = prod(slot.shape) * (DTYPES[slot.dtype].size_bytes if slot.dtype in DTYPES else 4)
    return sum(sizes.values())
