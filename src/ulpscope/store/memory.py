# SPDX-License-Identifier: Apache-2.0
"""Keep a run in memory, for tests and notebooks: one MemoryRun, one sink for each rank that writes into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ulpscope.errors import DamagedRunError, InputError
from ulpscope.format.content import content_hash, content_key, parse_content
from ulpscope.model import DTYPES, CallRecord, LedgerEntry, RunInfo, SinkAbilities, TensorData
from ulpscope.store.native.ledger import merge_entries
from ulpscope.store.native.shards import tensor_bytes, tensor_of

__all__ = ["MemoryRun", "MemorySink"]


class _Step:
    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self.tensors: dict[str, bytes] = {}
        self.is_complete = False


class MemoryRun:
    """The records that its sinks have written so far; implements Run.

    >>> run = MemoryRun()
    >>> run.sink(rank=0).begin_step(0)
    >>> run.steps(0)
    (0,)
    """

    def __init__(self, info: RunInfo | None = None, path: Path | str = "memory") -> None:
        self._info = info or RunInfo()
        self._path = Path(path)
        self._ranks: dict[int, dict[int, _Step]] = {}
        self._ledgers: dict[int, list[LedgerEntry]] = {}

    def sink(self, rank: int = 0) -> MemorySink:
        self._ranks.setdefault(rank, {})
        return MemorySink(self._ranks[rank], self._ledgers.setdefault(rank, []))

    @property
    def path(self) -> Path:
        return self._path

    @property
    def info(self) -> RunInfo:
        return self._info

    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._ranks))

    def steps(self, rank: int) -> tuple[int, ...]:
        if rank not in self._ranks:
            raise InputError(f"this run has no rank {rank}; it has {list(self.ranks())}")
        return tuple(sorted(self._ranks[rank]))

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        return iter(tuple(self._step(rank, step).records))

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        asked = parse_content(content)
        tensors = self._step(rank, step).tensors
        if asked.hash not in tensors or asked.dtype not in DTYPES:
            raise InputError(f"step {step} of rank {rank} keeps no tensor {content}")
        data = memoryview(tensors[asked.hash])
        try:
            asked.verify(len(data), self._path)
        except DamagedRunError:
            raise InputError(f"step {step} of rank {rank} keeps no tensor {content}") from None
        return tensor_of(asked, data)

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        return merge_entries(self._ledgers.get(rank, []))

    def is_complete(self, rank: int, step: int) -> bool:
        return self._step(rank, step).is_complete

    def _step(self, rank: int, step: int) -> _Step:
        if step not in self.steps(rank):
            raise InputError(f"this run has no step {step} of rank {rank}; it has {list(self.steps(rank))}")
        return self._ranks[rank][step]


class MemorySink:
    """Writes one rank of a MemoryRun; implements Sink."""

    abilities = SinkAbilities(keeps_views=True)

    def __init__(self, steps: dict[int, _Step], ledger: list[LedgerEntry]) -> None:
        self._steps = steps
        self._ledger = ledger
        self._open: _Step | None = None

    def begin_step(self, step: int) -> None:
        self.end_step()
        if step in self._steps:
            raise FileExistsError(f"step {step} was recorded already")
        self._open = self._steps[step] = _Step()

    def write(self, record: CallRecord) -> None:
        self._current().records.append(record)

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        data = bytes(tensor_bytes(dtype, shape, buffer))
        hash = content_hash(data)
        self._current().tensors.setdefault(hash, data)
        return content_key(hash, dtype, shape)

    def note(self, entry: LedgerEntry) -> None:
        self._ledger.append(entry)

    def end_step(self) -> None:
        if self._open is not None:
            self._open.is_complete = True
            self._open = None

    def close(self, *, complete: bool = True) -> None:
        if complete:
            self.end_step()
        self._open = None

    def _current(self) -> _Step:
        if self._open is None:
            raise RuntimeError("a record or tensor was written before begin_step()")
        return self._open
