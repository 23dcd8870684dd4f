# SPDX-License-Identifier: Apache-2.0
"""Two runs become a comparison: match, measure, judge, explain, one rank and step at a time.

Records and tensors of one step are in flight at once; what stays are the judged calls, or in a long comparison those that a finding may
speak about. A value that appears in many slots (an output is the next call's input) is measured once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

from ulpscope.errors import NothingComparableError
from ulpscope.explain import Coverage, explain
from ulpscope.judge import Trail, bands_of, judge_call, likely_format, operand_format, rules_named
from ulpscope.match import Mapping, Overlap, match_calls, match_steps, read_mapping
from ulpscope.measure import histograms, measure_slot
from ulpscope.model import (
    Bands,
    CallRecord,
    Comparison,
    DType,
    Finding,
    Frame,
    Histogram,
    JudgedCall,
    Measurement,
    OperandFormat,
    Pair,
    PairReplay,
    Run,
    SlotPair,
    SystemicPrecision,
    TensorRecord,
)
from ulpscope.store import open_run
from ulpscope.workflows.collecting import rare_collections
from ulpscope.workflows.condensing import kept_calls
from ulpscope.workflows.replaying import Replaying, ReplayMode

__all__ = ["compare_runs"]

_LARGE = 1 << 14
_MOST_THREADS = 8
_SHARE = 1000
_FORMAT_NAMES: dict[str, OperandFormat] = {"float16": "float16", "bfloat16": "bfloat16"}


@rare_collections()
def compare_runs(
    subject: Run | str | Path,
    reference: Run | str | Path,
    *,
    rules: str = "derived",
    mapping: str | Path | None = None,
    replay: ReplayMode = "needed",
    replay_seconds: float = 600.0,
    repeat: Run | str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two runs, given as paths or as open runs.

    >>> comparison = compare_runs("runs/npu", "runs/gpu")  # doctest: +SKIP
    >>> [finding.headline for finding in comparison.faults]  # doctest: +SKIP
    ['first contributed error: layers.1.mlp  gelu (call 1, forward, output 0), step 0, rank 0']

    `mapping` is a file of rules for renamed modules and calls; `progress` is told how much of the whole is done. `replay` says which
    calls are run again in a higher precision on their own inputs: what differs until the cause is found (`needed`), everything that
    differs (`all`) or nothing (`none`), for `replay_seconds` at most. `repeat` is the reference recorded once more: what differs as much
    between those two is not deterministic, and no fault.
    """
    started = time.perf_counter()
    rules_named(rules)
    names = read_mapping(mapping) if mapping is not None else None
    ours, theirs = _opened(subject), _opened(reference)
    overlap = match_steps(ours, theirs)
    pool = ThreadPoolExecutor(max_workers=min(_MOST_THREADS, _num_cores()), thread_name_prefix="ulpscope-measure")
    replaying = Replaying(ours, theirs, replay if rules == "derived" else "none", replay_seconds)
    latest: list[PairReplay | None] = []
    try:
        bands = None if repeat is None else _bands(theirs, _opened(repeat), rules, pool)
        steps = _judge_steps(ours, theirs, overlap.common, names, rules, progress or _silent, pool, replaying, latest, bands)
        judged, replays, condensed = kept_calls((call, latest.pop()) for call in steps)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    _check_common(judged, ours, theirs)
    precision = replaying.precision
    if not precision and (operands := operand_format(judged)) is not None:
        precision = (SystemicPrecision(family="matrix product", operands=_FORMAT_NAMES[likely_format(judged, operands).name]),)
        judged = _judge_again(judged, replays, rules, operands, bands)
    later = condensed.later if condensed else ()
    coverage = replace(_coverage(ours, theirs, overlap), precision=precision, replay=replaying.notes, bands=bands, later=later)
    calls, findings = explain(judged, ours.info, theirs.info, coverage, subject_path=str(ours.path))
    return Comparison(
        subject=ours.info,
        reference=theirs.info,
        subject_path=str(ours.path),
        reference_path=str(theirs.path),
        rules=rules,
        findings=tuple(_with_histograms(finding, calls, ours, theirs) for finding in findings),
        calls=calls,
        condensed=condensed,
        elapsed_s=time.perf_counter() - started,
        precision=precision,
    )


