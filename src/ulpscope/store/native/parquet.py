# SPDX-License-Identifier: Apache-2.0
"""Copy a step's records into a Parquet table, one row for each slot, for readers with a query engine and without ulpscope.

The frames are the record; this copy is never read back. It holds no column statistics: readers that skip row groups by the minimum and
maximum of a float column lose the rows with NaN, which are the ones people look for.

The copy is made inside the training process and has to be cheap, so calls and slots are not decoded one by one:

- NumPy walks through the MessagePack of all of them at once, element by element; numbers and text are taken from where they lie, and
  repeating values (arguments, shapes, names) are decoded once for each distinct run of bytes;
- steps resemble each other: where the bytes of a step equal those of the last one, its columns are used again;
- where slots begin is guessed, and proven (`call_groups.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import GenericAlias
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from ulpscope.format.call_groups import BYTES_AT_ONCE, Group, Stacks, ends_of_slots, groups, groups_encoded_again, slots_begin
from ulpscope.format.frames import UNREADABLE, PlainCall, SlotRow, StartFrame, SummaryRow
from ulpscope.format.packed_values import Flags, Integers, Unusual, Walk, expect
from ulpscope.model import Level, Phase, Slot
from ulpscope.store.native.appending import FILE_MODE
from ulpscope.store.native.arrow_arrays import (
    coded_words,
    cut_out,
    in_order,
    integer_array,
    list_array,
    plain_array,
    text_array,
    told_apart,
    word_array,
)

__all__ = ["write_parquet"]

BYTES_REMEMBERED = 4 << 20

SUMMARY_COLUMNS = SummaryRow.__struct_fields__
REALS = ("min", "max", "mean", "rms")
NUM_ABOUT = SlotRow.__struct_fields__.index("summary")  # elements that describe a tensor besides its values

_json = json.JSONEncoder(default=str, check_circular=False).encode
_types = {field.name: field.type for field in msgspec.structs.fields(PlainCall)}
_context_decoder = msgspec.msgpack.Decoder(GenericAlias(tuple, (_types["arguments"], _types["modes"], list[None])))
_about_decoder = msgspec.msgpack.Decoder(SlotRow)


def write_parquet(records: Path, table: Path) -> bool:
    """Write the table beside the records; return False if pyarrow is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return False
    draft = table.with_name(f".{table.name}")
    try:
        _write_columns(pa, pq, records, draft)
        draft.replace(table)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return True


def _write_columns(pa: Any, pq: Any, records: Path, draft: Path) -> None:
    try:
        _write(pa, pq, draft, groups(records))
    except (Unusual, IndexError, pa.ArrowInvalid, *UNREADABLE):
        _write(pa, pq, draft, groups_encoded_again(records))


def _write(pa: Any, pq: Any, draft: Path, groups: Iterable[tuple[StartFrame, Group, Stacks]]) -> None:
    schema, options = _schema(pa)
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE))
    with (
        pa.output_stream(str(draft), compression=None, buffer_size=BYTES_AT_ONCE) as file,
        pq.ParquetWriter(file, schema, **options) as writer,
    ):
        for group in groups:
            columns = _columns(pa, *group)
            writer.write_table(pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema))


@lru_cache(maxsize=1)
def _schema(pa: Any) -> tuple[Any, dict[str, Any]]:
    """Return the columns, and the options for writing them. Some columns travel as codes of distinct words: the file does not keep this
    schema, and readers see plain text.
    """
    words, text, integer, real, flag = pa.dictionary(pa.int32(), pa.string()), pa.string(), pa.int64(), pa.float64(), pa.bool_()
    sizes = pa.list_(pa.int64())
    call = {"rank": integer, "step": integer, "order": integer, "op": words, "index": integer, "phase": words, "level": words}
    context = {"module": words, "parent": words, "recompute": flag, "arguments": words, "file": words, "line": integer, "function": words}
    slot = {"slot": words, "dtype": words, "shape": sizes, "strides": sizes, "device": words, "requires_grad": flag}
    summary = {name: real if name in REALS else integer for name in SUMMARY_COLUMNS}
    types = call | context | slot | summary | {"fingerprint": text, "content": words, "note": words}
    options: dict[str, Any] = {
        "write_statistics": False,
        "store_schema": False,
        "write_batch_size": 1 << 16,
    }
    options["use_dictionary"] = [name for name, kind in types.items() if kind is words]
    return pa.schema([*types.items()]), options


