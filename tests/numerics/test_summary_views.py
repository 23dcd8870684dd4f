# SPDX-License-Identifier: Apache-2.0
"""Views are summarised as they lie, with the bits that they have in one piece."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulpscope.numerics.kernel import KERNEL
from ulpscope.numerics.summary.summary import PreparedView, summarize
from ulpscope.numerics.summary.summary_kernel import summarizing_views_with

pytestmark = pytest.mark.compiled("kernel")

DTYPES = ["float64", "float32", "float16", "int64", "int16", "uint8", "bool"]
TARGETS = range(-1, 0 if KERNEL is None else KERNEL.ulpscope_level() + 1)


def _check(array: npt.NDArray[np.generic], name: str, target: int = -1) -> None:
    assert KERNEL is not None
    strides = [stride // array.itemsize for stride in array.strides]
    view = PreparedView(name, array.shape, strides)
    address: int = array.__array_interface__["data"][0]
    whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    assert view.size_bytes == whole.size
    found = summarizing_views_with(KERNEL, target)(view, address)
    assert found is not None
    assert repr(found) == repr(summarize(name, whole))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DTYPES)
def test_the_same_bits_as_in_one_piece(name: str, target: int) -> None:
    """A third of each row, transposed heads, an expanded row: some longer than the parts that threads share."""
    values = np.random.default_rng(3).integers(1, 120, (6, 70, 4, 192)).astype(name)
    _check(values[..., :64], name, target)
    _check(values.transpose(0, 2, 1, 3), name, target)
    _check(values[:, ::2, :, 64:], name, target)
    _check(np.broadcast_to(values[0, 0, 0], (40, 192)), name, target)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
    inner=st.integers(16, 90),
    step=st.integers(1, 3),
)
def test_any_order_of_dimensions(shape: list[int], order: object, inner: int, step: int) -> None:
    values = np.random.default_rng(len(shape) * inner).standard_normal((*shape, 2 * inner)).astype(np.float32)
    axes = list(range(len(shape)))
    order.shuffle(axes)  # type: ignore[attr-defined]
    array = values.transpose(*axes, len(shape))[::step, ..., :inner]
    _check(array, "float32")


def test_complex_numbers_are_two_reals() -> None:
    values = np.random.default_rng(5).standard_normal((30, 64)) + 1j
    _check(values[:, 8:40], "complex128")


def test_what_needs_another_look_is_not_guessed() -> None:
    values = np.ones((8, 64), np.float32)
    values[3, 5] = np.nan
    assert KERNEL is not None
    view = PreparedView("float32", (8, 32), (64, 1))
    address: int = values.__array_interface__["data"][0]
    assert summarizing_views_with(KERNEL)(view, address) is None


def test_tiny_pieces_are_left_to_a_copy() -> None:
    assert not PreparedView("float32", (64, 64), (1, 64)).is_worthwhile
    assert not PreparedView("float32", (64,), (1,)).is_worthwhile
    assert PreparedView("float32", (64, 16), (64, 1)).is_worthwhile
