# SPDX-License-Identifier: Apache-2.0
"""Measurements by the definitions of the older tools, where these differ from ours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ulpscope.measure.written import difference_of, measure_statistics, measure_two
from ulpscope.model import TensorData
from ulpscope.model.written import OldNumbers, WrittenPair, WrittenValue

EPS = 2.0**-52


def two(subject: Any, reference: Any, dtype: str = "float64") -> OldNumbers:
    sides = [np.asarray(values, dtype) for values in (subject, reference)]
    return measure_two(*(TensorData(dtype, side.shape, memoryview(side.tobytes())) for side in sides))


def test_a_zero_of_the_reference_counts_as_the_smallest_step_from_one() -> None:
    assert two([1e-18, 2.0], [0.0, 2.0]).max_rel == pytest.approx(1e-18 / EPS)


def test_the_euclidean_distance_grows_with_the_elements() -> None:
    assert two([3.0, 4.0], [0.0, 0.0]).euclidean == pytest.approx(5.0)
    assert two([3.0, 4.0, math.inf], [0.0, 0.0, math.inf]).euclidean == pytest.approx(5.0)


def test_two_zero_tensors_have_the_same_direction_and_one_has_none() -> None:
    assert (two([0.0, 0.0], [0.0, 0.0]).cosine, two([0.0, 0.0], [0.0, 0.0]).old_cosine) == (1.0, 1.0)
    found = two([0.0, 0.0], [1.0, 0.0])
    assert (found.cosine, found.zeros) == (None, (True, False))


def test_nearly_the_same_direction_is_the_same_in_the_older_tables() -> None:
    found = two([1.0, 0.003], [1.0, 0.0])
    assert (found.cosine, found.old_cosine) == (0.999996, 1.0)


@pytest.mark.parametrize(("subject", "reference"), [([math.nan, 1.0], [1.0, 1.0]), ([math.inf, 1.0], [-math.inf, 1.0])])
def test_where_nan_or_infinities_disagree_there_are_no_numbers(subject: list[float], reference: list[float]) -> None:
    found = two(subject, reference)
    assert (found.disagreeing, found.cosine, found.max_abs, found.within_1e3) == (1, None, None, None)


def test_one_number_has_errors_alone_and_other_shapes_have_nothing() -> None:
    found = two([1.5], [1.0])
    assert (found.max_abs, found.max_rel, found.cosine, found.euclidean) == (0.5, 0.5, None, None)
    assert two([1.0, 2.0], [1.0]).numel is None


def test_statistics_are_subtracted_as_they_stand() -> None:
    sides = [WrittenValue("x", "torch.float32", "[2]", four) for four in ((3, 1.0, None, "a"), (2, 0.0, 1.0, 1.0))]
    found = measure_statistics(WrittenPair(sides[0], sides[1]))
    assert found.differences == (1.0, 1.0, None, None)
    assert found.relative == (0.5, math.inf, None, None)


@pytest.mark.parametrize("pair", [(10**400, 1), (math.nan, 1.0), (math.inf, math.inf), ("a", 1), (None, 1.0)])
def test_what_has_no_difference(pair: tuple[Any, Any]) -> None:
    assert difference_of(*pair) is None
