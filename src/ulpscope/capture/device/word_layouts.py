# SPDX-License-Identifier: Apache-2.0
"""Decide how a kernel reads a tensor: the meaning of its words of eight bytes, and their places.

A contiguous tensor is a run of words. Any other is read in units, the largest of 128, 8, 4, 2 or 1 bytes that lie together, through up to
five dimensions; neighbouring dimensions that continue each other are merged. A tensor that fits neither is copied first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ulpscope.model import dtype
from ulpscope.numerics.casting import real_dtype

__all__ = ["CHUNK", "COLUMNS", "FIELDS", "JOINED", "RATIO", "Layout", "layout_of", "merged"]

RATIO = 0xD1342543DE82EF95
"""r of the fingerprint u1 (store format)."""
_INVERSE = pow(RATIO, -1, 2**64)

FIELDS = 28
COLUMNS = 12
CHUNK = 8192
"""The number of words that one program reads."""
JOINED = 128
"""The number of parts of a tensor that are joined at a time."""

_MOST_DIMS = 5
_LINE = 128
_MOST_UNITS = 2**31
_NARROW = {"bfloat16": 0, "float16": 1, "float32": 2}
_FLOAT64, _CODES = 0, 3
_INTEGERS = {"int": 1, "uint": 2}


class Layout(NamedTuple):
    """The layout of a tensor. `variant` chooses the kernel: narrow or not, kind, element size, unit, dimensions; layouts of one `group`
    share a launch. `row` is the row of the table, without address and first program.
    """

    variant: tuple[bool, int, int, int, int]
    group: int
    dtype: str
    real: str
    num_bytes: int
    num_programs: int
    row: bytes


_groups: dict[tuple[tuple[bool, int, int, int, int], str], int] = {}


@lru_cache(maxsize=65536)
def layout_of(name: str, shape: tuple[int, ...], strides: tuple[int, ...], alignment: int) -> Layout | None:
    """Return the layout of a tensor of that dtype whose address is a multiple of `alignment` (1, 2, 4 or 8); None where it has to be copied
    first.
    """
    real = real_dtype(name)
    size, element = dtype(real).size_bytes, dtype(name).size_bytes
    num_bytes = element * int(np.prod(shape, dtype=np.int64))
    dims = _units(shape, strides, element, alignment, in_lines=real in _NARROW)
    if dims is None or num_bytes == 0:
        return None
    unit, sizes, steps = dims
    if unit and num_bytes // unit >= _MOST_UNITS:
        return None
    num_words = (num_bytes + 7) // 8
    num_programs = -(-num_words // CHUNK)
    padded = -(-num_programs // JOINED) * JOINED * CHUNK
    row = np.zeros(FIELDS, np.int64)
    row[1], row[3] = num_bytes, num_programs
    row[4] = np.array(pow(_INVERSE, padded - num_words, 2**64), np.uint64).astype(np.int64)
    for number, (extent, step) in enumerate(zip(sizes, steps, strict=True)):
        row[8 + 4 * number : 12 + 4 * number] = (extent, *_divisor(extent), step)
    if real in _NARROW:
        variant = (True, _NARROW[real], size, unit, len(sizes))
    else:
        kind = _CODES if size == 1 else _FLOAT64 if real == "float64" else _INTEGERS[dtype(real).kind]
        variant = (False, kind, size, unit, len(sizes))
    group = _groups.setdefault((variant, real if size == 1 else ""), len(_groups))
    return Layout(variant, group, name, real, num_bytes, num_programs, row.tobytes())


def _units(
    shape: tuple[int, ...], strides: tuple[int, ...], element: int, alignment: int, *, in_lines: bool
) -> tuple[int, list[int], list[int]] | None:
    """Return unit, sizes and steps in units, the innermost first; unit 0 for a run of words. Steps of lines (unit 128) are in words."""
    sizes, steps = merged(shape, strides, element)
    if len(sizes) == 1 and steps[0] == 1 and alignment == 8:
        return 0, [], []
    if in_lines and alignment == 8 and sizes[0] % _LINE == 0 and not any(step % 8 for step in steps[1:]) and len(sizes) <= _MOST_DIMS:
        return _LINE, [sizes[0] // _LINE, *sizes[1:]], [_LINE // 8, *(step // 8 for step in steps[1:])]
    unit = next(unit for unit in (8, 4, 2, 1) if unit <= alignment and not any(number % unit for number in (sizes[0], *steps[1:])))
    sizes, steps = [sizes[0] // unit, *sizes[1:]], [1, *(step // unit for step in steps[1:])]
    if sizes[0] == 1 and len(sizes) > 1:
        del sizes[0], steps[0]
    return (unit, sizes, steps) if len(sizes) <= _MOST_DIMS else None


def merged(shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> tuple[list[int], list[int]]:
    """Return sizes and steps in bytes, the innermost first and beginning with the bytes of one element."""
    sizes, steps = [element], [1]
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride * element == sizes[-1] * steps[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            steps.append(stride * element)
    return sizes, steps


def _divisor(size: int) -> tuple[int, int]:
    """Return the multiplier and shift that divide numbers below 2**31 by `size`."""
    shift = (size - 1).bit_length()
    return (2**32 * (2**shift - size)) // size + 1, shift