# ---- columns


class _Last(NamedTuple):
    """The bytes of the last group, and the columns that were made of them."""

    pieces: Any
    others: tuple[Any, ...]
    columns: dict[str, Any]


_last: dict[str, _Last] = {}


def _remember(kind: str, pieces: Any, others: tuple[Any, ...], columns: dict[str, Any]) -> dict[str, Any]:
    if pieces.nbytes <= BYTES_REMEMBERED:
        _last[kind] = _Last(pieces, others, columns)
    return columns


def _columns(pa: Any, start: StartFrame, group: Group, stacks: Stacks) -> dict[str, Any]:
    """Return the columns of a group; a call without slots has one row, whose slot is null."""
    num_rows = np.maximum(group.num_slots, 1)
    rows = np.repeat(np.arange(len(num_rows)), num_rows)
    walk = Walk(group.data, group.slots)
    slots = _slot_columns(pa, walk)
    calls = _call_columns(pa, group, ends_of_slots(group, walk.at), stacks, rows)
    if not group.num_slots.all():
        slots = _spread(pa, slots, np.repeat(group.num_slots > 0, num_rows))
    run = {name: plain_array(pa, np.full(len(rows), number, np.int64)) for name, number in (("rank", start.rank), ("step", start.step))}
    return run | calls | slots


def _spread(pa: Any, columns: dict[str, Any], filled: Flags) -> dict[str, Any]:
    """Spread the columns over all rows, with nulls in rows that are not filled."""
    places = plain_array(pa, np.maximum(np.cumsum(filled) - 1, 0), ~filled)
    return {name: column.take(places) for name, column in columns.items()}


def _call_columns(pa: Any, group: Group, slots_end: Integers, stacks: Stacks, rows: Integers) -> dict[str, Any]:
    """Return the columns of calls, from the bytes in front of their slots and behind them."""
    begin_of_slots = slots_begin(group)
    sources = {number: stack.lines[0][:3] for number, stack in stacks.items() if stack.lines}
    begins, ends = np.stack([group.begins, slots_end], axis=1).ravel(), np.stack([begin_of_slots, group.ends], axis=1).ravel()
    pieces, others = cut_out(pa, group.data, begins, ends), (group.num_slots.tobytes(), sources)
    last = _last.get("calls")
    if last is not None and last.others == others and pieces.equals(last.pieces):
        return last.columns

    walk = Walk(group.data, group.begins)
    walk.enter(len(PlainCall.__struct_fields__) + 1)
    walk.at = walk.at + 1
    columns = {"order": integer_array(pa, walk, rows), "op": word_array(pa, walk, rows), "index": integer_array(pa, walk, rows)}
    columns |= {name: word_array(pa, walk, rows) for name in ("phase", "level", "module", "parent")}
    expect(
        {*columns["phase"].dictionary.to_pylist()} <= {*get_args(Phase)}
        and {*columns["level"].dictionary.to_pylist()} <= {*get_args(Level)}
    )
    columns["arguments"] = _arguments(pa, cut_out(pa, group.data, walk.at, begin_of_slots), group.num_slots, rows)
    walk.at = slots_end
    columns |= _sources(pa, *walk.integers(), sources, rows)
    columns["recompute"] = plain_array(pa, walk.flags()[rows])
    expect(walk.at == group.ends)
    return _remember("calls", pieces, others, columns)


def _arguments(pa: Any, pieces: Any, num_slots: Integers, rows: Integers) -> Any:
    """Return the text of the arguments, decoded once for each distinct sequence of arguments, modes and the beginning of a list of so many
    slots.
    """
    codes, distinct = told_apart(pieces)
    counts = np.zeros(len(distinct), np.int64)
    counts[codes] = num_slots
    expect(counts[codes] == num_slots)
    contexts = [_context_decoder.decode(b"\x93" + one + b"\xc0" * count) for one, count in zip(distinct, counts.tolist(), strict=True)]
    texts = [_arguments_text(arguments) for arguments, _, _ in contexts]
    return coded_words(pa, codes[rows], texts)


