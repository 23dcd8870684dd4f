# SPDX-License-Identifier: Apache-2.0
"""Copy the elements of a strided view, one after the other: by the compiled kernel, else NumPy. Only bytes matter, not what they mean.

Nothing is checked here: the caller knows that the view has elements and lies within the bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

from ulpscope.numerics.buffer_pool import room_for
from ulpscope.numerics.buffers import address_of
from ulpscope.numerics.kernel import KERNEL

__all__ = ["gathered", "pieces"]


def gathered(
    data: memoryview, size: int, shape: Sequence[int], strides: Sequence[int], offset: int, kernel: ctypes.CDLL | None = KERNEL
) -> memoryview:
    """Return the elements of `size` bytes in the order of their indices; strides and offset count elements. Without a kernel NumPy does
    it.
    """
    piece, extents, steps = pieces(size, shape, strides)
    first = offset * size
    if not extents:
        return data[first : first + piece]
    if kernel is None:
        return _by_numpy(data[first:], piece, extents, steps)
    out = room_for(piece * prod(extents))
    numbers = ctypes.c_size_t * len(extents)
    kernel.ulpscope_gather(address_of(data) + first, piece, len(extents), numbers(*extents), numbers(*steps), address_of(out))
    return out.toreadonly()


def pieces(size: int, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """Return how many bytes lie together, and the extents and steps in bytes of the other dimensions; dimensions that continue one another
    are merged.
    """
    piece = size
    extents: list[int] = []
    steps: list[int] = []
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        step = stride * size
        if extents and step == extents[-1] * steps[-1]:
            extents[-1] *= extent
        elif not extents and step == piece:
            piece *= extent
        elif extent != 1:
            extents.append(extent)
            steps.append(step)
    return piece, extents[::-1], steps[::-1]


def _by_numpy(data: memoryview, piece: int, extents: Sequence[int], steps: Sequence[int]) -> memoryview:
    import numpy as np  # only here: reading tensors does without

    elements = np.frombuffer(data, f"V{piece}", count=len(data) // piece)
    view = np.lib.stride_tricks.as_strided(elements, extents, steps, writeable=False)
    found: memoryview = np.ascontiguousarray(view).reshape(-1).view(np.uint8).data
    return found
