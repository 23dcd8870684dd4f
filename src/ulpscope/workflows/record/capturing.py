# SPDX-License-Identifier: Apache-2.0
"""Define `Capture`, the object that the user holds. A path becomes a sink, and the sink feeds a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from ulpscope._optional import require
from ulpscope.errors import InputError
from ulpscope.model import NonFinite, Sink
from ulpscope.report.escaping import visible
from ulpscope.store import DirectorySink, create_run
from ulpscope.workflows.record.surroundings import describe_run, launch_name, listed, rank_and_world_size, warn_user

if TYPE_CHECKING:
    import torch

    from ulpscope.capture import CaptureLevel, CaptureSession, HuntSession, Keep

__all__ = ["Capture"]


class Capture:
    """Records a training run into a folder.

    >>> with ulpscope.Capture("runs/npu", model=model, steps=[0, 1], keep="tensors") as capture:  # doctest: +SKIP
    ...     for batch in loader:
    ...         train_step(batch)
    ...         capture.step()

    `level` is what counts as a call: "api" (outermost torch calls), "module", "both" or "op" (every aten operation).
    `keep` is what stays of each tensor: "fingerprint", "statistics" or "tensors". `select` takes patterns over `module/call`
    (see `ulpscope run --help`). `optimizer` restricts which optimizers are recorded; without it all are.
    `max_bytes` limits the tensors kept by each rank: statistics go on. A folder that already holds a run is left alone; `path` says
    where this one went. `nonfinite=True`, or a `NonFinite` with options, hunts for inf and NaN: it records nothing until a call
    makes one, and then that call with its values and the calls around it. That is cheap enough to leave on. `watch="nonfinite"` is
    its older name.

    Nothing here changes what the program computes, and a failure to record never stops it.
    """

    _find_steps = False
    _seed: int | None = None
    _names_operators = False
    _functions: Sequence[tuple[Any, str, str]] = ()

    def __init__(
        self,
        into: str | os.PathLike[str],
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        *,
        optimizer: Any = None,
        level: CaptureLevel = "api",
        keep: Keep = "statistics",
        steps: Iterable[int] | int | None = None,
        ranks: Iterable[int] | int | None = None,
        select: str | Sequence[str] | None = None,
        nonfinite: bool | NonFinite = False,
        watch: Literal["nonfinite"] | NonFinite | None = None,
        max_bytes: int | None = None,
    ) -> None:
        require("torch", extra="torch", purpose="recording a run")
        from ulpscope import capture

        _choose("level", level, get_args(capture.CaptureLevel))
        _choose("keep", keep, get_args(capture.Keep))
        self._hunt = _hunt_options(nonfinite, watch, level)
        self._into = Path(into)
        self._models: list[Any] = listed(model)
        self._optimizers = None if optimizer is None else listed(optimizer)
        self._selection = capture.Selection.parse(steps=steps, ranks=ranks, select=select)
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
        if self._hunt is not None:
            self._options |= {"keep": "tensors", "watch": {"nonfinite": _written_down(self._hunt)}}
        self._session: CaptureSession | HuntSession | None = None
        self._path: Path | None = None
        self._has_told_size = False

    @staticmethod
    def of_script(into: str | os.PathLike[str], *, seed: int | None = None, **options: Any) -> Capture:
        """Return a capture that finds the steps by itself, from optimizer steps."""
        return _ScriptCapture(into, seed=seed, **options)

    @staticmethod
    def into_sink(
        open_sink: Callable[[int], Sink], *, operators: bool = False, functions: Sequence[tuple[Any, str, str]] = (), **options: Any
    ) -> Capture:
        """Return a capture that writes no run of ulpscope's: `open_sink(rank)` makes the sink for records and tensors.

        With `operators` the operators of a tensor keep the names that Python has for them (`Tensor.__add__`), as the older tools want.
        `functions` are functions of Python to be recorded as one call each: owner, attribute, and the name of the call.
        """
        return _SinkCapture(open_sink, operators=operators, functions=functions, **options)

    @property
    def path(self) -> Path | None:
        """Return the folder of this run; None before `start`, or where it could not be made."""
        return self._path

    def start(self) -> None:
        """Begin to record on this thread."""
        if self._session is not None:
            return
        from ulpscope.capture import is_one_active

        if is_one_active():
            warn_user(
                f"ulpscope is recording this process already, so nothing is recorded into '{self._into}'; stop the other capture first."
            )
            return
        rank, world_size = rank_and_world_size()
        if not self._selection.wants_rank(rank):
            return
        try:
            sink = self._new_sink(rank, world_size)
        except OSError as error:
            self._path = None
            warn_user(
                f"ulpscope cannot record into '{self._place_of(error)}' ({error}). "
                "Training goes on and nothing is recorded; give a folder that can be written to."
            )
            return
        self._session = self._new_session(sink, rank, world_size)
        self._session.start()

    def _new_sink(self, rank: int, world_size: int) -> Sink:
        self._path = create_run(self._into, describe_run(world_size, self._options, seed=self._seed), launch=launch_name(world_size))
        sink = DirectorySink(self._path, rank, max_bytes=self._max_bytes)
        if self._path != self._into and rank == 0:
            print(visible(f"ulpscope: '{self._into}' already holds a run; this one goes to '{self._path}'"), file=sys.stderr)
        return sink

    def _place_of(self, error: OSError) -> Any:
        """Return the path where a sink could not be made."""
        return self._into

    def _new_session(self, sink: Sink, rank: int, world_size: int) -> CaptureSession | HuntSession:
        from ulpscope.capture import CaptureSession, HuntSession

        if self._hunt is not None:
            return HuntSession(
                sink,
                self._hunt,
                rank=rank,
                world_size=world_size,
                models=self._models,
                optimizers=self._optimizers,
                selection=self._selection,
                find_steps=self._find_steps,
                operators=self._names_operators,
            )
        return CaptureSession(
            sink,
            rank=rank,
            models=self._models,
            optimizers=self._optimizers,
            level=self._level,
            keep=self._keep,
            selection=self._selection,
            find_steps=self._find_steps,
            operators=self._names_operators,
            functions=self._functions,
            on_step_end=self._tell_size if rank == 0 else None,
        )

    def stop(self) -> None:
        """Stop recording, close the run and undo every patch. To start again begins another run beside this one."""
        self._stop(complete=True)

    def step(self) -> None:
        """End a training step."""
        if self._session is not None:
            self._session.step()

    def pause(self) -> None:
        """Record nothing until `resume`; the current step stays open."""
        if self._session is not None:
            self._session.pause()

    def resume(self) -> None:
        if self._session is not None:
            self._session.resume()

    def take_whole(self, module: torch.nn.Module, name: str) -> None:
        """Record each call of this module as one call of that name, and nothing inside it, until `take_apart`."""
        from ulpscope.capture import CaptureSession

        if isinstance(self._session, CaptureSession):
            self._session.take_whole(module, name)

    def take_apart(self) -> None:
        from ulpscope.capture import CaptureSession

        if isinstance(self._session, CaptureSession):
            self._session.take_apart()

    def __enter__(self) -> Capture:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop(complete=kind is None)

    def _stop(self, *, complete: bool) -> None:
        if self._session is not None:
            self._session.stop(complete=complete)
            self._session = None

    def _tell_size(self, step: int) -> None:
        if self._has_told_size or self._path is None:
            return
        self._has_told_size = True
        size = sum(file.stat().st_size for file in self._path.glob(f"rank*/step{step:05d}/*"))
        print(visible(f"ulpscope: step {step} takes {size / 1e6:.1f} MB in '{self._path}'"), file=sys.stderr)


class _ScriptCapture(Capture):
    """Records a script that does not say where its steps end."""

    _find_steps = True

    def __init__(self, into: str | os.PathLike[str], *, seed: int | None, **options: Any) -> None:
        super().__init__(into, **options)
        self._seed = seed


class _SinkCapture(Capture):
    """Records into sinks of another tool's format."""

    def __init__(
        self, open_sink: Callable[[int], Sink], *, operators: bool, functions: Sequence[tuple[Any, str, str]], **options: Any
    ) -> None:
        super().__init__("", **options)
        self._open_sink = open_sink
        self._names_operators = operators
        self._functions = functions

    def _new_sink(self, rank: int, world_size: int) -> Sink:
        return self._open_sink(rank)

    def _place_of(self, error: OSError) -> Any:
        return error.filename


