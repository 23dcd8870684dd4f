# SPDX-License-Identifier: Apache-2.0
"""Compare the figures of the published standards with plain NumPy, and with hand-made tensors whose figures are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ulpscope.measure.standards as measured
from tests.measure.tensors import data
from ulpscope.judge.published.standards import limits_of
from ulpscope.measure.standards import measure_standard
from ulpscope.model import DTYPES, TensorData, Undefined
from ulpscope.model.check.standards import STANDARD_METRICS, StandardMeasurement
from ulpscope.numerics.narrowing import narrow, units


def measure(subject: Any, golden: Any, dtype: str = "float32", golden_dtype: str = "float64") -> StandardMeasurement:
    return measure_standard(data(subject, dtype), data(golden, golden_dtype), limits_of(dtype))


def test_equal_tensors_have_no_errors() -> None:
    values = [1.5, -2.0, 0.0, 1e-7]
    found = measure(values, np.float32(values))
    assert found.cosine == 1.0
    assert found.within_1e4 == 1.0
    zero = set(STANDARD_METRICS) - {"cosine", "within_1e2", "within_1e3", "within_1e4"}
    assert {name: getattr(found, name) for name in zero} == dict.fromkeys(zero, 0.0)


def test_the_cosine_is_that_of_the_vectors() -> None:
    """Upstream's cosine is 1 for any vectors."""
    assert measure([1, 2, 3], [-1, -2, -3]).cosine == pytest.approx(-1)
    assert measure([1, 0], [0, 1]).cosine == 0
    assert measure([1, 1], [1, 0]).cosine == pytest.approx(math.sqrt(0.5))
    assert measure([0, 0], [1, 2]).cosine == 0
    assert measure([1e-20, 0], [1, 2]).cosine == 0
    assert measure([1e300, 1e300], [1e300, -1e300], "float64").cosine == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("subject", "golden"), [([1.0], [2.0]), ([0.0, 0.0], [0.0, 1e-17])])
def test_some_vectors_have_no_cosine(subject: list[float], golden: list[float]) -> None:
    assert isinstance(measure(subject, golden).cosine, Undefined)


def test_figures_by_hand() -> None:
    """For float16, small is up to 1e-3, and wrong there is beyond 1e-5; elsewhere beyond a thousandth."""
    golden = np.array([1.0, 2.0, -4.0, 5e-4, 6e-4, 7e-4])
    subject = golden + np.array([0.5, -0.001953125, 0.0, 2e-5, 0.0, 0.0])
    found = measure(np.float16(subject), golden, "float16")
    assert found.max_abs == 0.5
    assert found.max_rel == pytest.approx(0.5)
    assert found.mean_rel == pytest.approx((0.5 + 0.0009765625) / 3)
    assert found.rms_error == pytest.approx(math.sqrt((0.25 + 0.001953125**2) / 3))
    assert found.rel_errors == pytest.approx(1 / 3)
    assert found.small_errors == found.abs_errors == pytest.approx(1 / 3)
    assert found.ulp_max == 512
    assert found.ulp_beyond == pytest.approx(2 / 6)
    assert found.mismatch == pytest.approx(3 / 6)
    assert found.balance == pytest.approx(abs(2 - 1) / 6)
    assert found.within_1e2 == pytest.approx(4 / 6)


def test_a_correctly_rounded_result_is_no_mismatch() -> None:
    golden = np.random.default_rng(0).standard_normal(1000)
    for dtype in ("float16", "float32"):
        found = measure(golden.astype(dtype), golden, dtype)
        assert (found.mismatch, found.balance) == (0.0, 0.0)
        assert isinstance(found.ulp_max, float)
        assert found.ulp_max <= 0.5


def test_overflow_in_the_dtype_is_no_error() -> None:
    found = measure(np.float16([math.inf, -math.inf, 1.0]), [1e5, -1e5, 1.0], "float16")
    assert (found.nonfinite_errors, found.mismatch, found.within_1e4) == (0.0, 0.0, 1.0)
    clipped = measure(np.float16([65504, 1.0]), [1e5, 1.0], "float16")
    assert clipped.nonfinite_errors == 0.0


