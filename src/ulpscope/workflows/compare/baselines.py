# SPDX-License-Identifier: Apache-2.0
"""Compare with a baseline in a repository in the place of a reference run.

A baseline is an envelope, and beside a subject it is a Run: each of its statistics is the value within the envelope that is nearest to the
subject's. A value inside the envelope therefore does not differ, and the rest is matched, measured, judged and explained as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ulpscope.errors import InputError
from ulpscope.match import match_calls
from ulpscope.model import Arguments, CallRecord, LedgerEntry, Pair, Run, RunInfo, Slot, Summary, TensorData, TensorRecord
from ulpscope.report.replacing import replacing
from ulpscope.store import open_run
from ulpscope.store.envelope import Envelope, EnvelopeCall, read_envelope, rounded, write_envelope

__all__ = ["BaselineChange", "BaselineRun", "update_baseline"]

_NAMES = tuple(one.name for one in fields(Summary) if one.name != "numel")


class BaselineRun:
    """The envelope in `path` as the reference of one subject; implements Run. It holds no tensors."""

    def __init__(self, path: Path, subject: Run) -> None:
        self._path, self._subject, self._envelope = path, subject, read_envelope(path)
        self._parts = _parts(self._envelope)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def info(self) -> RunInfo:
        found = self._envelope
        return RunInfo(format="baseline", versions=found.versions, devices=found.devices, seed=found.seed, options={"runs": found.num_runs})

    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self._parts}))

    def steps(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(step for own, step in self._parts if own == rank))

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        calls = self._parts[rank, step]
        by_record = {id(call.record): call for call in calls}
        for pair in match_calls(self._subject.records(rank, step), (call.record for call in calls)):
            if pair.reference is not None:
                yield _nearest(by_record[id(pair.reference)], pair)

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        raise InputError(f"the baseline '{self._path}' keeps statistics and no tensors")

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        return ()

    def is_complete(self, rank: int, step: int) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineChange:
    """Counts of an update: calls, and slots whose range grew."""

    num_runs: int
    num_calls: int
    num_added: int = 0
    num_removed: int = 0
    num_widened: int = 0

    @property
    def is_new(self) -> bool:
        return self.num_runs == 1

    @property
    def is_none(self) -> bool:
        return not (self.is_new or self.num_added or self.num_removed or self.num_widened)


def update_baseline(subject: Run | str | Path, path: Path) -> BaselineChange:
    """Write the envelope of a run, or widen the existing one so that the run fits into it.

    Calls and shapes follow the newest run: calls that it does not have are removed, new ones are added. A run that fits already leaves the
    file alone.
    """
    run = open_run(subject) if isinstance(subject, (str, Path)) else subject
    old = read_envelope(path) if path.exists() else None
    parts = _parts(old) if old else {}
    calls: list[EnvelopeCall] = []
    added = widened = 0
    for rank in run.ranks():
        for step in run.steps(rank):
            known = {id(call.record): call for call in parts.get((rank, step), ())}
            for pair in match_calls(run.records(rank, step), (call.record for call in known.values())):
                if pair.subject is None:
                    continue
                before = known[id(pair.reference)] if pair.reference is not None else None
                call, num_widened = _widened(pair, before)
                calls.append(call)
                added, widened = added + (before is None), widened + num_widened
    if not calls:
        raise InputError(f"'{run.path}' holds no calls, so there is nothing to write into the baseline '{path}'; record a run with some")
    removed = len(old.calls) - (len(calls) - added) if old else 0
    num_runs = old.num_runs + 1 if old else 1
    if old is None or added or removed or widened:
        seed = run.info.seed if old is None or old.seed == run.info.seed else None
        made_by = {"versions": run.info.versions, "devices": run.info.devices, "seed": seed}
        with replacing(path) as temporary:
            write_envelope(Envelope(num_runs=num_runs, calls=tuple(calls), **made_by), temporary)  # type: ignore[arg-type]
    return BaselineChange(num_runs=num_runs, num_calls=len(calls), num_added=added if old else 0, num_removed=removed, num_widened=widened)


def _parts(envelope: Envelope) -> dict[tuple[int, int], list[EnvelopeCall]]:
    """Group the calls by rank and step."""
    parts: dict[tuple[int, int], list[EnvelopeCall]] = {}
    for call in envelope.calls:
        parts.setdefault((call.record.rank, call.record.step), []).append(call)
    return parts


def _nearest(call: EnvelopeCall, pair: Pair) -> CallRecord:
    """Return the baseline's record with every statistic as near to the subject's as the envelope allows."""
    highest = {tensor.slot: high for tensor, high in zip(call.record.slots, call.highest, strict=True)}
    ours = {slot.reference.slot: slot.subject for slot in pair.slots if slot.reference is not None and slot.subject is not None}
    slots = [replace(one, summary=_clamped(one.summary, highest[one.slot], ours.get(one.slot))) for one in call.record.slots]
    return replace(call.record, slots=tuple(slots))


def _clamped(low: Summary | None, high: Summary | None, subject: TensorRecord | None) -> Summary | None:
    if low is None or high is None or subject is None or subject.summary is None:
        return low
    values = {name: _nearest_to(getattr(subject.summary, name), getattr(low, name), getattr(high, name)) for name in _NAMES}
    return Summary(low.numel, **values)  # type: ignore[arg-type]


def _nearest_to(value: float | None, low: float | None, high: float | None) -> float | None:
    if value is None or low is None or high is None:
        return low
    return min(max(value, low), high)


def _widened(pair: Pair, before: EnvelopeCall | None) -> tuple[EnvelopeCall, int]:
    """Widen the envelope of a call so that it holds the subject's; return it, and how many slots had to grow."""
    assert pair.subject is not None
    record = replace(pair.subject, slots=tuple(map(rounded, pair.subject.slots)))
    if before is None:
        return _bare(record, record.slots, [slot.summary for slot in record.slots]), 0
    highest = {tensor.slot: high for tensor, high in zip(before.record.slots, before.highest, strict=True)}
    partners = {slot.subject.slot: slot.reference for slot in pair.slots if slot.subject is not None}
    merged = [_merged(slot, partners.get(slot.slot), highest) for slot in record.slots]
    call = _bare(record, tuple(low for low, _, _ in merged), [high for _, high, _ in merged])
    kept = replace(call.record, arguments=_in_common(before.record, call.record))
    return EnvelopeCall(kept, call.highest), sum(grew for _, _, grew in merged)