def _arguments_text(arguments: Any) -> str | None:
    """Write positional and keyword arguments in JSON as Python writes it, where NaN stays NaN."""
    return None if arguments is None else _json([arguments.args, arguments.kwargs or {}])


def _sources(pa: Any, numbers: Integers, absent: Flags | None, sources: dict[int, tuple[str, int, str]], rows: Integers) -> dict[str, Any]:
    """Return file, line and function of the innermost line of each call's stack."""
    place = {number: k for k, number in enumerate(sources)}
    codes = np.array([place.get(number, -1) for number in numbers.tolist()], np.int64)
    codes = (codes if absent is None else np.where(absent, -1, codes))[rows]
    files, lines, functions = ([source[k] for source in sources.values()] for k in range(3))
    line = plain_array(pa, np.array([*lines, 0], np.int64)[codes], codes < 0)
    return {"file": coded_words(pa, codes, files), "line": line, "function": coded_words(pa, codes, functions)}


def _slot_columns(pa: Any, walk: Walk) -> dict[str, Any]:
    columns = _about_columns(pa, walk) | _summary_columns(pa, walk)
    columns |= {"fingerprint": text_array(pa, walk), "content": word_array(pa, walk), "note": word_array(pa, walk)}
    expect(columns["note"].null_count == 0)
    return columns


def _about_columns(pa: Any, walk: Walk) -> dict[str, Any]:
    """Return the columns that describe a tensor besides its values. Slots whose bytes equal those of the last step are not walked through
    again.
    """
    begins, last = walk.at, _last.get("slots")
    if last is not None and len(last.pieces) == len(begins):
        ends = begins + last.others[0]
        if in_order(begins, ends, len(walk.data)) and cut_out(pa, walk.data, begins, ends).equals(last.pieces):
            walk.at = ends
            return last.columns
    walk.enter(len(SlotRow.__struct_fields__))
    first = walk.at
    walk.skip(NUM_ABOUT, before=np.append(begins[1:], len(walk.data)))
    codes, distinct = told_apart(cut_out(pa, walk.data, first, walk.at))
    columns = _told_columns(pa, codes, [_about_decoder.decode((0x90 + NUM_ABOUT).to_bytes(1, "big") + one) for one in distinct])
    return _remember("slots", cut_out(pa, walk.data, begins, walk.at), (walk.at - begins,), columns)


def _told_columns(pa: Any, codes: Integers, told: list[SlotRow]) -> dict[str, Any]:
    indices = plain_array(pa, codes)
    return {
        "slot": coded_words(pa, codes, [str(Slot(row.slot.role, row.slot.path)) for row in told]),
        "dtype": coded_words(pa, codes, [row.dtype for row in told]),
        "shape": list_array(pa, [row.shape for row in told]).take(indices),
        "strides": list_array(pa, [row.strides for row in told]).take(indices),
        "device": coded_words(pa, codes, [row.device for row in told]),
        "requires_grad": plain_array(pa, np.array([row.requires_grad for row in told], np.bool_)[codes]),
    }


def _summary_columns(pa: Any, walk: Walk) -> dict[str, Any]:
    taken = walk.present()
    everywhere = taken.all()
    inner = walk if everywhere else Walk(walk.data, walk.at[taken])
    inner.enter(len(SUMMARY_COLUMNS))
    columns = {"numel": inner.integers()} | dict(zip(REALS, inner.reals(len(REALS)), strict=True))
    columns |= {name: inner.integers() for name in SUMMARY_COLUMNS[len(columns) :]}
    numel, without = columns["numel"]
    expect(without is None and (numel >= 0).all())
    arrays = {name: plain_array(pa, values, absent) for name, (values, absent) in columns.items()}
    if everywhere:
        return arrays
    walk.at = walk.at + 1
    walk.at[taken] = inner.at
    return _spread(pa, arrays, taken)
