# SPDX-License-Identifier: Apache-2.0
"""`Capture` for MindSpore: the object that the user holds. A path becomes a sink, and the sink feeds a session."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from ulpscope._optional import require
from ulpscope.errors import InputError
from ulpscope.model import Sink
from ulpscope.report.escaping import visible
from ulpscope.store import DirectorySink, create_run
from ulpscope.workflows.record.surroundings import describe_process, launch_name, launched_as, listed, warn_user

if TYPE_CHECKING:
    from ulpscope.capture_mindspore import CaptureLevel, Keep, MindSporeSession

__all__ = ["Capture"]


class Capture:
    """Records a training run of MindSpore in PyNative mode into a folder.

    >>> with ulpscope.mindspore.Capture("runs/ms", net, keep="tensors") as capture:  # doctest: +SKIP
    ...     for batch in data:
    ...         train_step(batch)
    ...         capture.step()

    `level` is what counts as a call: "api" (functions, methods and operators, and cells that are one call of torch), "module" (cells) or
    "both". `keep` is what stays of each tensor: "fingerprint", "statistics" or "tensors". `select` takes patterns over `module/call`, by
    torch's names. `max_bytes` limits the tensors kept by each rank: statistics go on. A folder that already holds a run is left alone;
    `path` says where this one went.

    Nothing here changes what the program computes, and a failure to record never stops it.
    """

    def __init__(
        self,
        into: str | os.PathLike[str],
        model: Any = None,
        *,
        level: CaptureLevel = "api",
        keep: Keep = "statistics",
        steps: Iterable[int] | int | None = None,
        ranks: Iterable[int] | int | None = None,
        select: str | Sequence[str] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        require("mindspore", extra="mindspore", purpose="recording a run of MindSpore")
        from ulpscope import capture_mindspore

        _choose("level", level, get_args(capture_mindspore.CaptureLevel))
        _choose("keep", keep, get_args(capture_mindspore.Keep))
        self._into = Path(into)
        self._models: list[Any] = listed(model)
        self._selection = capture_mindspore.Selection.parse(steps=steps, ranks=ranks, select=select)
        self._level: CaptureLevel = level
        self._keep: Keep = keep
        self._max_bytes = max_bytes
        self._options: dict[str, Any] = {
            "level": level,
            "keep": keep,
            "steps": sorted(self._selection.steps) if self._selection.steps is not None else None,
            "ranks": sorted(self._selection.ranks) if self._selection.ranks is not None else None,
            "select": [select] if isinstance(select, str) else list(select or ()),
            "max_bytes": max_bytes,
        }
        self._session: MindSporeSession | None = None
        self._path: Path | None = None

    @staticmethod
    def into_sink(open_sink: Callable[[int], Sink], **options: Any) -> Capture:
        """A capture that writes no run of ours: `open_sink(rank)` says where records and tensors go."""
        return _SinkCapture(open_sink, **options)

    @property
    def path(self) -> Path | None:
        """The folder of this run; None before `start`, or where it could not be made."""
        return self._path

    def start(self) -> None:
        """Begin to record on this thread."""
        if self._session is not None:
            return
        from ulpscope.capture_mindspore import MindSporeSession, is_one_active

        if is_one_active():
            warn_user(
                f"ulpscope is recording this process already, so nothing is recorded into '{self._into}'; stop the other capture first."
            )
            return
        rank, world_size = launched_as()
        if not self._selection.wants_rank(rank):
            return
        try:
            sink = self._new_sink(rank, world_size)
        except OSError as error:
            self._path = None
            warn_user(
                f"ulpscope cannot record into '{self._into}' ({error}). "
                "Training goes on and nothing is recorded; give a folder that can be written to."
            )
            return
        self._session = MindSporeSession(
            sink,
            rank=rank,
            models=self._models,
            level=self._level,
            keep=self._keep,
            selection=self._selection,
        )
        self._session.start()

    def _new_sink(self, rank: int, world_size: int) -> Sink:
        devices = (f"cpu ({platform.machine()})",)
        self._path = create_run(self._into, describe_process(world_size, self._options, devices), launch=launch_name(world_size))
        if self._path != self._into and rank == 0:
            print(visible(f"ulpscope: '{self._into}' already holds a run; this one goes to '{self._path}'"), file=sys.stderr)
        return DirectorySink(self._path, rank, max_bytes=self._max_bytes)

    def stop(self) -> None:
        """Stop recording and close the run; everything patched is put back. To start again begins another run beside this one."""
        self._stop(complete=True)

    def step(self) -> None:
        """Say that a training step is over."""
        if self._session is not None:
            self._session.step()

    def pause(self) -> None:
        """Record nothing until `resume`; the step under way stays open."""
        if self._session is not None:
            self._session.pause()

    def resume(self) -> None:
        if self._session is not None:
            self._session.resume()

    def __enter__(self) -> Capture:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop(complete=kind is None)

    def _stop(self, *, complete: bool) -> None:
        if self._session is not None:
            self._session.stop(complete=complete)
            self._session = None


class _SinkCapture(Capture):
    """Records into the sinks of somebody else."""

    def __init__(self, open_sink: Callable[[int], Sink], **options: Any) -> None:
        super().__init__("", **options)
        self._open_sink = open_sink

    def _new_sink(self, rank: int, world_size: int) -> Sink:
        return self._open_sink(rank)


def _choose(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{what}={value!r} is not known for MindSpore; choose one of {', '.join(choices)}")
