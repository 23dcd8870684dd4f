# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ulpscope.errors import DamagedRunError
from ulpscope.measure import measure_tensors, with_shape
from ulpscope.model import TensorData, TensorMeasurement, Undefined

from .tensors import data

FLOATS32 = st.floats(-1e6, 1e6, width=32)
ARRAYS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=FLOATS32)


def pairs() -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    return ARRAYS.flatmap(lambda array: st.tuples(st.just(array), hnp.arrays(np.float32, array.shape, elements=FLOATS32)))


def measured(subject: object, reference: object, dtype: str = "float32") -> TensorMeasurement:
    return measure_tensors(data(subject, dtype), data(reference, dtype))


def test_definitions() -> None:
    found = measured([[1.0, 2.0], [3.0, -4.0]], [[1.0, 2.5], [3.0, 4.0]])
    d, b = np.array([0.0, -0.5, 0.0, -8.0]), np.array([1.0, 2.5, 3.0, 4.0])
    n = b + d
    rms = math.sqrt(np.square(d).mean())
    assert found.numel == 4
    assert not found.equal
    assert found.max_abs == 8.0
    assert found.max_rel == 2.0
    assert found.mean_abs == pytest.approx(8.5 / 4)
    assert found.rms_error == pytest.approx(rms)
    assert found.rel_l2 == pytest.approx(np.linalg.norm(d) / np.linalg.norm(b))
    assert found.cosine == pytest.approx(n @ b / np.linalg.norm(n) / np.linalg.norm(b))
    assert found.snr_db == pytest.approx(20 * math.log10(np.linalg.norm(b) / np.linalg.norm(d)))
    assert found.distance == pytest.approx(rms / math.sqrt(np.square(b).mean()))
    assert (found.within_1e4, found.within_1e3, found.within_5e3) == (0.5, 0.5, 0.5)
    assert (found.num_different, found.num_sign_flips) == (2, 1)
    assert (found.worst_index, found.worst_subject, found.worst_reference) == ((1, 1), -4.0, 4.0)
    assert found.rms_reference == pytest.approx(math.sqrt(np.square(b).mean()))
    assert found.rms_subject == pytest.approx(math.sqrt(np.square(n).mean()))


def test_one_bad_element_among_many_counts_by_its_eighth() -> None:
    reference = np.ones(10_000, np.float32)
    subject = reference.copy()
    subject[1234] += 1.0
    found = measured(subject, reference)
    assert found.distance == pytest.approx(1 / 8)
    assert found.rms_error == pytest.approx(1 / 100)


@pytest.mark.parametrize(("share", "error"), [("within_1e4", 1e-4), ("within_1e3", 1e-3), ("within_5e3", 5e-3)])
def test_shares(share: str, error: float) -> None:
    reference = np.full(4, 1.0)
    found = measured(reference + np.array([0.0, 0.99, 1.01, -0.99]) * error, reference, "float64")
    assert getattr(found, share) == 0.75


@given(ARRAYS)
def test_a_tensor_is_equal_to_itself(values: np.ndarray) -> None:
    found = measured(values, values.copy())
    assert found.equal
    assert (found.distance, found.max_abs, found.rel_l2, found.num_different, found.ulp_max) == (0.0, 0.0, 0.0, 0, 0.0)
    assert found.worst_index is None
    assert isinstance(found.cosine, Undefined) or found.cosine == 1.0


@given(pairs())
def test_errors_do_not_depend_on_the_side(both: tuple[np.ndarray, np.ndarray]) -> None:
    one, other = measured(*both), measured(*reversed(both))
    for name in ("max_abs", "mean_abs", "rms_error", "num_different", "num_sign_flips", "ulp_max", "ulp_p50", "ulp_p99", "worst_index"):
        assert getattr(one, name) == getattr(other, name), name
    assert (one.rms_subject, one.rms_reference) == (other.rms_reference, other.rms_subject)


@given(pairs(), st.integers(-20, 20))
def test_relative_metrics_do_not_depend_on_the_scale(both: tuple[np.ndarray, np.ndarray], exponent: int) -> None:
    one = measured(*(array.astype(np.float64) for array in both), "float64")
    other = measured(*(np.ldexp(array.astype(np.float64), exponent) for array in both), "float64")
    for name in ("distance", "rel_l2", "cosine", "max_rel", "within_1e3", "num_different", "worst_index"):
        assert getattr(one, name) == getattr(other, name), name


