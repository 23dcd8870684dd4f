# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ulpscope.model import DTYPES
from ulpscope.numerics.casting import real_dtype, reals, widen
from ulpscope.numerics.difference.difference import Difference, difference

from .conftest import Implementation, Raw

EVERY_IMPLEMENTATION = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
SUMS = ("sum_abs", "sum_squares", "sum_squares_subject", "sum_squares_reference", "sum_products")


def assert_same(found: Difference, expected: Difference) -> None:
    scale = math.sqrt(expected.sum_squares_subject * expected.sum_squares_reference)
    for field in dataclasses.fields(Difference):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "ulp_counts":
            np.testing.assert_array_equal(left, right)
        elif field.name in SUMS:
            assert left == pytest.approx(right, rel=1e-12, abs=1e-13 * scale, nan_ok=True), field.name
        else:
            assert left == right, field.name


def related(dtype: str, numel: int, seed: int = 0) -> tuple[Raw, Raw]:
    """Draw random bits, and the same with some low bits changed here and there."""
    rng = np.random.default_rng(seed)
    size = DTYPES[dtype].size_bytes
    left = np.frombuffer(rng.bytes(numel * size), np.uint8)
    right = left.copy()
    changed = rng.random(right.size) < 0.2
    right[changed] ^= rng.integers(0, 256, int(changed.sum()), np.uint8)
    return left, right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 511, 512, 513, 9000])
def test_the_kernel_agrees_with_numpy(implementation: Implementation, dtype: str, numel: int) -> None:
    left, right = related(dtype, numel, seed=numel)
    if dtype in ("float64", "complex128"):  # moderate sizes, so that sums stay in range
        left, right = (np.clip(raw.view("<f8"), -1e9, 1e9).view(np.uint8) for raw in (left, right))
    assert_same(difference(dtype, left, dtype, right, implementation.difference), difference(dtype, left, dtype, right, None))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_long_equal_stretches_are_recognised(implementation: Implementation, dtype: str) -> None:
    left, _ = related(dtype, 5000)
    right = left.copy()
    right[-3] ^= 1
    found = difference(dtype, left, dtype, right, implementation.difference)
    assert_same(found, difference(dtype, left, dtype, right, None))


def by_the_letter(dtype: str, left: Raw, right: Raw) -> dict[str, float]:
    pairs = [
        (float(n), float(b))
        for n, b in zip(widen(real_dtype(dtype), reals(dtype, left)), widen(real_dtype(dtype), reals(dtype, right)), strict=True)
    ]
    finite = [(n, b) for n, b in pairs if math.isfinite(n) and math.isfinite(b)]
    nan = sum(math.isnan(n) != math.isnan(b) for n, b in pairs)
    inf = sum((math.isinf(n) or math.isinf(b)) and not (math.isnan(n) or math.isnan(b)) and n != b for n, b in pairs)
    return {
        "max_abs": max((abs(n - b) for n, b in finite), default=0.0),
        "max_rel": max((abs(n - b) / abs(b) for n, b in finite if b), default=0.0),
        "different": sum(n != b for n, b in finite),
        "sign_flips": sum((n > 0 > b) or (n < 0 < b) for n, b in finite),
        "nan_disagree": nan,
        "inf_disagree": inf,
        "nonfinite": len(pairs) - len(finite),
    }


@EVERY_IMPLEMENTATION
@given(
    dtype=st.sampled_from([name for name in DTYPES if DTYPES[name].size_bytes < 8]), seed=st.integers(0, 1 << 30), numel=st.integers(1, 40)
)
def test_definitions(implementation: Implementation, dtype: str, seed: int, numel: int) -> None:
    left, right = related(dtype, numel, seed)
    found = difference(dtype, left, dtype, right, implementation.difference)
    assert {name: getattr(found, name) for name in by_the_letter(dtype, left, right)} == by_the_letter(dtype, left, right)


def test_worst_is_the_first_of_the_largest(implementation: Implementation) -> None:
    left = np.zeros(2000, "<f4")
    right = left.copy()
    right[[5, 700, 701, 1999]] = [1.0, -3.0, 3.0, 3.0]
    found = difference("float32", left.view(np.uint8), "float32", right.view(np.uint8), implementation.difference)
    assert (found.worst, found.max_abs, found.first_disagree) == (700, 3.0, None)
    right[[800, 900]] = [math.inf, math.nan]
    found = difference("float32", left.view(np.uint8), "float32", right.view(np.uint8), implementation.difference)
    assert (found.worst, found.first_disagree, found.nan_disagree, found.inf_disagree) == (700, 800, 1, 1)


@pytest.mark.parametrize("exponent", [1000, -1000])
def test_float64_beyond_the_range_of_its_squares(implementation: Implementation, exponent: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(3000)
    other = values + 1e-3 * rng.standard_normal(3000)
    moderate = difference("float64", values.view(np.uint8), "float64", other.view(np.uint8), implementation.difference)
    scaled = [np.ldexp(array, exponent).view(np.uint8) for array in (values, other)]
    found = difference("float64", scaled[0], "float64", scaled[1], implementation.difference)
    assert math.ldexp(found.max_abs, found.exponent - exponent) == moderate.max_abs
    assert found.sum_squares / found.sum_squares_reference == pytest.approx(
        moderate.sum_squares / moderate.sum_squares_reference, rel=1e-12
    )
    assert (found.within, found.different, found.worst) == (moderate.within, moderate.different, moderate.worst)


def test_integers_beyond_the_range_of_float64(implementation: Implementation) -> None:
    left = np.array([2**60, 2**60, 5], "<i8")
    right = np.array([2**60 + 1, 2**60, 5], "<i8")
    found = difference("int64", left.view(np.uint8), "int64", right.view(np.uint8), implementation.difference)
    assert (found.different, found.ulp_max) == (1, 1)


@pytest.mark.parametrize(
    ("left", "right"), [("float32", "float16"), ("float16", "bfloat16"), ("float64", "float32"), ("float32", "float8_e4m3fn")]
)
def test_two_dtypes(left: str, right: str) -> None:
    values = np.array([0.0, 1.0, -2.5, 0.015625, math.nan, math.inf])

    def stored(dtype: str) -> Raw:
        if dtype == "bfloat16":
            return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
        if dtype == "float8_e4m3fn":
            return np.array([0x00, 0x38, 0xC2, 0x08, 0x7F, 0x7F], np.uint8)
        return values.astype(dtype).view(np.uint8)

    found = difference(left, stored(left), right, stored(right))
    assert (found.different, found.max_abs, found.ulp_max) == (0, 0.0, 0)
    assert found.nan_disagree + found.inf_disagree == (1 if right == "float8_e4m3fn" else 0)


def test_units_of_the_coarser_dtype_count() -> None:
    left, right = np.array([1.0 + 2.0**-20, 1.0 + 2.0**-9], "<f4"), np.array([1.0, 1.0], "<f2")
    found = difference("float32", left.view(np.uint8), "float16", right.view(np.uint8))
    assert (found.different, found.ulp_max) == (2, 2)
    assert found.ulp_counts is not None
    assert found.ulp_counts[:3].tolist() == [1, 0, 1]


def test_an_integer_and_a_float_share_no_unit() -> None:
    found = difference("int32", np.array([1, 2], "<i4").view(np.uint8), "float32", np.array([1, 3], "<f4").view(np.uint8))
    assert found.ulp_counts is None
    assert (found.different, found.max_abs) == (1, 1.0)
