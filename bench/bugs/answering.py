# SPDX-License-Identifier: Apache-2.0
"""Ask every tool about every case: ours, the baselines on the same comparison, and the peer on its own recordings."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from bench.bugs.baselines import BASELINES
from bench.bugs.case import Case, all_cases
from bench.bugs.recording import SIDES, record_pair
from bench.bugs.scoring import Blame, Score, score

if TYPE_CHECKING:
    from ulpscope.model import Comparison

__all__ = ["KEEPS", "Answer", "answer_all", "answer_case"]

KEEPS = ("tensors", "statistics")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of one tool to one case."""

    case: str
    tool: str
    score: Score | None
    record_s: float = 0.0
    compare_s: float = 0.0
    num_bytes: int = 0
    problem: str = ""
    evidence: list[str] = field(default_factory=list)


def answer_all(cases: Sequence[Case], keeps: Sequence[str], peer: str | None, jobs: int = 1, runs: Path | None = None) -> Iterator[Answer]:
    """Yield every tool's answer to every case, `jobs` cases at a time; the peer comes last, and resumes if `runs` are kept."""
    yield from _answers_of_ours(cases, keeps, jobs, runs)
    if peer:
        with tempfile.TemporaryDirectory() as scratch:
            yield from _answers_of_peer(cases, peer, (runs or Path(scratch)) / "peer", keeps, jobs)


def _answers_of_ours(cases: Sequence[Case], keeps: Sequence[str], jobs: int, runs: Path | None) -> Iterator[Answer]:
    work = partial(answer_case, keeps=tuple(keeps), runs=runs)
    if jobs == 1:
        for case in cases:
            yield from work(case.name)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)) as pool:
        for at, answers in enumerate(pool.map(work, [case.name for case in cases])):
            if sys.stderr.isatty():
                print(f"\r{at + 1}/{len(cases)}", end="\r", file=sys.stderr)
            yield from answers


def _end_with(parent: int) -> None:
    """Let this worker end when the command is killed, instead of going on alone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer_case(name: str, keeps: Sequence[str], runs: Path | None) -> list[Answer]:
    """Record one case, and ask ulpscope and the baselines."""
    [case] = all_cases(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = runs / name if runs else Path(scratch)
        try:
            seconds = record_pair(case, folder, keeps)
        except Exception:
            return [Answer(case=name, tool=f"ulpscope, {keep}", score=None, problem=traceback.format_exc(limit=-4)) for keep in keeps]
        return [one for keep in keeps for one in _answers_of_ulpscope(case, folder / keep, keep, seconds[keep])]


def _answers_of_ulpscope(case: Case, folder: Path, keep: str, record_s: float) -> list[Answer]:
    from ulpscope import compare_runs

    begin = time.perf_counter()
    try:
        comparison = compare_runs(*(folder / side for side in SIDES))
    except Exception:
        return [Answer(case=case.name, tool=f"ulpscope, {keep}", score=None, problem=traceback.format_exc(limit=-4))]
    ours = Answer(
        case=case.name,
        tool=f"ulpscope, {keep}",
        score=score(case, map(Blame.of_finding, comparison.findings), is_unknown=comparison.verdict == "unknown"),
        record_s=record_s,
        compare_s=time.perf_counter() - begin,
        num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        evidence=[f"{finding.level} {finding.kind}: {finding.headline}" for finding in comparison.findings] + _gaps(comparison),
    )
    if keep != "tensors":
        return [ours]
    return [ours, *(Answer(case=case.name, tool=name, score=score(case, rule(comparison))) for name, rule in BASELINES.items())]


def _gaps(comparison: Comparison) -> list[str]:
    gaps = comparison.coverage.gaps
    return [f"gap {gap.kind}: {gap.many} {gap.why}, first {', '.join(gap.places)}" for gap in gaps]


def _answers_of_peer(cases: Sequence[Case], python: str, folder: Path, keeps: Sequence[str], jobs: int) -> Iterator[Answer]:
    from bench.bugs.peer import ask_peer

    begin = time.perf_counter()
    found = ask_peer(cases, python, folder, keeps, jobs)
    seconds = (time.perf_counter() - begin) / len(cases) / len(keeps)
    for case in cases:
        for keep, answer in found[case.name].items():
            if isinstance(answer, str):
                yield Answer(case=case.name, tool=f"peer, {keep}", score=None, problem=answer)
            else:
                yield Answer(case=case.name, tool=f"peer, {keep}", score=score(case, answer), compare_s=seconds)
