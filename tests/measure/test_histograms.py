# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ulpscope.measure import histograms

from .tensors import data

ARRAYS = hnp.arrays(np.float64, st.integers(1, 50), elements=st.floats())


@given(ARRAYS, st.integers(1, 30))
def test_every_finite_value_is_counted_once(values: np.ndarray, bins: int) -> None:
    other = np.roll(values, 1)
    with np.errstate(all="ignore"):
        expected = {"subject": values, "reference": other, "difference": values - other}
    found = {histogram.what: histogram for histogram in histograms(data(values, "float64"), data(other, "float64"), bins)}
    for what, array in expected.items():
        finite = array[np.isfinite(array)]
        if not finite.size:
            assert what not in found or sum(found[what].counts) == 0
            continue
        assert len(found[what].counts) == bins == len(found[what].edges) - 1
        assert all(map(math.isfinite, found[what].edges))
        assert sum(found[what].counts) == finite.size


def test_sides_share_their_edges() -> None:
    subject, reference, difference = histograms(data([0.0, 1.0, 2.0]), data([0.0, 1.0, 10.0]), bins=10)
    assert subject.edges == reference.edges
    assert (subject.edges[0], subject.edges[-1]) == (0.0, 10.0)
    assert subject.counts == (1, 1, 1, 0, 0, 0, 0, 0, 0, 0)
    assert reference.counts[-1] == 1
    assert (difference.what, difference.edges[0], difference.edges[-1]) == ("difference", -8.0, 0.0)


def test_constant_tensors() -> None:
    for value in (0.0, 3.0, -1e30, 1e-30):
        subject, _, difference = histograms(data(np.full(7, value)), data(np.full(7, value)))
        assert sum(subject.counts) == sum(difference.counts) == 7
        assert subject.edges[0] < np.float32(value) < subject.edges[-1]


def test_other_shapes_have_no_difference() -> None:
    assert [histogram.what for histogram in histograms(data([1.0, 2.0]), data([1.0]))] == ["subject", "reference"]


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_nothing_finite(values: list[float]) -> None:
    assert histograms(data(values), data(values)) == ()


def test_bfloat16() -> None:
    subject, _, _ = histograms(data([1.0, 2.0], "bfloat16"), data([1.0, 2.0], "bfloat16"), bins=2)
    assert subject.counts == (1, 1)
