# SPDX-License-Identifier: Apache-2.0
"""Answer a question about two runs with every report asked for and an exit code: the work of `ulpscope compare`.

A report that cannot be written is refused before the long work, not after it. A renderer is imported when its report is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ulpscope.model.nouns import dataclass

if TYPE_CHECKING:
    from ulpscope.model import Comparison, Renderer
    from ulpscope.report.comparison.json_pairs import PairLines

__all__ = ["REPORTS", "Question", "answer"]

REPORTS = ("json", "html", "csv", "xlsx", "parquet", "junit")
"""What can be written, in the order in which it is."""
Progress: TypeAlias = "Callable[[int, int], None] | None"
_EXIT_CODES = {"same": 0, "rounding": 0, "diverges": 1, "unknown": 2}
_RENDERERS = {
    "html": ("html", "write_html"),
    "csv": ("table", "write_csv"),
    "xlsx": ("table", "write_xlsx"),
    "parquet": ("parquet", "write_parquet"),
    "junit": ("junit", "write_junit"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Two runs, or a run and a baseline, how to compare them, and which of `REPORTS` to write where; `-` means stdout for JSON."""

    subject: Path
    reference: Path | None = None
    reports: dict[str, Path] = field(default_factory=dict)
    github_summary: Path | None = None
    repro_dir: Path | None = None
    rules: str = "derived"
    mapping: Path | None = None
    replay: str = "needed"
    replay_limit: float = 600.0
    repeat: Path | None = None
    baseline: Path | None = None
    partial: bool = False


def answer(
    question: Question,
    *,
    show: Callable[[Comparison], None] | None = None,
    progress: Callable[[], AbstractContextManager[Progress]] = nullcontext,
) -> int:
    """Compare, show, write; return 0 where nothing diverges, 1 where something does, 2 where that is not known.

    `show` prints the comparison where that is wanted, `progress` tells how much is done meanwhile.
    """
    _check_outputs(question)
    lines = cache(_lines) if "json" in question.reports else None
    with progress() as told:
        comparison = _compare(question, lines, told)
    comparison = _with_repro(comparison, question)
    if show is not None:
        show(comparison)
    for kind, path in question.reports.items():
        _write(comparison, kind, path, None if lines is None else lines())
    if question.github_summary is not None:
        _append_summary(comparison, question.github_summary)
    return _EXIT_CODES[comparison.verdict]


def _check_outputs(question: Question) -> None:
    from ulpscope._optional import require
    from ulpscope.report.replacing import check_writable

    reports = question.reports
    for kind, path in reports.items():
        if not _is_stdout(kind, path):
            check_writable(path)
    needed = {**reports, "torch": question.repro_dir} if question.repro_dir is not None else reports
    for kind, module in (("xlsx", "xlsxwriter"), ("parquet", "pyarrow"), ("torch", "torch")):
        if kind in needed and find_spec(module) is None:
            require(module, extra=kind, purpose=f"writing {needed[kind]}")


def _lines() -> PairLines:
    from ulpscope.report.comparison import json_  # noqa: F401 (imported with the first verdict, while other threads read tensors)
    from ulpscope.report.comparison.json_pairs import PairLines

    return PairLines()


def _compare(question: Question, lines: Callable[[], PairLines] | None, progress: Progress) -> Comparison:
    from ulpscope.workflows.compare.comparing import compare_runs

    words: dict[str, Any] = {"rules": question.rules, "mapping": question.mapping, "progress": progress}
    words |= {"replay": question.replay, "replay_seconds": question.replay_limit}
    words |= {"repeat": question.repeat} if question.repeat is not None else {}
    words |= {"partial": True} if question.partial else {}
    words |= {"judged": lambda call: lines().judged(call)} if lines is not None else {}
    if question.baseline is None:
        assert question.reference is not None
        return compare_runs(question.subject, question.reference, **words)
    from ulpscope.store import open_run
    from ulpscope.workflows.compare.baselines import BaselineRun

    run = open_run(question.subject)
    return compare_runs(run, BaselineRun(question.baseline, run), **words)


def _with_repro(comparison: Comparison, question: Question) -> Comparison:
    """Add the path of a repro to the comparison: in the folder asked for, else beside the page."""
    page = question.reports.get("html") if question.replay != "none" else None
    into = question.repro_dir or (page.with_name(f"{page.stem}_repro") if page is not None else None)
    if into is None or not comparison.faults or find_spec("torch") is None:
        return comparison
    from ulpscope.workflows.compare.reproducing import with_repro

    return with_repro(comparison, into, is_asked_for=question.repro_dir is not None)


def _write(comparison: Comparison, kind: str, path: Path, lines: PairLines | None) -> None:
    if kind == "json":
        _write_json(comparison, path, lines)
        return
    module, function = _RENDERERS[kind]
    renderer: Renderer = getattr(import_module(f"ulpscope.report.comparison.{module}"), function)
    renderer(comparison, path)


def _write_json(comparison: Comparison, path: Path, lines: PairLines | None) -> None:
    from ulpscope.report.comparison.json_ import dump_comparison, write_json

    if not _is_stdout("json", path):
        write_json(comparison, path, lines=lines)
        return
    dump_comparison(comparison, sys.stdout, lines=lines)
    sys.stdout.flush()


def _append_summary(comparison: Comparison, path: Path) -> None:
    from ulpscope.report.comparison.github_summary import append_github_summary

    append_github_summary(comparison, path)


def _is_stdout(kind: str, path: Path) -> bool:
    return kind == "json" and str(path) == "-"
