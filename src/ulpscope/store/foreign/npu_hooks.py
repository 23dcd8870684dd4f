# SPDX-License-Identifier: Apache-2.0
"""Read the dumps of torch_npu.hooks: one text file named .pkl with a JSON array a line, `[name, values, dtype, shape]`.

    ["Module_Linear_forward_input.0", [0.5, -1.25], "torch.float32", [1, 2]]

Names carry no count, so calls are counted in order of appearance. In backward, `input` is the gradient of an output. A true pickle is never
loaded. Values are read on demand; only the place of each line stays in memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.errors import DamagedRunError, NotARunError
from ulpscope.model import Arguments, CallName, CallRecord, LedgerEntry, Phase, RunInfo, Slot, TensorData, TensorRecord
from ulpscope.numerics.summary.summary import summarize
from ulpscope.store.foreign.ptdbg_lines import json_array
from ulpscope.store.foreign.reader import canonical_dtype, join_backward, nested_arguments, operation, tensor_shape

__all__ = ["HooksLine", "HooksRun", "open_dump", "recognize"]

_NAME = re.compile(
    r"(?:\d{1,9}_)?(?P<namespace>Module|Tensor|Torch|Functional)_(?P<name>.+)_"
    r"(?P<phase>forward|backward)_(?P<role>input|output)(?P<path>(?:\.\d{1,4}){0,8})"
)
_BEGINNING = re.compile(rb'\s*\[\s*"(?:\d{1,9}_)?(?:Module|Tensor|Torch|Functional)_[^"]{1,512}"\s*,\s*\[')


@dataclass(frozen=True, slots=True)
class HooksLine:
    """One tensor of the file: its name, and where its line begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def is_output(self) -> bool:
        return "output" in self.name


def recognize(path: Path) -> bool:
    """Tell whether the path looks like a dump of torch_npu.hooks."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return _BEGINNING.match(stream.read(1024)) is not None


def open_dump(path: Path) -> HooksRun:
    """Open a dump by its file."""
    return HooksRun(path)


class HooksRun:
    """One file as a `Run` of one rank and one step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: tuple[CallRecord, ...] | None = None
        self._ledger: list[LedgerEntry] = []

    @property
    def path(self) -> Path:
        return self._path

    @property
    def info(self) -> RunInfo:
        return RunInfo(format="torch_npu.hooks", tool="torch_npu.hooks")

    def ranks(self) -> tuple[int, ...]:
        return (0,)

    def steps(self, rank: int) -> tuple[int, ...]:
        return (0,) if rank == 0 else ()

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        if (rank, step) != (0, 0):
            raise NotARunError(f"'{self._path}' holds rank 0 and step 0 only, not step {step} of rank {rank}")
        if self._records is None:
            self._records = tuple(join_backward(self._calls()))
        yield from self._records

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        offset, _, shape = content.partition(":")
        if not offset.isdecimal():
            raise DamagedRunError(f"'{self._path}' keeps no tensor named '{content}'")
        sizes = tuple(int(size) for size in shape.split(",") if size)
        values = self.values(int(offset), sizes)
        return TensorData("float32", sizes, values.view(np.uint8).data)

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        return tuple(self._ledger)

    def is_complete(self, rank: int, step: int) -> bool:
        return not self._ledger

    def lines(self) -> Iterator[HooksLine]:
        """Yield the tensors of the file in its order."""
        for _, line in self._read():
            yield line

    def values(self, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Read the values of the line that begins at `offset`."""
        with self._path.open("rb") as stream:
            stream.seek(offset)
            parsed = json_array(stream.readline())
        values = _floats(parsed[1]) if parsed is not None and len(parsed) > 1 else None
        if values is None or values.size != prod(shape):
            raise DamagedRunError(f"'{self._path}' has no {prod(shape)} numbers at byte {offset}; dump this run again")
        return values

    def _read(self) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.float32]] | None, HooksLine]]:
        self._ledger.clear()
        offset = 0
        with self._path.open("rb") as stream:
            for count, text in enumerate(stream, 1):
                parsed = json_array(text)
                if parsed is None and not text.endswith(b"\n"):
                    self._ledger.append(LedgerEntry(what=f"reading line {count} of {self._path.name}", why="it was not written to its end"))
                    return
                line = _line(parsed, offset) if parsed else None
                if parsed is None or (parsed and line is None):
                    raise DamagedRunError(
                        f"'{self._path}' is not [name, values, dtype, shape] in line {count}; if it is a true pickle it is not loaded, "
                        "since that would run the code inside; dump this run again"
                    )
                if line is not None:
                    values = _floats(parsed[1])
                    yield (values if values is not None and values.size == prod(line.shape) else None), line
                offset += len(text)

    def _calls(self) -> Iterator[CallRecord]:
        counts: Counter[tuple[str, str]] = Counter()
        for order, (_, group) in enumerate(groupby(_numbered(self._tensors()), key=lambda item: item[0])):
            slots = [(match, record) for _, match, record in group]
            match = slots[0][0]
            op = f"module.{match['name']}" if match["namespace"] == "Module" else operation(match["namespace"], match["name"])
            phase: Phase = "forward" if match["phase"] == "forward" else "backward"
            call = CallName(op, counts[op, phase])
            counts[op, phase] += 1
            inputs = {record.slot.path: {"$tensor": str(record.slot)} for _, record in slots if record.slot.role == "input"}
            yield CallRecord(
                rank=0,
                step=0,
                order=order,
                call=call,
                phase=phase,
                level="module" if match["namespace"] == "Module" else "api",
                arguments=Arguments(args=tuple(nested_arguments(inputs, self._path))) if phase == "forward" else None,
                slots=tuple(record for _, record in slots),
            )

    def _tensors(self) -> Iterator[tuple[re.Match[str], TensorRecord]]:
        for values, line in self._read():
            match = _NAME.fullmatch(line.name)
            if match is None:
                continue
            slot = Slot.parse(match["role"] + (match["path"] or ".0"))
            if values is None:
                yield match, TensorRecord(slot=slot, dtype=canonical_dtype(line.dtype), shape=line.shape)
                continue
            summary, fingerprint = summarize("float32", values.view(np.uint8))
            content = f"{line.offset}:{','.join(map(str, line.shape))}"
            yield (
                match,
                TensorRecord(slot=slot, dtype="float32", shape=line.shape, summary=summary, fingerprint=fingerprint, content=content),
            )


def _numbered(tensors: Iterator[tuple[re.Match[str], TensorRecord]]) -> Iterator[tuple[int, re.Match[str], TensorRecord]]:
    """Number the calls: a call ends where an input follows an output, where a slot comes again, or where the name changes."""
    number = 0
    last: tuple[tuple[str, str, str], str, frozenset[Slot]] | None = None
    for match, record in tensors:
        key = (match["namespace"], match["name"], match["phase"])
        if last is not None and (key != last[0] or (last[1] == "output" and match["role"] == "input") or record.slot in last[2]):
            number, last = number + 1, None
        seen = last[2] if last is not None else frozenset()
        last = (key, match["role"], seen | {record.slot})
        yield number, match, record


def _line(parsed: list[Any], offset: int) -> HooksLine | None:
    if len(parsed) != 4 or not isinstance(parsed[0], str) or len(parsed[0]) > 1024 or not isinstance(parsed[1], list):
        return None
    shape = tensor_shape(parsed[3])
    return None if shape is None else HooksLine(parsed[0], str(parsed[2])[:64], shape, offset)


def _floats(values: object) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    return array if array.ndim == 1 else None
