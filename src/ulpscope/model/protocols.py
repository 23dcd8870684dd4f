# SPDX-License-Identifier: Apache-2.0
"""Declare the interfaces between stages: sinks, drafts of records, runs and renderers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ulpscope.model.comparison.findings import Comparison
from ulpscope.model.names import Slot
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import CallRecord, Frame, Level, Phase, Summary, TensorData
from ulpscope.model.runs import LedgerEntry, RunInfo

__all__ = ["AbleSink", "DraftCall", "DraftTensor", "FrameSink", "Renderer", "Run", "Sink", "SinkAbilities", "abilities_of"]


class Sink(Protocol):
    """The place where capture writes, for one rank. Calls may come from several threads, one at a time."""

    def begin_step(self, step: int) -> None:
        """Open a step; a step still open is closed first."""

    def write(self, record: CallRecord) -> None:
        """Append one record; it survives a kill of the process from here on."""

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        """Store the bytes of a tensor and return its content key, or None where the size limit is reached.

        `buffer` is C-contiguous and may change as soon as this returns.
        """

    def note(self, entry: LedgerEntry) -> None:
        """Write down something that capture could not do."""

    def end_step(self) -> None:
        """Close the open step, if any: from here on it is complete."""

    def close(self, *, complete: bool = True) -> None:
        """Close everything, an open step as complete or not; calling it twice is harmless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAbilities:
    """Say what capture may do with a sink besides the methods of `Sink`; a sink that declares nothing can do none of it.

    With `is_thread_safe` one thread may keep a tensor while another writes a record. With `keeps_views` a content key may name a view of
    bytes that the sink holds (`view_content`). With `shows_overwritten` records show values that a call overwrites without reading them.
    """

    is_thread_safe: bool = False
    keeps_views: bool = False
    shows_overwritten: bool = False


class DraftTensor(Protocol):
    """What a `TensorRecord` says of a tensor, before there is a record."""

    @property
    def slot(self) -> Slot: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None: ...
    @property
    def device(self) -> str: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def summary(self) -> Summary | None: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def content(self) -> str | None: ...
    @property
    def note(self) -> str: ...


class DraftCall(Protocol):
    """What a `CallRecord` says of a call, as capture has it: the store writes thousands of records a step from drafts alone.

    The name of the call comes in two parts, `arguments` as (args, kwargs) or as their MessagePack, `modes` as the fields of `Modes`.
    """

    @property
    def order(self) -> int: ...
    @property
    def op(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def level(self) -> Level: ...
    @property
    def module(self) -> str: ...
    @property
    def parent(self) -> str: ...
    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any] | None] | bytes | None: ...
    @property
    def modes(self) -> tuple[str | None, bool, bool, bool | None, bool] | None: ...
    @property
    def slots(self) -> Iterable[DraftTensor]: ...
    @property
    def stack(self) -> tuple[Frame, ...]: ...
    @property
    def recompute(self) -> bool: ...


@runtime_checkable
class AbleSink(Sink, Protocol):
    """A sink that declares its abilities."""

    @property
    def abilities(self) -> SinkAbilities: ...


@runtime_checkable
class FrameSink(Sink, Protocol):
    """A sink that writes the frames of our own store: it takes many records at once, and puts off work that can wait."""

    def write_drafts(self, drafts: Iterable[DraftCall]) -> None:
        """Append records given as drafts."""

    def number_stack(self, stack: tuple[Frame, ...]) -> int:
        """Return the number of a stack in the file of the open step."""

    def write_frames(self, frames: bytes | memoryview, count: int) -> None:
        """Append `count` records, given as frames in the format of the file."""

    def copy_closed_steps(self) -> None:
        """Do the work that was put off for closed steps."""


def abilities_of(sink: Sink) -> SinkAbilities:
    """Return the abilities that a sink declares."""
    return sink.abilities if isinstance(sink, AbleSink) else SinkAbilities()


class Run(Protocol):
    """A readable run: the noun that `open_run` returns."""

    @property
    def path(self) -> Path: ...

    @property
    def info(self) -> RunInfo: ...

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that recorded anything, ascending."""

    def steps(self, rank: int) -> tuple[int, ...]:
        """Return the steps that a rank recorded, ascending."""

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        """Read the records of one step in the order in which they were written."""

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        """Return the bytes of a kept tensor, without a copy where the format allows."""

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        """Return what capture could not do."""

    def is_complete(self, rank: int, step: int) -> bool:
        """Tell whether the writer closed the step."""


class Renderer(Protocol):
    """Draws a finished comparison into a file."""

    def __call__(self, comparison: Comparison, path: Path) -> None: ...