def _bare(record: CallRecord, slots: tuple[TensorRecord, ...], highest: list[Summary | None]) -> EnvelopeCall:
    """Drop the fields that name a place or a machine: values, strides, devices, stacks."""
    kept = tuple(
        TensorRecord(slot=one.slot, dtype=one.dtype, shape=one.shape, summary=one.summary, fingerprint=one.fingerprint, note=one.note)
        for one in slots
    )
    return EnvelopeCall(replace(record, slots=kept, stack=(), parent=""), tuple(highest))


def _merged(
    ours: TensorRecord, theirs: TensorRecord | None, highest: Mapping[Slot, Summary | None]
) -> tuple[TensorRecord, Summary | None, bool]:
    if theirs is None or (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
        return ours, ours.summary, False
    fingerprint = ours.fingerprint if ours.fingerprint == theirs.fingerprint else None
    low, high = _spanned(ours.summary, theirs.summary, min), _spanned(ours.summary, highest[theirs.slot], max)
    grew = (fingerprint, low, high) != (theirs.fingerprint, theirs.summary, highest[theirs.slot])
    return replace(ours, summary=low, fingerprint=fingerprint, note=theirs.note or ours.note), high, grew


def _spanned(one: Summary | None, other: Summary | None, pick: Callable[[float, float], float]) -> Summary | None:
    if one is None or other is None:
        return None
    ends = {name: _picked(getattr(one, name), getattr(other, name), pick) for name in _NAMES}
    return Summary(other.numel, **ends)  # type: ignore[arg-type]


def _picked(one: float | None, other: float | None, pick: Callable[[float, float], float]) -> float | None:
    return None if one is None or other is None else pick(one, other)


def _in_common(before: CallRecord, now: CallRecord) -> Arguments | None:
    """Return the newest arguments; of random generators only those that are the same in every run."""
    if now.call.op != "state.rng" or before.arguments is None or now.arguments is None:
        return now.arguments
    old = before.arguments.kwargs or {}
    return Arguments(kwargs={name: value for name, value in (now.arguments.kwargs or {}).items() if old.get(name) == value})
