# SPDX-License-Identifier: Apache-2.0
"""The seams between stages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ulpscope.model.findings import Comparison
from ulpscope.model.records import CallRecord, TensorData
from ulpscope.model.runs import LedgerEntry, RunInfo

__all__ = ["Renderer", "Run", "Sink"]


class Sink(Protocol):
    """Where capture writes, for one rank. Calls may come from several threads, one at a time."""

    def begin_step(self, step: int) -> None:
        """Open a step; a step still open is closed first."""

    def write(self, record: CallRecord) -> None:
        """Append one record; it survives a kill of the process from here on."""

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        """Store the bytes of a tensor and return its content key, or None where the size limit is reached.

        `buffer` is C-contiguous and may change as soon as this returns.
        """

    def note(self, entry: LedgerEntry) -> None:
        """Write down what could not be done."""

    def end_step(self) -> None:
        """Close the open step, if any: from here on it is complete."""

    def close(self, *, complete: bool = True) -> None:
        """Close everything, an open step as complete or not; calling it twice is harmless."""


class Run(Protocol):
    """A run that can be read: the noun that `open_run` returns."""

    @property
    def path(self) -> Path: ...

    @property
    def info(self) -> RunInfo: ...

    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote something, ascending."""

    def steps(self, rank: int) -> tuple[int, ...]:
        """The steps that a rank recorded, ascending."""

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        """The records of one step in the order in which they were written."""

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        """The bytes of a kept tensor, without a copy where the format allows."""

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        """What capture could not do."""

    def is_complete(self, rank: int, step: int) -> bool:
        """Whether the step was closed by its writer."""


class Renderer(Protocol):
    """Draws a finished comparison into a file."""

    def __call__(self, comparison: Comparison, path: Path) -> None: ...
