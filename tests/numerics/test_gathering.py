# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.numerics.gathering import gathered
from ulpscope.numerics.kernel import KERNEL

KERNELS = [None] if KERNEL is None else [None, KERNEL]


@st.composite
def views(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw a view of some elements, made as users make them, and its base."""
    size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    base = np.arange(np.prod(shape) * size, dtype=np.uint8).view(f"V{size}").reshape(shape)
    view = base[tuple(slice(draw(st.integers(0, extent - 1)), None, draw(st.integers(1, 3))) for extent in shape)]
    view = view.transpose(draw(st.permutations(range(view.ndim))))
    if draw(st.booleans()):
        view = np.broadcast_to(view, (draw(st.integers(1, 3)), *view.shape))
    return base, view


@pytest.mark.parametrize("kernel", KERNELS)
@given(pair=views())
def test_gathers_what_numpy_gathers(kernel: ctypes.CDLL | None, pair: tuple[np.ndarray, np.ndarray]) -> None:
    base, view = pair
    size = base.dtype.itemsize
    strides = [stride // size for stride in view.strides]
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // size
    data = memoryview(base.reshape(-1).view(np.uint8))
    assert gathered(data, size, view.shape, strides, offset, kernel).tobytes() == view.tobytes()


def test_what_lies_in_one_piece_is_not_copied() -> None:
    data = memoryview(bytes(range(24)))
    found = gathered(data, 4, (1, 2, 2), (99, 2, 1), 1)
    assert found == data[4:20]
    assert found.obj is data.obj


def test_a_result_that_is_held_is_not_written_over() -> None:
    data = memoryview(bytes(range(64)))
    held = [gathered(data, 1, (8, 8), (1, 8), 0) for _ in range(20)]
    again = gathered(data, 1, (8, 7), (1, 8), 8)
    assert {one.tobytes() for one in held} == {np.arange(64, dtype=np.uint8).reshape(8, 8).T.tobytes()}
    assert again.tobytes() == np.arange(8, 64, dtype=np.uint8).reshape(7, 8).T.tobytes()