def _opened(run: Run | str | Path) -> Run:
    return open_run(run) if isinstance(run, (str, Path)) else run


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _silent(done: int, total: int) -> None:
    pass


def _judge_steps(
    subject: Run,
    reference: Run,
    parts: Sequence[tuple[int, int]],
    mapping: Mapping | None,
    rules: str,
    progress: Callable[[int, int], None],
    pool: Executor,
    replaying: Replaying,
    replays: list[PairReplay | None],
    bands: Bands | None,
) -> Iterator[JudgedCall]:
    trails: dict[int, Trail] = {}
    stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
    for at, (rank, step) in enumerate(parts):
        trail = trails.setdefault(rank, Trail(bands=bands))
        trail.begin_step(step)
        pairs = match_calls(
            _sharing_stacks(subject.records(rank, step), stacks), _sharing_stacks(reference.records(rank, step), stacks), mapping
        )
        measure = _Measuring(subject, reference, rank, step, pairs, pool)
        replaying.begin_step(rank, pairs)
        for done, pair in enumerate(pairs):
            measurements = [measure(slot) for slot in pair.slots]
            replays.append(replaying(pair, measurements))
            trail.operands = replaying.coarsest_operands(rank) or trail.operands
            judged = judge_call(pair, measurements, rules, trail, replays[-1])
            if _is_divergence(judged):
                replaying.settle(rank)
            yield judged
            progress(at * _SHARE + (done + 1) * _SHARE // len(pairs), len(parts) * _SHARE)


def _is_divergence(call: JudgedCall) -> bool:
    return call.pair.record.phase != "start" and any(slot.verdict.level == "differs" for slot in call.slots)


def _bands(reference: Run, repeat: Run, rules: str, pool: Executor) -> Bands:
    """How far the reference is from a repeat of itself, call by call."""
    common = match_steps(reference, repeat).common
    idle = Replaying(reference, repeat, "none")
    return bands_of(list(_judge_steps(reference, repeat, common, None, rules, _silent, pool, idle, [], None)))


def _judge_again(
    judged: Sequence[JudgedCall], replays: Sequence[PairReplay | None], rules: str, operands: DType, bands: Bands | None
) -> list[JudgedCall]:
    """Judge the same measurements with the yardstick of a machine that rounds the operands of matrix products."""
    trails: dict[int, Trail] = {}
    again: list[JudgedCall] = []
    for call, replay in zip(judged, replays, strict=True):
        record = call.pair.record
        trail = trails.setdefault(record.rank, Trail(operands=operands, bands=bands))
        if trail.step != record.step:
            trail.begin_step(record.step)
        again.append(judge_call(call.pair, [slot.measurement for slot in call.slots], rules, trail, replay))
    return again


def _sharing_stacks(records: Iterable[CallRecord], stacks: dict[tuple[Frame, ...], tuple[Frame, ...]]) -> Iterator[CallRecord]:
    """Equal stacks become one object: a run has as many records as calls, but only as many stacks as lines."""
    here: dict[int, tuple[tuple[Frame, ...], tuple[Frame, ...]]] = {}  # within a step most are one object already
    for record in records:
        found = here.get(id(record.stack))
        if found is None:
            found = here[id(record.stack)] = (record.stack, stacks.setdefault(record.stack, record.stack))
        yield record if found[1] is record.stack else replace(record, stack=found[1])


class _Measuring:
    """Measures the slots of one rank and step, each pair of values once, and large ones ahead of their turn on every core.

    The pass over two tensors releases the interpreter, so threads are enough; as many tensors are open at once as there are threads.
    """

    def __init__(self, subject: Run, reference: Run, rank: int, step: int, pairs: Sequence[Pair], pool: Executor) -> None:
        self._read_subject = lambda content: subject.tensor(rank, step, content)
        self._read_reference = lambda content: reference.tensor(rank, step, content)
        self._known: dict[Hashable, Measurement | Future[Measurement]] = {}
        for slot in (slot for pair in pairs for slot in pair.slots):
            key = _values(slot)
            if key is not None and key not in self._known and _is_work(slot):
                self._known[key] = pool.submit(self._measure, slot)

    def __call__(self, slot: SlotPair) -> Measurement:
        key = _values(slot)
        if key is None:
            return self._measure(slot)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._measure(slot)
        elif isinstance(known, Future):
            known = self._known[key] = known.result()
        return known

    def _measure(self, slot: SlotPair) -> Measurement:
        return measure_slot(slot, self._read_subject, self._read_reference)


def _values(slot: SlotPair) -> Hashable | None:
    """What a measurement depends on; None where nothing identifies the values."""
    key = (_value(slot.subject), _value(slot.reference))
    return None if None in key else key


def _is_work(slot: SlotPair) -> bool:
    """Whether values have to be read, and enough of them to be worth a thread."""
    ours, theirs = slot.subject, slot.reference
    if ours is None or theirs is None or ours.content is None or theirs.content is None or ours.shape != theirs.shape:
        return False
    return ours.fingerprint != theirs.fingerprint and prod(ours.shape) >= _LARGE


def _value(record: TensorRecord | None) -> Hashable | None:
    if record is None or (record.fingerprint is None and record.content is None):
        return None
    return record.fingerprint, record.content, record.dtype, record.shape


def _check_common(judged: Sequence[JudgedCall], subject: Run, reference: Run) -> None:
    calls = [call.pair for call in judged if call.pair.record.level != "state"]
    if calls and not any(pair.subject and pair.reference for pair in calls):
        ours, theirs = ([pair.record for pair in calls if getattr(pair, side) is not None] for side in ("subject", "reference"))
        raise NothingComparableError(
            f"no call is in both runs: the subject {subject.path} has {_calls_text(ours)}, the reference {reference.path} has "
            f"{_calls_text(theirs)}; record both at the same level, or map renamed calls with --mapping"
        )


def _calls_text(records: Sequence[CallRecord]) -> str:
    if not records:
        return "no calls"
    levels = ", ".join(sorted({record.level for record in records}))
    return f"{len(records)} of level {levels} such as {records[0].name}"


def _coverage(subject: Run, reference: Run, overlap: Overlap) -> Coverage:
    sides = (("subject", subject), ("reference", reference))
    ranks = sorted({rank for rank, _ in overlap.common})
    return Coverage(
        notes=overlap.notes,
        incomplete=tuple(
            f"step {step} of rank {rank} of the {side}"
            for side, run in sides
            for rank, step in overlap.common
            if not run.is_complete(rank, step)
        ),
        ledgers={side: tuple(entry for rank in ranks for entry in run.ledger(rank)) for side, run in sides},
    )


def _with_histograms(finding: Finding, calls: Sequence[JudgedCall], subject: Run, reference: Run) -> Finding:
    """The distributions of the slot that a fault points at, where both sides kept its values."""
    if finding.level != "fault" or not finding.slot:
        return finding
    slot = next((slot for call in calls if _is_at(finding, call) for slot in call.slots if str(slot.pair.slot) == finding.slot), None)
    return replace(finding, histograms=_histograms(finding, slot.pair, subject, reference)) if slot else finding


def _is_at(finding: Finding, call: JudgedCall) -> bool:
    record = call.pair.record
    return (record.rank, record.step, record.phase, record.order, str(record.call)) == (
        finding.rank,
        finding.step,
        finding.phase,
        finding.order,
        finding.call,
    )


def _histograms(finding: Finding, slot: SlotPair, subject: Run, reference: Run) -> tuple[Histogram, ...]:
    ours, theirs = slot.subject, slot.reference
    if ours is None or theirs is None or ours.content is None or theirs.content is None or finding.rank is None or finding.step is None:
        return ()
    return histograms(
        subject.tensor(finding.rank, finding.step, ours.content), reference.tensor(finding.rank, finding.step, theirs.content)
    )
