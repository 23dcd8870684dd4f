# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a step lie, in its records and in its table: what `refilling.py` needs to make the tables of steps like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ulpscope.store.native.arrow_arrays import codes_of
from ulpscope.store.native.call_groups import HEAD, Group, good_frames, slots_begin
from ulpscope.store.native.frames import CallFrame, SlotRow, SummaryRow
from ulpscope.store.native.packed_values import Integers, Walk, expect
from ulpscope.store.native.refilling import Holes, Kind, Mold, holes_of_texts

__all__ = ["COUNTS", "NUM_ABOUT", "REALS", "SUMMARY_COLUMNS", "mold_of"]

SUMMARY_COLUMNS = SummaryRow.__struct_fields__
REALS = ("min", "max", "mean", "rms")
COUNTS = ("num_zero", "num_subnormal")  # of which each step has others
NUM_ABOUT = SlotRow.__struct_fields__.index("summary")  # elements that tell of a tensor besides its values


def mold_of(group: Group, arguments: Any, table: bytes, row_group: Any, text: Callable[[bytes], bytes | None]) -> Mold:
    """For steps like this group, whose table and column of arguments these are; `row_group` is what pyarrow tells of the table."""
    chunks = _Chunks(row_group)
    words, values = _argument_holes(group, arguments)
    holes = [*_frame_holes(group.data, chunks), *_slot_holes(group, chunks), values]
    return Mold(group.data, table, holes, words, chunks.end_of_dictionary("arguments"), text)


class _Chunks:
    """Where columns lie in a table."""

    def __init__(self, row_group: Any) -> None:
        columns = [row_group.column(k) for k in range(row_group.num_columns)]
        self._columns = {column.path_in_schema: column for column in columns}

    def end_of_dictionary(self, name: str) -> int:
        return int(self._columns[name].data_page_offset)

    def end(self, name: str) -> int:
        column = self._columns[name]
        return int((column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size)

    def holes(self, kind: Kind, name: str, begins: Integers, ends: Integers) -> Holes:
        """Numbers of eight bytes, the last of which ends where the column does."""
        return Holes(kind, begins, ends, self.end(name) - 8 * np.arange(len(begins), 0, -1))


def _frame_holes(data: bytes, chunks: _Chunks) -> Iterator[Holes]:
    """The heads of the frames, and the number of the step, which the first frame tells last."""
    bounds, _ = good_frames(data)
    begins = bounds[:-1]
    kinds = np.frombuffer(data, np.uint8).take(begins + HEAD.size + 1)
    expect(bounds[-1] == len(data) and kinds[0] == 0 and kinds[1:].all())
    yield Holes(Kind.FRAME, begins, begins + HEAD.size, np.zeros_like(begins))
    walk = Walk(data, begins[:1] + HEAD.size)
    walk.enter(4)
    walk.skip(3, before=bounds[1:2])
    yield Holes(Kind.COUNT, walk.at, bounds[1:2], np.array([chunks.end_of_dictionary("step") - 8]))


def _slot_holes(group: Group, chunks: _Chunks) -> Iterator[Holes]:
    walk = Walk(group.data, group.slots)
    before = np.append(group.slots[1:], len(group.data))
    walk.enter(len(SlotRow.__struct_fields__))
    walk.skip(NUM_ABOUT, before)
    taken = walk.present()
    inner = Walk(group.data, walk.at[taken])
    inner.enter(len(SUMMARY_COLUMNS))
    for name in SUMMARY_COLUMNS:
        begins, present = inner.at, inner.present()
        inner.skip(1, before[taken])
        if name in REALS or name in COUNTS:
            yield chunks.holes(Kind.REAL if name in REALS else Kind.COUNT, name, begins[present], inner.at[present])
    walk.skip(1, before)
    begins, absent = walk.texts()
    present = np.ones(len(begins), np.bool_) if absent is None else ~absent
    yield holes_of_texts(begins[present], walk.at[present], chunks.end("fingerprint"))


def _argument_holes(group: Group, column: Any) -> tuple[list[bytes], Holes]:
    """The words that one call alone has, with the spaces behind them; and where the arguments and modes of these calls lie."""
    num_rows = np.maximum(group.num_slots, 1)
    codes = codes_of(column)[np.cumsum(num_rows) - num_rows]
    words = [word.encode() for word in column.dictionary.to_pylist()]
    uses = np.bincount(codes[codes >= 0], minlength=len(words))
    num_shared = int(np.count_nonzero(uses > 1))
    alone = np.flatnonzero(codes >= num_shared)
    walk = Walk(group.data, group.begins[alone])
    walk.enter(len(CallFrame.__struct_fields__) + 1)
    walk.skip(8, before=group.ends[alone])
    ends = slots_begin(group)[alone] - np.select([group.num_slots[alone] < 16, group.num_slots[alone] < 1 << 16], [1, 3], 5)
    return words[num_shared:], Holes(Kind.VALUES, walk.at, ends, codes[alone] - num_shared)