@given(pairs())
def test_bounds(both: tuple[np.ndarray, np.ndarray]) -> None:
    found = measured(*both)
    assert isinstance(found.max_abs, float)
    assert isinstance(found.rms_error, float)
    assert isinstance(found.mean_abs, float)
    assert found.mean_abs <= found.rms_error * (1 + 1e-9)
    assert found.rms_error <= found.max_abs * (1 + 1e-9)
    assert found.equal == (found.max_abs == 0)
    if isinstance(found.cosine, float):
        assert -1 <= found.cosine <= 1
    if isinstance(found.ulp_p99, float) and isinstance(found.ulp_p50, float) and isinstance(found.ulp_max, float):
        assert found.ulp_p50 <= found.ulp_p99 <= found.ulp_max


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_nan_and_infinity(dtype: str) -> None:
    agree = measured([math.nan, math.inf, -math.inf, 1.0], [math.nan, math.inf, -math.inf, 1.0], dtype)
    assert agree.equal
    assert (agree.distance, agree.num_nan_disagree, agree.num_inf_disagree, agree.within_1e4) == (0.0, 0, 0, 1.0)
    found = measured([1.0, math.nan, math.inf, math.inf, 2.0], [1.0, 1.0, math.nan, -math.inf, math.inf], dtype)
    assert (found.num_nan_disagree, found.num_inf_disagree) == (2, 2)
    assert found.distance == math.inf
    assert (found.num_different, found.within_1e4, found.max_abs) == (4, 0.2, 0.0)
    assert found.worst_index == (1,)
    assert math.isnan(found.worst_subject or 0.0)
    assert not found.equal


def test_zeros() -> None:
    same = measured([0.0, -0.0], [-0.0, 0.0])
    assert same.equal
    assert same.distance == 0.0
    assert same.cosine == Undefined("one side is all zero")
    found = measured([0.0, 1e-30], [0.0, 0.0])
    assert found.distance == math.inf
    assert found.max_rel == found.rel_l2 == found.snr_db == Undefined("the reference is all zero")
    assert measured([0.0, 0.0], [1.0, 2.0]).rel_l2 == 1.0


def test_what_is_undefined_says_why() -> None:
    assert measured(2.0, 1.0).cosine == Undefined("a single element has no direction")
    assert measured([1.0, 2.0], [1.0, 2.0]).snr_db == Undefined("the values agree, so there is no noise")
    nothing = measured([math.nan, math.nan], [math.nan, math.nan])
    assert nothing.equal
    assert nothing.max_abs == nothing.ulp_p50 == nothing.within_1e3 == Undefined("no position is finite on both sides")
    empty = measured(np.zeros((0, 3)), np.zeros((0, 3)))
    assert (empty.equal, empty.distance, empty.numel) == (True, 0.0, 0)
    assert empty.cosine == Undefined("the tensors are empty")


def test_ulp() -> None:
    values = np.linspace(1, 1.9, 1000).astype(np.float32)
    shifted = (values.view(np.uint32) + np.arange(1000, dtype=np.uint32) % 10).view(np.float32)
    found = measured(shifted, values)
    assert (found.ulp_max, found.ulp_p50, found.ulp_p99) == (9.0, 4.0, 9.0)


def test_two_dtypes_compare_by_value() -> None:
    values = np.array([0.5, 1.25, -3.0])
    assert measure_tensors(data(values, "float16"), data(values, "float32")).equal
    assert measure_tensors(data(values, "bfloat16"), data(values, "float64")).equal
    overflow = measure_tensors(data([math.inf], "float16"), data([70000.0], "float32"))
    assert (overflow.num_inf_disagree, overflow.distance) == (1, math.inf)
    mixed = measure_tensors(data([1, 2], "int64"), data([1.0, 2.0], "float32"))
    assert mixed.equal
    assert mixed.ulp_max == Undefined("the two dtypes share no unit in the last place")


def test_integers_and_bools() -> None:
    large = measured([2**60, 5], [2**60 + 1, 5], "int64")
    assert (large.equal, large.max_abs, large.num_different, large.ulp_max) == (False, 1.0, 1, 1.0)
    assert 0 < large.distance < 1e-17
    flags = measured([True, False, True], [True, True, True], "bool")
    assert (flags.num_different, flags.max_abs, flags.worst_index) == (1, 1.0, (1,))
    assert measured([250], [3], "uint8").max_abs == 247.0


def test_complex_numbers_count_as_two_reals() -> None:
    found = measured(np.array([[1 + 1j, 2 - 2j]]), np.array([[1 + 1j, 2 + 2j]]), "complex64")
    assert (found.numel, found.num_different, found.num_sign_flips, found.max_abs) == (4, 1, 1, 4.0)
    assert (found.worst_index, found.worst_subject, found.worst_reference) == ((0, 1), -2.0, 2.0)


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_float64_extremes(scale: float) -> None:
    reference = np.array([1.0, 2.0, -3.0]) * scale
    found = measured(reference * 1.001, reference, "float64")
    assert found.distance == pytest.approx(0.001, rel=1e-6)
    assert found.rms_reference == pytest.approx(math.sqrt(14 / 3) * scale)
    assert found.max_abs == pytest.approx(0.003 * scale, rel=1e-6)
    assert found.snr_db == pytest.approx(60, abs=0.1)


def test_a_tensor_of_the_wrong_size_is_damage() -> None:
    with pytest.raises(DamagedRunError):
        measure_tensors(TensorData("float32", (3,), bytes(8)), data([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(("shape", "other"), [((4, 6), (24,)), ((24,), (2, 3, 4)), ((1, 24), (6, 1, 4))])
def test_the_same_values_in_another_shape(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    values = np.arange(24.0)
    worse = values.copy()
    worse[17] += 1
    one, two = (measured(worse.reshape(one), values.reshape(one)) for one in (shape, other))
    assert one != two
    assert with_shape(one, shape, other) == two
    same = measured(values.reshape(shape), values.reshape(shape))
    assert with_shape(same, shape, other) is same
