# SPDX-License-Identifier: Apache-2.0
"""Turn matched and measured steps into verdicts and findings, one step at a time, in the order in which they were recorded.

The judged calls stay in memory, or in a long comparison those that a finding may speak about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ulpscope.errors import NothingComparableError
from ulpscope.explain import UNBLAMED, Circumstances, count_opaque, explain, gaps_of
from ulpscope.judge import Trail, bands_of, foresee_call, judge_call, learn_call, likely_format, operand_format
from ulpscope.match import Overlap, match_steps
from ulpscope.measure import histograms
from ulpscope.model import (
    Bands,
    CallRecord,
    Comparison,
    CondensedSteps,
    Coverage,
    DType,
    Finding,
    Gap,
    Histogram,
    JudgedCall,
    Measurement,
    OperandFormat,
    Pair,
    PairReplay,
    Run,
    SlotPair,
    SystemicPrecision,
    joined_gaps,
)
from ulpscope.workflows.compare.ahead import Ahead
from ulpscope.workflows.compare.condensing import kept_calls
from ulpscope.workflows.compare.measuring import MeasuredStep, measured_steps
from ulpscope.workflows.compare.replaying import Replaying

__all__ = ["judge_runs", "measured_bands"]

Judged: TypeAlias = tuple[JudgedCall, PairReplay | None]
"""A call with its verdicts, and the replay that they rest on."""
_SHARE = 1000
_FORMAT_NAMES: dict[str, OperandFormat] = {"float16": "float16", "bfloat16": "bfloat16"}


def judge_runs(
    steps: Iterable[MeasuredStep],
    subject: Run,
    reference: Run,
    overlap: Overlap,
    rules: str,
    progress: Callable[[int, int], None],
    told: Callable[[JudgedCall], None],
    replaying: Replaying,
    bands: Bands | None,
    *,
    is_partial: bool = False,
) -> Comparison:
    """Judge two runs from their measured steps, and return the comparison."""
    found = _judge_steps(steps, len(overlap.common), rules, progress, replaying, bands)
    judged, replays, condensed = kept_calls(_telling(told, found))
    _check_common(judged, subject, reference)
    precision = replaying.precision
    if not precision and (operands := operand_format(judged)) is not None:
        precision = (SystemicPrecision(family="matrix product", operands=_FORMAT_NAMES[likely_format(judged, operands).name]),)
        judged = _judge_again(judged, replays, rules, operands, bands)
    later = condensed.later if condensed else ()
    coverage = replace(_coverage(judged, condensed, subject, reference, overlap), is_partial=is_partial)
    known = replace(
        _circumstances(subject, reference, overlap),
        precision=precision,
        replay=replaying.notes,
        bands=bands,
        later=later,
        gaps=coverage.gaps,
    )
    calls, findings = explain(judged, subject.info, reference.info, known, subject_path=str(subject.path))
    return Comparison(
        subject=subject.info,
        reference=reference.info,
        subject_path=str(subject.path),
        reference_path=str(reference.path),
        rules=rules,
        findings=tuple(_with_histograms(finding, calls, subject, reference) for finding in findings),
        calls=calls,
        condensed=condensed,
        precision=precision,
        coverage=_beside(findings, coverage),
    )


def _beside(findings: Sequence[Finding], coverage: Coverage) -> Coverage:
    """Drop the gaps that are consequences of a fault, where there is one."""
    if all(finding.level != "fault" for finding in findings):
        return coverage
    return replace(coverage, gaps=tuple(gap for gap in coverage.gaps if gap.why != UNBLAMED))


def _telling(told: Callable[[JudgedCall], None], calls: Iterable[Judged]) -> Iterator[Judged]:
    for call, replay in calls:
        told(call)
        yield call, replay


def measured_bands(reference: Run, repeat: Run, rules: str, ahead: Ahead) -> Bands:
    """Measure how far the reference is from a repeat of itself, call by call."""
    common = match_steps(reference, repeat).common
    idle = Replaying(reference, repeat, "none")
    steps = measured_steps(reference, repeat, common, None, ahead)
    return bands_of([call for call, _ in _judge_steps(steps, len(common), rules, _silent, idle, None)])


def _silent(done: int, total: int) -> None:
    pass


def _judge_steps(
    steps: Iterable[MeasuredStep],
    many: int,
    rules: str,
    progress: Callable[[int, int], None],
    replaying: Replaying,
    bands: Bands | None,
) -> Iterator[Judged]:
    trails: dict[int, Trail] = {}
    for at, step in enumerate(steps):
        trail = trails.setdefault(step.rank, Trail(bands=bands))
        trail.begin_step(step.step)
        replaying.begin_step(step.rank, step.subject, step.reference)
        for done, pair in enumerate(step.pairs):
            judged, replay = _judge(pair, step.measurements(pair), rules, trail, replaying)
            if _is_divergence(judged):
                replaying.settle(step.rank)
            yield judged, replay
            progress(at * _SHARE + (done + 1) * _SHARE // len(step.pairs), many * _SHARE)


def _judge(pair: Pair, measurements: Sequence[Measurement], rules: str, trail: Trail, replaying: Replaying) -> Judged:
    """Judge a pair without a replay, and once more with it where that could say something else."""
    if not replaying.could_tell(pair, measurements):
        return judge_call(pair, measurements, rules, trail), None
    foreseen = foresee_call(pair, measurements, trail)
    replay = replaying(pair, foreseen)
    if replay is None:
        return learn_call(foreseen, trail), None
    trail.operands = replaying.coarsest_operands(pair.record.rank) or trail.operands
    return judge_call(pair, measurements, rules, trail, replay), replay


def _is_divergence(call: JudgedCall) -> bool:
    return call.pair.record.phase not in ("start", "end") and any(slot.verdict.level == "differs" for slot in call.slots)


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


def _circumstances(subject: Run, reference: Run, overlap: Overlap) -> Circumstances:
    ranks = sorted({rank for rank, _ in overlap.common})
    return Circumstances(
        notes=overlap.notes,
        incomplete=tuple(f"step {step} of rank {rank} of the {side}" for side, rank, step in _cut_short(subject, reference, overlap)),
        ledgers={side: tuple(entry for rank in ranks for entry in run.ledger(rank)) for side, run in _sides(subject, reference)},
    )


def _sides(subject: Run, reference: Run) -> tuple[tuple[str, Run], tuple[str, Run]]:
    return ("subject", subject), ("reference", reference)


def _cut_short(subject: Run, reference: Run, overlap: Overlap) -> Iterator[tuple[str, int, int]]:
    """Yield side, rank and step of steps that their writer never closed, among the steps that both sides have."""
    for side, run in _sides(subject, reference):
        for rank, step in overlap.common:
            if not run.is_complete(rank, step):
                yield side, rank, step


def _coverage(judged: Sequence[JudgedCall], condensed: CondensedSteps | None, subject: Run, reference: Run, overlap: Overlap) -> Coverage:
    """Count what was compared of all that the two runs recorded."""
    parts: defaultdict[tuple[int, int], list[JudgedCall]] = defaultdict(list)
    for call in judged:
        parts[call.pair.record.step, call.pair.record.rank].append(call)
    gaps = [*overlap.gaps, *_step_gaps(subject, reference, overlap), *_file_gaps(subject, reference, overlap)]
    gaps += [gap for part in sorted(parts) for gap in gaps_of(parts[part])]
    is_one_call_at_a_time = any(run.info.options.get("level") in ("api", "op") for run in (subject, reference))
    num_opaque = sum(map(count_opaque, parts.values())) + (condensed.num_opaque if condensed else 0)
    slots = sum(len(call.slots) for call in judged) + (condensed.num_slots if condensed else 0)
    return Coverage(
        gaps=joined_gaps([*gaps, *(condensed.gaps if condensed else ())]),
        totals={**overlap.totals, "call": len(judged) + (condensed.num_calls if condensed else 0), "slot": slots},
        num_opaque=num_opaque if is_one_call_at_a_time else 0,
    )


def _step_gaps(subject: Run, reference: Run, overlap: Overlap) -> list[Gap]:
    """Return a gap for each step that was cut short: it holds less than what the program did, on one side or on both."""
    first = {step: (side, rank) for side, rank, step in reversed(list(_cut_short(subject, reference, overlap)))}
    return [
        Gap(kind="step", why=f"cut short in the {side}", places=(f"step {step} of rank {rank}",))
        for step, (side, rank) in sorted(first.items())
    ]


def _file_gaps(subject: Run, reference: Run, overlap: Overlap) -> Iterator[Gap]:
    """Yield a gap for each part of a dump that could not be read."""
    for side, run in _sides(subject, reference):
        for rank in sorted({rank for rank, _ in overlap.common}):
            for entry in run.ledger(rank):
                if entry.what.startswith("reading "):
                    place = entry.what.removeprefix("reading ")
                    yield Gap(kind="file", why=f"could not be read in the {side}: {entry.why}", many=entry.count, places=(place,))


def _with_histograms(finding: Finding, calls: Sequence[JudgedCall], subject: Run, reference: Run) -> Finding:
    """Add the distributions of the slot that a fault points at, where both sides kept its values."""
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
