# SPDX-License-Identifier: Apache-2.0
"""A copy of a step's records as a Parquet table, one row for each slot, for whoever has a query engine and not us.

The frames are the record; this copy is never read back. It holds no column statistics: readers that skip row groups by
the minimum and maximum of a float column lose the rows with NaN, which are the ones people look for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from ulpscope.model import Role, Slot
from ulpscope.store.frames import FILE_MODE, CallFrame, FrameReader, SlotRow, StackFrame, StartFrame, SummaryRow

__all__ = ["write_parquet"]

RECORDS_IN_GROUP = 5_000

_CALL_COLUMNS = CallFrame.__struct_fields__
_SLOT_COLUMNS = SlotRow.__struct_fields__
_SUMMARY_COLUMNS = SummaryRow.__struct_fields__
_NO_SOURCE = (None,) * 4
_NO_SLOT = (None,) * len(_SLOT_COLUMNS)
_NO_SUMMARY = (None,) * len(_SUMMARY_COLUMNS)

_json = json.JSONEncoder(default=str, check_circular=False).encode


def write_parquet(records: Path, table: Path) -> bool:
    """Write the table beside the records; False where pyarrow is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return False
    schema = _schema(pa)
    draft = table.with_name(f".{table.name}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), FILE_MODE)
    try:
        with os.fdopen(fd, "wb") as file, pq.ParquetWriter(file, schema, write_statistics=False) as writer:
            for group in _groups(records):
                writer.write_table(pa.table(_columns(pa, schema, *group), schema=schema))
        draft.replace(table)
    finally:
        draft.unlink(missing_ok=True)
    return True


def _schema(pa: Any) -> Any:
    text, integer, real, sizes, flag = pa.string(), pa.int64(), pa.float64(), pa.list_(pa.int64()), pa.bool_()
    call = {"rank": integer, "step": integer, "order": integer, "op": text, "index": integer, "phase": text, "level": text}
    context = {"module": text, "parent": text, "recompute": flag, "arguments": text, "file": text, "line": integer, "function": text}
    slot = {"slot": text, "dtype": text, "shape": sizes, "strides": sizes, "device": text, "requires_grad": flag}
    summary = {name: real if name in ("min", "max", "mean", "rms") else integer for name in _SUMMARY_COLUMNS}
    return pa.schema([*(call | context | slot | summary | {"fingerprint": text, "content": text, "note": text}).items()])


def _groups(path: Path) -> Iterator[tuple[StartFrame, list[CallFrame], dict[int | None, StackFrame]]]:
    frames = iter(FrameReader(path))
    start = next(frames)
    stacks: dict[int | None, StackFrame] = {}

    def calls() -> Iterator[CallFrame]:
        for frame in frames:
            if isinstance(frame, CallFrame):
                yield frame
            elif isinstance(frame, StackFrame):
                stacks[frame.id] = frame

    remaining = calls()
    while group := list(islice(remaining, RECORDS_IN_GROUP)):
        yield start, group, stacks


def _columns(pa: Any, schema: Any, start: StartFrame, calls: list[CallFrame], stacks: dict[int | None, StackFrame]) -> dict[str, Any]:
    """A call without slots has one row, whose slot is null."""
    per_call = _transposed(_CALL_COLUMNS, map(msgspec.structs.astuple, calls))
    per_call["arguments"] = [_arguments_text(arguments) for arguments in per_call["arguments"]]
    per_call |= _transposed(("file", "line", "function", "code"), (_source(stacks.get(stack)) for stack in per_call["stack"]))

    slots = list(chain.from_iterable(slots or (None,) for slots in per_call["slots"]))
    per_slot = _transposed(_SLOT_COLUMNS, (_NO_SLOT if slot is None else msgspec.structs.astuple(slot) for slot in slots))
    per_slot["slot"] = [None if slot is None else _slot_text(slot.role, slot.path) for slot in per_slot["slot"]]
    per_slot |= _transposed(_SUMMARY_COLUMNS, (_NO_SUMMARY if row is None else msgspec.structs.astuple(row) for row in per_slot["summary"]))
    per_slot |= {"rank": [start.rank] * len(slots), "step": [start.step] * len(slots)}

    rows = pa.array(list(chain.from_iterable([number] * max(1, len(slots)) for number, slots in enumerate(per_call["slots"]))))
    types = {field.name: field.type for field in schema}
    arrays = {name: pa.array(values, types[name]).take(rows) for name, values in per_call.items() if name in types}
    return arrays | {name: pa.array(values, types[name]) for name, values in per_slot.items() if name in types}


def _transposed(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def _source(stack: StackFrame | None) -> tuple[Any, ...]:
    return stack.lines[0] if stack is not None and stack.lines else _NO_SOURCE


@lru_cache(maxsize=4096)
def _slot_text(role: Role, path: tuple[int | str, ...]) -> str:
    return str(Slot(role, path))


def _arguments_text(arguments: Any) -> str | None:
    """Positional and keyword arguments in JSON as Python writes it, where NaN stays NaN."""
    return None if arguments is None else _json([arguments.args, arguments.kwargs or {}])
