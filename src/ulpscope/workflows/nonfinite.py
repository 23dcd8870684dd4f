# SPDX-License-Identifier: Apache-2.0
"""Find where inf and NaN began in a run (`find_nonfinite`), across its ranks, and how near the other calls came."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ulpscope.errors import UlpscopeError
from ulpscope.explain.nonfinite.events import event_of, order_events
from ulpscope.explain.nonfinite.near_misses import NearMisses
from ulpscope.explain.nonfinite.origins import Beginning, StepTrace, trace_step
from ulpscope.explain.nonfinite.reasons import sure_magnitude
from ulpscope.model import CallRecord, NonFiniteEvent, NonFiniteReport, Run, TensorData
from ulpscope.store import open_run

__all__ = ["find_nonfinite"]

_MOST_REPLAYS = 8


def find_nonfinite(run: Run | str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> NonFiniteReport:
    """Name the calls that made inf or NaN, and the near misses, from any run that has statistics.

    >>> report = ulpscope.find_nonfinite("runs/npu")  # doctest: +SKIP
    >>> report.first.headline  # doctest: +SKIP
    '+inf made by layers.1.mlp  linear (call 3, forward, output 0), step 0, rank 0'
    """
    opened = open_run(Path(run)) if isinstance(run, (str, os.PathLike)) else run
    near = NearMisses()
    finding = _Finding(opened, near)
    places = [(rank, step) for rank in opened.ranks() for step in opened.steps(rank)]
    for done, (rank, step) in enumerate(places):
        if progress is not None:
            progress(done, len(places))
        finding.take(rank, step)
    return NonFiniteReport(
        path=str(opened.path),
        info=opened.info,
        events=order_events(finding.events),
        near_misses=near.ranked(),
        num_calls=finding.num_calls,
        num_unknown=finding.num_unknown,
        notes=tuple(finding.notes()),
    )


class _Finding:
    """Collects events while the steps pass by."""

    def __init__(self, run: Run, near: NearMisses) -> None:
        self.events: list[NonFiniteEvent] = []
        self.num_calls = 0
        self.num_unknown = 0
        self._run = run
        self._near = near
        self._num_replays = 0
        self._why_no_replay = ""
        self._lost_since: dict[int, int] = {}
        self._skipping = {rank for rank in run.ranks() for entry in run.ledger(rank) if entry.why == "GradScaler skipped it"}

    def take(self, rank: int, step: int) -> None:
        trace = trace_step(
            self._watched(rank, step),
            rank=rank,
            step=step,
            world_size=self._run.info.world_size,
            may_be_skipped=rank in self._skipping,
            saturates=_saturates(self._run),
            is_watched="watch" in self._run.info.options,
        )
        self.num_calls += trace.num_calls
        self.num_unknown += trace.num_unknown
        lost_since = self._lost_since.get(rank)
        for beginning in trace.beginnings:
            needed = self._needed(trace, beginning)
            self.events.append(
                event_of(
                    trace,
                    beginning,
                    path=str(self._run.path),
                    command=self._run.info.command,
                    needed=needed,
                    lost_since=lost_since,
                )
            )
        if "parameters" in trace.reached and not trace.is_skipped:
            self._lost_since.setdefault(rank, step)

    def _watched(self, rank: int, step: int) -> list[CallRecord]:
        records = list(self._run.records(rank, step))
        for record in records:
            self._near.take(record)
        return records

    def _needed(self, trace: StepTrace, beginning: Beginning) -> float | None:
        """Return the largest magnitude of the exact result, where the call can be run again in a higher precision."""
        sure = sure_magnitude(beginning)
        record = beginning.record
        if sure is not None or beginning.kind != "made" or record.phase not in ("forward", "backward") or record.level != "api":
            return sure
        if self._num_replays >= _MOST_REPLAYS or not (trace.is_fault(beginning) or record.phase == "backward"):
            return None
        self._num_replays += 1
        if find_spec("torch") is None:
            self._why_no_replay = "the exact results are not known: replaying a call needs torch, which is not installed here"
            return None
        try:
            return self._replayed(beginning)
        except Exception as error:  # the call fails on the CPU: the finding stands without its exact result
            why = str(error) if isinstance(error, UlpscopeError) else f"{type(error).__name__}: {error}"
            self._why_no_replay = f"the exact result of {record.call} is not known: {why}"
            return None

    def _replayed(self, beginning: Beginning) -> float | None:
        from ulpscope.replay.calls.magnitudes import largest_exact_gradient, largest_exact_result

        record, slot = beginning.record, beginning.slots[0]

        def read(content: str) -> TensorData:
            return self._run.tensor(record.rank, record.step, content)

        if record.phase == "forward":
            return largest_exact_result(record, slot.slot, read)
        return largest_exact_gradient(beginning.forward, record, slot, read)

    def notes(self) -> list[str]:
        found = [self._why_no_replay] if self._why_no_replay else []
        if self.num_unknown:
            found.append(f"{self.num_unknown} of {self.num_calls} calls have no statistics, so that nothing is known of them")
        return found


def _saturates(run: Run) -> bool:
    watch = run.info.options.get("watch")
    options = watch.get("nonfinite") if isinstance(watch, dict) else None
    return isinstance(options, dict) and options.get("saturation") is True
