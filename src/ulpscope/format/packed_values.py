# SPDX-License-Identifier: Apache-2.0
"""Read many values in MessagePack at once: NumPy moves through all of them together, element by element, and takes numbers and text from
where they lie. A value that is not encoded as we encode it raises `Unusual`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "Flags", "Integers", "Reals", "Unusual", "Walk", "expect"]

Integers: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Flags: TypeAlias = NDArray[np.bool_]

# by the first byte of an element
_SIZE = np.zeros(256, np.int64)  # its bytes; 0 where the size stands in the bytes behind
_SIZE[0x00:0x80] = _SIZE[0x90:0xA0] = _SIZE[0xE0:] = _SIZE[[0xC0, 0xC2, 0xC3]] = 1
_SIZE[0xA0:0xC0] = np.arange(1, 33)
_SIZE[0xCA:0xD4] = 5, 9, 2, 3, 5, 9, 2, 3, 5, 9
_WITHIN = np.zeros(256, np.int64)  # how many elements a list has
_WITHIN[0x90:0xA0] = np.arange(16)
_WIDTH = np.zeros(256, np.int64)  # bytes of the length of a long text or list
_WIDTH[0xD9:0xDE] = 1, 2, 4, 2, 4
_SHIFT = np.zeros(256, np.int64)  # of the eight bytes behind the first, the bits that do not belong to the integer
_SHIFT[0xCC:0xD4] = 56, 48, 32, 0, 56, 48, 32, 0


class Unusual(Exception):
    """The frames are not written as we write them."""


def expect(holds: Any) -> None:
    if not np.all(holds):
        raise Unusual


class Walk:
    """A place in each of many values; all of them move on together, element by element."""

    def __init__(self, data: bytes, at: Integers) -> None:
        self.data = data
        self.at = at
        self._bytes = np.frombuffer(data, np.uint8)

    def lying(self, at: Integers, kind: Any) -> NDArray[Any]:
        """Read a value of this kind at each of these places."""
        size = np.dtype(kind).itemsize
        data = self.data if at.max(initial=0) + size <= len(self.data) else self.data + bytes(size)
        values: NDArray[Any] = np.ndarray((len(data) - size + 1,), kind, data, strides=(1,))[at]
        return values

    def enter(self, size: int) -> None:
        expect(self._bytes.take(self.at) == 0x90 + size)
        self.at = self.at + 1

    def present(self) -> Flags:
        present: Flags = self._bytes.take(self.at) != 0xC0
        return present

    def skip(self, count: int, before: Integers) -> None:
        """Move over `count` elements with all they contain, in each value; none may reach its place in `before`."""
        at, left = self.at, np.full(len(self.at), count)
        while (moving := left > 0).any():
            expect(at < before)
            heads = self._bytes.take(at)
            sizes, within = _SIZE.take(heads), _WITHIN.take(heads)
            if not sizes.all():
                self._measure_long(heads, at, sizes, within)
            at = at + sizes * moving
            left += (within - 1) * moving
        self.at = at

    def flags(self) -> Flags:
        heads = self._bytes.take(self.at)
        expect(heads & 0xFE == 0xC2)
        self.at = self.at + 1
        flags: Flags = heads == 0xC3
        return flags

    def integers(self) -> tuple[Integers, Flags | None]:
        """Read integers; return them, and which are nil."""
        heads = self._bytes.take(self.at)
        values = heads.astype(np.int64)
        if heads.max(initial=0) < 0x80:
            self.at = self.at + 1
            return values, None
        absent = self._read_large(heads, values)
        self.at = self.at + _SIZE.take(heads)
        return values, absent

    def reals(self, count: int) -> list[tuple[Reals, Flags | None]]:
        """Read `count` floats of each value, which nearly always lie at equal distances."""
        lying = self.lying(self.at, f"V{9 * count}").view([("head", "u1"), ("value", ">f8")]).reshape(-1, count)
        if not (lying["head"] == 0xCB).all():
            return [self._reals() for _ in range(count)]
        self.at = self.at + 9 * count
        return [(values, None) for values in lying["value"].T.astype(np.float64, order="C")]

    def texts(self) -> tuple[Integers, Flags | None]:
        """Return where the texts begin, and which are nil; each ends where the walk stands afterwards."""
        heads = self._bytes.take(self.at)
        absent = heads == 0xC0
        if (heads == 0xD9).all():
            begins = self.at + 2
            self.at = begins + self._bytes.take(begins - 1)
            return begins, None
        if absent.all() or (heads == 0xA0).all():
            self.at = self.at + 1
            return self.at, absent if absent.any() else None
        expect(absent | (heads >= 0xA0) & (heads < 0xC0) | (heads >= 0xD9) & (heads <= 0xDB))
        begins, sizes = self.at + 1 + _WIDTH.take(heads), _SIZE.take(heads)
        if not sizes.all():
            self._measure_long(heads, self.at, sizes, np.zeros_like(sizes))
        self.at = self.at + sizes
        return begins, absent if absent.any() else None

    def _reals(self) -> tuple[Reals, Flags | None]:
        heads = self._bytes.take(self.at)
        absent = heads == 0xC0
        expect(absent | (heads == 0xCB))
        values = np.where(absent, 0.0, self.lying(self.at + 1, ">f8"))
        self.at = self.at + _SIZE.take(heads)
        return values, absent if absent.any() else None

    def _read_large(self, heads: Bytes, values: Integers) -> Flags | None:
        large, absent = (heads >= 0xCC) & (heads <= 0xD3), heads == 0xC0
        expect(large | absent | (heads < 0x80) | (heads >= 0xE0))
        values[heads >= 0xE0] -= 256
        kinds = heads[large]
        read = self.lying(self.at[large] + 1, ">i8").astype(np.int64)
        if (read[kinds == 0xCF] < 0).any():
            raise OverflowError("a number of a record does not fit into the 64 bits of a table's column")
        unsigned = (read.view(np.uint64) >> _SHIFT[kinds].astype(np.uint64)).view(np.int64)
        values[large] = np.where(kinds >= 0xD0, read >> _SHIFT[kinds], unsigned)
        return absent if absent.any() else None

    def _measure_long(self, heads: Bytes, at: Integers, sizes: Integers, within: Integers) -> None:
        long = np.flatnonzero(sizes == 0)
        width, is_list = _WIDTH[heads[long]], heads[long] >= 0xDC
        expect(width > 0)
        length = (self.lying(at[long] + 1, ">u8").astype(np.uint64) >> (64 - 8 * width).astype(np.uint64)).astype(np.int64)
        sizes[long] = 1 + width + np.where(is_list, 0, length)
        within[long] = np.where(is_list, length, 0)
