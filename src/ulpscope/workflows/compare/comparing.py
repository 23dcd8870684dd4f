# SPDX-License-Identifier: Apache-2.0
"""Compare two runs: match, measure, judge, explain, one rank and step at a time.

Reading starts at once: the code that judges and explains is imported while other threads read the first tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ulpscope.match import match_steps, read_mapping
from ulpscope.store import open_run
from ulpscope.workflows.compare.ahead import Ahead
from ulpscope.workflows.compare.garbage import rare_collections
from ulpscope.workflows.compare.measuring import measured_steps

if TYPE_CHECKING:
    from ulpscope.model import Comparison, JudgedCall, ReplayMode, Run

__all__ = ["compare_runs"]


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
    partial: bool = False,
    progress: Callable[[int, int], None] | None = None,
    judged: Callable[[JudgedCall], None] | None = None,
) -> Comparison:
    """Compare two runs, given as paths or as open runs.

    >>> comparison = compare_runs("runs/npu", "runs/gpu")  # doctest: +SKIP
    >>> [finding.headline for finding in comparison.faults]  # doctest: +SKIP
    ['first contributed error: layers.1.mlp  gelu (call 1, forward, output 0), step 0, rank 0']

    `mapping` is a file of rules for renamed modules and calls; `progress` is told how much of the whole is done. `replay` says which
    calls are run again in a higher precision on their own inputs: calls that differ until the cause is found (`needed`), every call that
    differs (`all`) or none (`none`), for `replay_seconds` at most. `repeat` is the reference recorded once more: a call that differs as
    much between those two is not deterministic, and no fault. With `partial` the verdict speaks only of the parts that could be compared.
    `judged` is told of each call as it gets its verdict; its contribution is known only at the end.
    """
    started = time.perf_counter()
    if rules != "derived":
        from ulpscope.judge import rules_named

        rules_named(rules)
    names = read_mapping(mapping) if mapping is not None else None
    ours, theirs = _opened(subject), _opened(reference)
    overlap = match_steps(ours, theirs)
    with Ahead() as ahead:
        steps = measured_steps(ours, theirs, overlap.common, names, ahead)
        from ulpscope.workflows.compare.judging import judge_runs, measured_bands
        from ulpscope.workflows.compare.replaying import Replaying

        bands = None if repeat is None else measured_bands(theirs, _opened(repeat), rules, ahead)
        replaying = Replaying(ours, theirs, replay if rules == "derived" else "none", replay_seconds)
        told = (progress or _silent, judged or _unheard)
        comparison = judge_runs(steps, ours, theirs, overlap, rules, *told, replaying, bands, is_partial=partial)
    return replace(comparison, elapsed_s=time.perf_counter() - started)


def _opened(run: Run | str | Path) -> Run:
    return open_run(run) if isinstance(run, (str, Path)) else run


def _silent(done: int, total: int) -> None:
    pass


def _unheard(call: JudgedCall) -> None:
    pass
