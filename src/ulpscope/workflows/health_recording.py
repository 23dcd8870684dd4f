# SPDX-License-Identifier: Apache-2.0
"""Record the health of a training (`record_health`), and find where two such runs part (`compare_health`).

Capture measures, the store writes, judge raises alerts; this file puts the three together. A failure here never stops training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ulpscope._optional import require
from ulpscope.errors import InputError
from ulpscope.explain.health import explain_health
from ulpscope.judge.health.alerts import Vigil
from ulpscope.judge.health.departures import chance_agreement, find_departures
from ulpscope.measure.health_series import drifting_replicas, joined_ranks, paired_series
from ulpscope.model import LedgerEntry
from ulpscope.model.health import Alert, Granularity, HealthComparison, HealthStep, HealthTarget, SeriesPair
from ulpscope.report.escaping import visible
from ulpscope.store import create_run
from ulpscope.store.series import MAX_BYTES, HealthRun, SeriesSink, open_health
from ulpscope.workflows.record.surroundings import describe_run, launch_name, listed, rank_and_world_size, warn_user

if TYPE_CHECKING:
    import torch

    from ulpscope.capture.health.monitor import HealthSession
    from ulpscope.report.health.tensorboard import EventWriter

__all__ = ["HealthRecording", "HealthWatch", "compare_health", "record_health", "record_script_health", "watch"]

KINDS = ("gradient", "parameter", "update", "moment")
_COMPARED = frozenset({"gradient", "update", "parameter"})
_MOST_ALERTS = 10_000


@dataclass(frozen=True, kw_only=True)
class _HealthOptions:
    """Options of `record_health`, checked."""

    every: int = 1
    granularity: Granularity = "parameter"
    kinds: Sequence[str] = KINDS
    bounds: Sequence[float] = ()
    num_samples: int = 1024
    exact_updates: bool = False
    activations: str | Sequence[str] = ()
    scaler: Any = None
    on_alert: Callable[[Alert], None] | None = None
    tensorboard: str | os.PathLike[str] | None = None
    max_bytes: int = MAX_BYTES
    quiet: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise InputError(f"every={self.every!r} makes no sense; give a whole number from 1 on")
        if self.granularity not in get_args(Granularity):
            raise InputError(f"granularity={self.granularity!r} is not known; choose one of {', '.join(get_args(Granularity))}")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise InputError(f"kinds={unknown[0]!r} is not known; choose from {', '.join(KINDS)}")
        if list(self.bounds) != sorted(set(self.bounds)):
            raise InputError(f"bounds={list(self.bounds)!r} are not in ascending order")

    def of_session(self) -> dict[str, Any]:
        return {
            "every": self.every,
            "granularity": self.granularity,
            "kinds": tuple(self.kinds),
            "bounds": tuple(float(bound) for bound in self.bounds),
            "num_samples": self.num_samples,
            "exact_updates": self.exact_updates,
            "activations": (self.activations,) if isinstance(self.activations, str) else tuple(self.activations),
        }


class HealthRecording:
    """Record the health of a training until `close`, or until the `with` block ends; `record_health` returns one."""

    def __init__(self, into: Path, asked: _HealthOptions) -> None:
        self._into = into
        self._asked = asked
        self._session: HealthSession | None = None
        self._sink: SeriesSink | None = None
        self._events: EventWriter | None = None
        self._path: Path | None = None
        self._alerts: list[Alert] = []
        self._num_failures = 0
        self._rank = 0
        self._vigil = Vigil()

    @property
    def path(self) -> Path | None:
        """Return the folder of this run, or None where it could not be made."""
        return self._path

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Return the alerts of this process so far."""
        return tuple(self._alerts)

    def log(self, **scalars: Any) -> None:
        """Record numbers of the current step, such as `loss=loss`; a tensor is read later, together with everything else."""
        if self._session is not None:
            self._session.log(scalars)

    def before_clip(self) -> None:
        """Measure the gradients as they are now: call it between backward and clipping."""
        if self._session is not None:
            self._session.before_clip()

    def step(self) -> None:
        """Say that a step is over. Without it, a step ends when the optimizer steps again."""
        if self._session is not None:
            self._session.step()

    def close(self) -> None:
        """Remove every hook and close the files."""
        if self._session is not None:
            self._session.stop()
            self._session = None
        self._safely("close the series", self._close_files)

    def __enter__(self) -> HealthRecording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # ---- inside

    def _open(self) -> bool:
        """Make the folder. Without one, training goes on and its health is not recorded."""
        self._rank, world_size = rank_and_world_size()
        self._vigil = Vigil(self._rank)
        try:
            self._path = create_run(
                self._into, describe_run(world_size, {"watch": "health", **self._asked.of_session()}), launch=launch_name(world_size)
            )
            self._sink = SeriesSink(self._path, self._rank, max_bytes=self._asked.max_bytes)
            self._events = self._open_events()
        except OSError as error:
            self._path = self._sink = None
            warn_user(
                f"ulpscope cannot write to '{self._into}' ({error}). Training goes on without it; give a folder that can be written to."
            )
            return False
        if self._path != self._into and self._rank == 0:
            print(visible(f"ulpscope: '{self._into}' already holds a run; this one goes to '{self._path}'"), file=sys.stderr)
        return True

    def _open_events(self) -> EventWriter | None:
        if self._asked.tensorboard is None:
            return None
        from ulpscope.report.health.tensorboard import EventWriter

        return EventWriter(Path(self._asked.tensorboard) / f"rank{self._rank}")

    def _begin(self, models: Sequence[Any], optimizers: Sequence[Any] | None) -> HealthSession:
        from ulpscope.capture.health.monitor import HealthSession

        self._session = HealthSession(
            self._take,
            models=models,
            optimizers=optimizers,
            scaler=self._asked.scaler,
            on_failure=self._failed,
            **self._asked.of_session(),
        )
        return self._session

    def _take(self, step: HealthStep) -> None:
        if self._sink is not None:
            self._sink.write(step)
        for alert in self._vigil.observe(step):
            self._tell(alert)
        if self._events is not None:
            self._events.write(step)

    def _tell(self, alert: Alert) -> None:
        if len(self._alerts) >= _MOST_ALERTS:
            return
        self._alerts.append(alert)
        if self._sink is not None:
            self._sink.alert(alert)
        if not self._asked.quiet and self._rank == 0:
            print(visible(f"ulpscope: step {alert.step}: {alert.headline}"), file=sys.stderr)
        if self._asked.on_alert is not None:
            self._safely("call on_alert", self._asked.on_alert, alert)

    def _close_files(self) -> None:
        if self._sink is not None:
            self._sink.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _safely(self, what: str, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            from ulpscope.recording.safety import let_pass

            let_pass(error)
            self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        self._num_failures += 1
        why = f"{type(error).__name__}: {error}"
        sink, rest = self._sink, "the ledger of the run has the details"
        if isinstance(error, OSError):
            self._sink, rest = None, "nothing more is written; what was written stays readable"
        try:
            if sink is not None:
                sink.note(LedgerEntry(what=what, why=why))
        except OSError:
            self._sink = None
        if self._num_failures == 1:
            warn_user(f"ulpscope could not {what} ({why}). Training goes on unchanged; {rest}.")


def record_health(
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: Any = None,
    into: str | os.PathLike[str] = "runs/health",
    *,
    every: int = 1,
    granularity: Granularity = "parameter",
    kinds: Sequence[str] = KINDS,
    bounds: Sequence[float] = (),
    num_samples: int = 1024,
    exact_updates: bool = False,
    activations: str | Sequence[str] = (),
    scaler: Any = None,
    on_alert: Callable[[Alert], None] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
    quiet: bool = False,
) -> HealthRecording:
    """Record the health of a training: statistics of its gradients, parameters, updates and optimizer moments at every step.

    >>> with ulpscope.record_health(model, optimizer, into="runs/health") as health:  # doctest: +SKIP
    ...     for batch in loader:
    ...         loss = train_step(batch)
    ...         health.log(loss=loss)

    It records from here on until `close()`. Steps are found from the optimizer. `granularity` says what a row stands for: a
    "parameter", a "layer" (a module's own parameters) or a "group" (of the optimizer). `bounds` adds histograms. `num_samples`
    positions of each gradient have their signs kept. `exact_updates` measures updates as a whole instead of at those positions,
    and needs the memory of a second copy of the model. `activations` are globs over module paths whose outputs are measured.
    `on_alert` is called with each Alert; `tensorboard` is a folder for event files. Nothing here changes what the program
    computes, and a failure to record never stops it.
    """
    asked = _HealthOptions(
        every=every,
        granularity=granularity,
        kinds=kinds,
        bounds=bounds,
        num_samples=num_samples,
        exact_updates=exact_updates,
        activations=activations,
        scaler=scaler,
        on_alert=on_alert,
        tensorboard=tensorboard,
        max_bytes=max_bytes,
        quiet=quiet,
    )
    require("torch", extra="torch", purpose="recording the health of a training")
    handle = HealthRecording(Path(into), asked)
    if handle._open():
        handle._begin(listed(model), None if optimizer is None else listed(optimizer)).start()
    return handle


@contextmanager
def record_script_health(into: str | os.PathLike[str], **options: Any) -> Iterator[HealthRecording]:
    """Record the health of every training inside the block: it finds models, optimizers, losses, clipping and scalers by itself.

    `options` are the keyword arguments of `record_health`.
    """
    require("torch", extra="torch", purpose="recording the health of a training")
    handle = HealthRecording(Path(into), _HealthOptions(**options))
    if not handle._open():
        yield handle
        return
    from ulpscope.capture.health.scripts import ScriptHealth

    try:
        with ScriptHealth(handle._begin((), None)):
            yield handle
    finally:
        handle.close()


watch = record_health
"""The older name of `record_health`."""

HealthWatch = HealthRecording
"""The older name of `HealthRecording`."""


# ---- two health runs


def compare_health(subject: str | os.PathLike[str], reference: str | os.PathLike[str]) -> HealthComparison:
    """Find the step at which two health runs part, and what left first.

    >>> compare_health("runs/npu-health", "runs/gpu-health").parted_at  # doctest: +SKIP
    412
    """
    runs = open_health(subject), open_health(reference)
    sides = [[run.series(rank, wants=_is_compared) for rank in run.ranks()] for run in runs]
    joined = [joined_ranks(series) for series in sides]
    pair = paired_series(*joined)
    departures, chance = find_departures(pair), chance_agreement(pair)
    drifts = drifting_replicas(sides[0])
    alerts = tuple(sorted(_alerts(runs[0]), key=lambda alert: alert.step))
    rows = [row for row, target in enumerate(pair.targets) if target.kind == "gradient"]
    return HealthComparison(
        subject=runs[0].info,
        reference=runs[1].info,
        subject_path=str(subject),
        reference_path=str(reference),
        findings=explain_health(
            pair,
            departures,
            drifts,
            alerts=alerts,
            num_left_out=max(each.num_left_out for each in joined),
            lone_steps=(len(joined[0].steps) - len(pair.steps), len(joined[1].steps) - len(pair.steps)),
            chance=chance,
        ),
        departures=departures,
        steps=pair.steps,
        names=tuple(pair.targets[row].name for row in rows),
        numels=tuple(pair.targets[row].global_numel for row in rows),
        similarity=pair.similarity[:, rows],
        log_ratio=_log_ratio(pair, rows),
        subject_scalars={name: values[0] for name, values in pair.scalars.items()},
        reference_scalars={name: values[1] for name, values in pair.scalars.items()},
        is_equal=bool(pair.equal.all()),
        alerts=alerts,
        chance=chance,
    )


def _is_compared(target: HealthTarget) -> bool:
    return target.kind in _COMPARED


def _alerts(run: HealthRun) -> Iterator[Alert]:
    for rank in run.ranks():
        yield from run.alerts(rank)


def _log_ratio(pair: SeriesPair, rows: list[int]) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(pair.subject[:, rows]) - np.log(pair.reference[:, rows])