@pytest.mark.parametrize(("subject", "golden"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (math.inf, 1.0)])
def test_nonfinite_where_it_does_not_belong(subject: float, golden: float) -> None:
    found = measure([subject, 2.0, 3.0], [golden, 2.0, 3.0])
    assert found.nonfinite_errors == 1.0
    assert found.within_1e2 == pytest.approx(2 / 3)


def test_nan_at_the_same_place_agrees() -> None:
    found = measure([math.nan, 2.0], [math.nan, 2.0])
    assert (found.nonfinite_errors, found.mismatch, found.within_1e4) == (0.0, 0.0, 1.0)
    assert isinstance(measure([math.nan], [math.nan]).max_abs, Undefined)


@pytest.mark.parametrize("dtype", ["int64", "int16", "uint8", "bool"])
def test_integers_are_equal_or_not(dtype: str) -> None:
    found = measure_standard(data([0, 1, 1, 1], dtype), data([0, 1, 0, 1], dtype), limits_of(dtype))
    assert found.mismatch == 0.25
    assert isinstance(found.cosine, Undefined)


def test_large_integers_are_compared_exactly() -> None:
    assert measure_standard(data([2**62], "int64"), data([2**62 + 1], "int64"), None).mismatch == 1.0


def test_empty_and_unknown() -> None:
    assert measure_standard(data([]), data([], "float64"), None).mismatch == 0.0
    assert isinstance(measure([1.0, 2.0], [1.0, 2.0], "float64").ulp_max, Undefined)
    assert measure([1.0, 2.0], [1.0, 2.0], "float64").cosine == pytest.approx(1.0)


def test_complex_numbers_count_as_two() -> None:
    golden = np.array([1 + 2j, 3 + 4j])
    found = measure_standard(data(golden + np.array([0, 1j]), "complex64"), data(golden, "complex128"), limits_of("complex64"))
    assert (found.numel, found.max_abs, found.mismatch) == (4, 1.0, 0.25)


@given(st.integers(0, 2**32 - 1))
def test_blocks_add_up(seed: int) -> None:
    chance = np.random.default_rng(seed)
    golden = chance.standard_normal(23) * np.exp(chance.standard_normal(23) * 6)
    subject = np.float32(golden * (1 + chance.standard_normal(23) * 1e-3))
    whole = measure(subject, golden)
    size, measured._BLOCK = measured._BLOCK, 5
    try:
        parts = measure(subject, golden)
    finally:
        measured._BLOCK = size
    for name in STANDARD_METRICS:
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-9), name


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_narrowing_rounds_as_torch_does(name: str) -> None:
    chance = torch.Generator().manual_seed(1)
    spread = torch.randn(4000, dtype=torch.float64, generator=chance) * torch.exp(
        torch.randn(4000, dtype=torch.float64, generator=chance) * 8
    )
    ties = torch.arange(-40, 40, dtype=torch.float64) / 16
    values = torch.cat((spread, ties, torch.tensor([0.0, math.inf, -math.inf, math.nan]))).to(torch.float32).double()
    values = values[values.abs() <= DTYPES[name].max] if "float8" in name else values  # beyond it torch saturates or not, by version
    expected = values.to(getattr(torch, name)).double().numpy()
    np.testing.assert_array_equal(narrow(DTYPES[name], values.numpy()), expected)


def test_beyond_the_largest() -> None:
    assert narrow(DTYPES["float8_e5m2"], np.array([1e6, -1e6])).tolist() == [math.inf, -math.inf]
    assert np.isnan(narrow(DTYPES["float8_e4m3fn"], np.array([1e6]))).all()


@pytest.mark.parametrize(
    ("name", "values", "expected"), [("float32", [1.0, 3.0, 0.0], [2.0**-23, 2.0**-22, 2.0**-149]), ("float16", [1e-7], [2.0**-24])]
)
def test_units_in_the_last_place(name: str, values: list[float], expected: list[float]) -> None:
    assert units(DTYPES[name], np.array(values)).tolist() == expected


def test_a_truncated_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        measure_standard(TensorData("float32", (4,), b"\0" * 12), data([1, 2, 3, 4], "float64"), None)
