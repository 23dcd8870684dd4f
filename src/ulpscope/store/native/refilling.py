# SPDX-License-Identifier: Apache-2.0
"""The Parquet copy of a step that differs from an earlier one only in its numbers: the earlier copy with other numbers in it.

Training repeats itself: the same calls on tensors of the same shapes, and only statistics, fingerprints, the number of the step and a few
arguments (a learning rate, the state of a generator) are new. `parquet.py` writes these so that they always take the same
room: numbers and fingerprints neither compressed nor by dictionary; arguments that one call alone has at the end of their dictionary, in
front of a word of spaces that no row has and that gives way. So where they lie in the records and where in the table is found once,
and the kernel then makes a table in one call, holding no interpreter lock, of any file that is like the first but for these places.

Nothing is taken for granted: a mold is kept only if the records it was found in give the very table that pyarrow wrote, and records
that differ elsewhere, have a bad checksum or a value of another kind or length are left to `parquet.py`, as all are where there is no
kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ulpscope.numerics.checksums import checksum_tables
from ulpscope.numerics.kernel import KERNEL
from ulpscope.store.native.packed_values import Bytes, Integers

__all__ = ["SLACK", "Hole", "Holes", "Kind", "Mold", "Molds", "holes_of_texts", "words_page"]

MOST_MOLDS = 8
BYTES_OF_MOLDS = 16 << 20
LONGEST_PAUSE = 64  # steps
SLACK = 1024  # bytes that changing arguments may take more than those of the first step


class Kind(IntEnum):
    """What may differ at a place; the numbers of the kernel."""

    FRAME = 0  # length and checksum
    REAL = 1
    COUNT = 2
    TEXT = 3  # of one length
    VALUES = 4  # a call's arguments and modes


Hole = np.dtype([("begin", np.int32), ("end", np.int32), ("to", np.int32), ("kind", np.int32)])


class Holes(NamedTuple):
    """Places in the records, and where in the table belongs what lies there: the number of a word where they are VALUES."""

    kind: Kind
    begins: Integers
    ends: Integers
    to: Integers


def words_page(words: list[bytes]) -> bytes:
    """Words as a dictionary lists them."""
    return b"".join([len(word).to_bytes(4, "little") + word for word in words])


def holes_of_texts(begins: Integers, ends: Integers, to: int) -> Holes:
    """Texts that lie in the table up to this place, each behind its length."""
    sizes = ends - begins
    return Holes(Kind.TEXT, begins, ends, to - (sizes + 4)[::-1].cumsum()[::-1] + 4)


class Mold:
    """A table, the records it was made of, and the places that differ. `text` makes of a call's arguments and modes what the table has of
    them, or None where that is not a text.
    """

    def __init__(
        self, data: bytes, table: bytes, holes: list[Holes], words: list[bytes], end_of_words: int, text: Callable[[bytes], bytes | None]
    ) -> None:
        self._first = data
        self._table = np.frombuffer(table, np.uint8).copy()
        self._holes = _in_order(holes)
        self._words = words  # of VALUES, and the spaces
        self._page = range(end_of_words - len(words_page(words)), end_of_words)
        self._text = text
        self._changed = np.empty((len(words), 3), np.int64)
        self._is_as_first = False

    @property
    def num_bytes(self) -> int:
        return len(self._first) + len(self._table) + int(self._holes.nbytes)

    def proves_itself(self) -> bool:
        """Whether the records give the table that they gave before."""
        table = self._table.copy()
        return self._is_within() and self.table_of(self._first) is not None and bool((self._table == table).all())

    def table_of(self, data: bytes) -> Bytes | None:
        """The table of these records, until the next is asked for; None where they are not like the first."""
        assert KERNEL is not None
        count = KERNEL.ulpscope_refill(
            *(data, len(data), self._first, len(self._first), self._holes.ctypes.data, len(self._holes)),
            *(self._table.ctypes.data, self._changed.ctypes.data, checksum_tables().ctypes.data),
        )
        return self._table if count >= 0 and self._put_words(data, self._changed[:count].tolist()) else None

    def _put_words(self, data: bytes, changed: list[list[int]]) -> bool:
        if not changed and self._is_as_first:
            return True
        *words, spaces = self._words
        room = len(spaces)
        for number, begin, end in changed:
            text = self._text(data[begin:end])
            if text is None:
                return False
            room -= len(text) - len(words[number])
            words[number] = text
        if room < 0:
            return False
        self._table[self._page.start : self._page.stop] = np.frombuffer(words_page([*words, b" " * room]), np.uint8)
        self._is_as_first = not changed
        return True

    def _is_within(self) -> bool:
        """Whether the places are in order and within the records and the table: the kernel believes what it is told."""
        begins, ends, to, kinds = (self._holes[name].astype(np.int64) for name in ("begin", "end", "to", "kind"))
        sizes = np.where(kinds == Kind.TEXT, ends - begins, 8)
        in_table = (kinds != Kind.FRAME) & (kinds != Kind.VALUES)
        page = np.array([self._page.start]), np.array([self._page.stop])
        return (
            bool((ends[:-1] <= begins[1:]).all())
            and _lie_within(len(self._first), begins, ends)
            and _lie_within(len(self._table), to[in_table], (to + sizes)[in_table])
            and _lie_within(len(self._table), *page)
            and sorted(to[kinds == Kind.VALUES].tolist()) == [*range(len(self._words) - 1)]
        )


def _lie_within(size: int, begins: Integers, ends: Integers) -> bool:
    return bool((begins >= 0).all() and (begins <= ends).all() and (ends <= size).all())


def _in_order(holes: list[Holes]) -> NDArray[Any]:
    found = np.empty(sum(len(some.begins) for some in holes), Hole)
    at = 0
    for some in holes:
        part = found[at : at + len(some.begins)]
        part["begin"], part["end"], part["to"], part["kind"] = some.begins, some.ends, some.to, some.kind
        at += len(part)
    return found[np.argsort(found["begin"], kind="stable")]


class Molds:
    """The last few that were of use, and the newest. One thread at a time: another does without and waits for nobody, so that a child of a
    fork cannot hang here.
    """

    def __init__(self) -> None:
        self._molds: list[Mold] = []
        self._newest: Mold | None = None
        self._in_use = threading.Lock()
        self._pause, self._next_pause = 0, 1  # steps that go by before another is made

    def wants_more(self) -> bool:
        """Whether to look for places once more: seldom where those that were found are of no use."""
        self._pause -= 1
        return KERNEL is not None and self._pause < 0

    def keep(self, mold: Mold) -> None:
        """Try this one for the next steps."""
        self._newest = mold
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)

    def write(self, data: bytes, write: Callable[[Bytes], None]) -> bool:
        """Have the table of these records written; False where none of the molds fits."""
        if not self._in_use.acquire(blocking=False):
            return False
        try:
            for mold in [*self._molds, *filter(None, [self._newest])]:
                table = mold.table_of(data)
                if table is not None:
                    self._take_to_front(mold)
                    write(table)
                    return True
            return False
        finally:
            self._in_use.release()

    def _take_to_front(self, mold: Mold) -> None:
        if mold is self._newest:
            self._newest = None
        self._molds = [mold, *(one for one in self._molds if one is not mold)][:MOST_MOLDS]
        while len(self._molds) > 1 and sum(one.num_bytes for one in self._molds) > BYTES_OF_MOLDS:
            self._molds.pop()
        self._pause, self._next_pause = 0, 1