def _choose(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{what}={value!r} is not known; choose one of {', '.join(choices)}")


def _hunt_options(nonfinite: object, watch: object, level: str) -> NonFinite | None:
    """Return the options of the hunt for inf and NaN, or None; `watch` is the older name of `nonfinite`."""
    if nonfinite is not False and nonfinite is not None:
        named, asked, shown = "nonfinite", nonfinite, "nonfinite=True"
    elif watch is not None:
        named, asked, shown = "watch", watch, "watch='nonfinite'"
    else:
        return None
    options = NonFinite() if (named, asked) in {("nonfinite", True), ("watch", "nonfinite")} else asked
    if not isinstance(options, NonFinite):
        raise InputError(f"{named}={asked!r} is not known; write {shown}, or {named}=ulpscope.NonFinite(...) for options")
    if level == "op":
        raise InputError(f"{shown} looks at calls or modules, not at level='op'; leave level out")
    if (options.limit is not None and options.limit < 1) or options.ring < 0:
        raise InputError(f"a hunt ends after a number of faults from 1 up, or None, and keeps a ring from 0 up, not {options}")
    return replace(options, calls=False) if level == "module" and options.calls is None else options


def _written_down(hunt: NonFinite) -> dict[str, Any]:
    options = asdict(replace(hunt, on_event=None))
    del options["on_event"]
    return options
