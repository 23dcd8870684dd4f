# SPDX-License-Identifier: Apache-2.0
"""Compare many pairs of kept tensors by the compiled kernel alone: it reads files, verifies hashes, gathers views and adds up.

Any number of threads work on the pairs at once without the interpreter. A caller that needs a pair before any thread has begun it compares
that pair itself. Where something is wrong with a pair the kernel only says so: reading the pair the usual way then raises the error.
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from math import prod
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from ulpscope.format.content import hash_words
from ulpscope.model import DTYPES
from ulpscope.numerics.buffers import real_dtype, value_at
from ulpscope.numerics.difference.difference import is_in_range
from ulpscope.numerics.difference.difference_kernel import kernel_arguments, pair_sums
from ulpscope.numerics.difference.kept_place import Kept
from ulpscope.numerics.difference.pair_sums import Difference
from ulpscope.numerics.gathering import pieces
from ulpscope.numerics.kernel import BEST_TARGET, KERNEL
from ulpscope.numerics.layouts import BYTES_OF_PARTS, RESULT_BYTES, RESULT_FORMAT, UNIT_WORDS, Units

__all__ = ["ComparedPair", "KeptPairs", "Scratch"]

SHORTEST_BYTES = 241  # the kernel hashes nothing shorter
MOST_BYTES_OF_VIEWS = 32 << 20  # of both sides: views need all bytes in memory, while a whole tensor is read in parts
MOST_FILES = 64
_unpack_result = Struct(RESULT_FORMAT).unpack_from  # `struct result`
_Layout: TypeAlias = "tuple[int, int, list[int], list[int]]"


class ComparedPair(NamedTuple):
    """The sums of a pass over two tensors, and both values at the worst place."""

    found: Difference
    subject: float
    reference: float


class Scratch:
    """Memory that threads work in, used again from one set of pairs to the next; its pages are made by the first write."""

    def __init__(self) -> None:
        self._free: list[ctypes.Array[ctypes.c_char]] = []

    def take(self, size: int) -> ctypes.Array[ctypes.c_char]:
        try:
            room = self._free.pop()
        except IndexError:
            return _room_of(size)
        return room if len(room) >= size else _room_of(size)

    def give_back(self, room: ctypes.Array[ctypes.c_char]) -> None:
        self._free.append(room)


def _room_of(size: int) -> ctypes.Array[ctypes.c_char]:
    """Map fresh memory: its pages are made by the first write."""
    return (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))


class _Unit(NamedTuple):
    """Two sets of kept bytes, and the pairs of tensors that lie in them: the number of each pair, and the layout of both sides."""

    subject: Kept
    reference: Kept
    views: list[tuple[int, _Layout | None, _Layout | None]]

    @property
    def is_in_parts(self) -> bool:
        return len(self.views) == 1 and self.views[0][1:] == (None, None)

    @property
    def num_bytes(self) -> int:
        return self.subject.length + self.reference.length


class KeptPairs:
    """Pairs to compare: `add` them, call `begin` once; from then on any thread may `work`, and one thread asks what was `compared`."""

    def __init__(self, scratch: Scratch, kernel: ctypes.CDLL | None = KERNEL, target: int = BEST_TARGET) -> None:
        self._kernel = kernel if kernel is not None and hasattr(kernel, "ulpscope_compare_kept") else None
        self._target = target
        self._scratch = scratch
        self._scratch_bytes = BYTES_OF_PARTS
        self._units: dict[tuple[str, str], _Unit] = {}
        self._files: set[int] = set()
        self._kinds: list[tuple[str, int]] = []  # of each pair: dtype and number of reals
        self._places: list[tuple[int, int]] = []  # of each pair: its unit, and where its result begins
        self._shared = Units()
        self._memory: tuple[Any, ...] = ()
        self._results = bytearray()

    def add(self, subject: Kept | None, reference: Kept | None) -> int | None:
        """Add a pair and return its number, or None where it has to be read the usual way."""
        if self._kernel is None or subject is None or reference is None or not _are_alike(subject, reference):
            return None
        if not self._may_hold(subject.fd, reference.fd):
            return None
        ours, theirs = _layout(subject), _layout(reference)
        unit = self._units.get((subject.hash, reference.hash))
        if not (unit is None and ours is None and theirs is None) and subject.length + reference.length > MOST_BYTES_OF_VIEWS:
            return None
        if unit is None:
            unit = self._units[subject.hash, reference.hash] = _Unit(subject, reference, [])
        unit.views.append((len(self._kinds), ours, theirs))
        self._kinds.append((subject.dtype, prod(subject.shape) * (2 if DTYPES[subject.dtype].kind == "complex" else 1)))
        return len(self._kinds) - 1

    def _may_hold(self, *files: int) -> bool:
        """Tell whether the files may be held open: a process may have only so many."""
        if not self._files.issuperset(files):
            if len(self._files) >= MOST_FILES:
                return False
            self._files.update(files)
        return True

    def begin(self) -> None:
        """Lay out all pairs for the kernel; none can be added afterwards."""
        units: list[int] = []
        views: list[int] = []
        numbers = array("Q")
        self._places = [(0, 0)] * len(self._kinds)
        many = 0
        for at, unit in enumerate(self._units.values()):
            units += (*_kept_words(unit.subject), *_kept_words(unit.reference), many, len(unit.views), unit.is_in_parts, 0)
            for number, ours, theirs in unit.views:
                self._places[number] = (at, many * RESULT_BYTES)
                dtype, numel = self._kinds[number]
                kind, _, values, order = kernel_arguments(real_dtype(dtype))
                views += (kind, numel, values or 0, order or 0, *_words(ours, numbers), *_words(theirs, numbers))
                many += 1
            if not unit.is_in_parts:
                self._scratch_bytes = max(self._scratch_bytes, 2 * unit.num_bytes)
        self._results = bytearray(RESULT_BYTES * many)
        results = (ctypes.c_char * len(self._results)).from_buffer(self._results)
        self._memory = (array("Q", units), array("Q", views), numbers, results)
        addresses = [block.buffer_info()[0] for block in self._memory[:3]]
        self._shared = Units(*addresses, ctypes.addressof(results), len(self._units), 0)

    def begun(self, subject: Kept | None, reference: Kept | None) -> int | None:
        """Return the number of a pair that some thread has begun and that consists of all bytes of both sides."""
        if subject is None or reference is None or subject.strides is not None or reference.strides is not None:
            return None
        unit = self._units.get((subject.hash, reference.hash))
        if unit is None or not unit.is_in_parts or (unit.subject.dtype, unit.subject.shape) != (subject.dtype, subject.shape):
            return None
        number = unit.views[0][0]
        return number if self._memory[0][(self._places[number][0] + 1) * UNIT_WORDS - 1] else None

    def work(self) -> None:
        """Compare pairs until none is left to begin."""
        if self._units:
            self._run(-1)

    def stop(self) -> None:
        """Keep working threads from beginning another pair."""
        self._shared.next = self._shared.count

    def compared(self, number: int) -> ComparedPair | None:
        """Return the sums of a pair, or None where it has to be read the usual way."""
        unit, place = self._places[number]
        return _compared(*self._kinds[number], self._results, place) if self._run(unit) else None

    def _run(self, wanted: int) -> bool:
        assert self._kernel is not None
        room = self._scratch.take(self._scratch_bytes)
        try:
            return bool(self._kernel.ulpscope_compare_kept(ctypes.byref(self._shared), wanted, room, self._target))
        finally:
            self._scratch.give_back(room)


def _are_alike(subject: Kept, reference: Kept) -> bool:
    return (
        subject.dtype == reference.dtype
        and subject.shape == reference.shape
        and subject.dtype in DTYPES
        and min(subject.length, reference.length) >= SHORTEST_BYTES
    )


def _layout(kept: Kept) -> _Layout | None:
    """Return the layout of a view in bytes: the first element, how many bytes lie together, extents and steps of the rest. None: it is all
    bytes.
    """
    if kept.strides is None:
        return None
    size = DTYPES[kept.dtype].size_bytes
    return (kept.first * size, *pieces(size, kept.shape, kept.strides))


def _words(layout: _Layout | None, numbers: array[int]) -> tuple[int, int, int, int, int]:
    """Return `struct layout` of _kernel.c, with places among the numbers instead of addresses."""
    if layout is None:
        return 0, 0, 0, 0, 0
    first, piece, extents, steps = layout
    place = len(numbers)
    numbers.extend(extents)
    numbers.extend(steps)
    return first, piece, len(extents), place, place + len(extents)


def _kept_words(kept: Kept) -> tuple[int, int, int, int, int]:
    return kept.fd, kept.offset, kept.length, *hash_words(kept.hash)


def _compared(dtype: str, numel: int, results: bytearray, place: int) -> ComparedPair | None:
    *fields, subject, reference = _unpack_result(results, place)
    found = pair_sums(numel, fields[:18], ())
    found.ulp_buckets = (fields[18], fields[19])
    if not is_in_range(found, dtype):
        return None
    return ComparedPair(found, value_at(dtype, memoryview(subject), 0), value_at(dtype, memoryview(reference), 0))
