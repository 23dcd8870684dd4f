# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.model import DTYPES
from ulpscope.numerics.casting import byte_values, reals, widen
from ulpscope.numerics.difference.pair_sums import BUCKETS, bucket_top, quantiles
from ulpscope.numerics.difference.ulp import bucket_counts, code_places, common_dtype, distances, places, places_of_bits

FLOATS = [name for name, entry in DTYPES.items() if entry.kind == "float"]


def finite_values(name: str) -> np.ndarray:
    size = DTYPES[name].size_bytes
    raw = np.arange(256**size, dtype=f"<u{size}").view(np.uint8) if size < 4 else np.random.default_rng(0).bytes(40_000)
    values = widen(name, reals(name, np.frombuffer(raw, np.uint8)))
    return values[np.isfinite(values)]


@pytest.mark.parametrize("name", FLOATS)
def test_places_order_like_the_values(name: str) -> None:
    values = np.unique(finite_values(name))
    found = places(DTYPES[name], values)
    assert (np.diff(found) > 0).all()
    if DTYPES[name].size_bytes < 4:
        assert (np.diff(found) == 1).all(), "neighbours are one place apart"


@pytest.mark.parametrize(("name", "signed"), [("float64", "<i8"), ("float32", "<i4"), ("float16", "<i2"), ("bfloat16", "<i2")])
def test_places_from_bits_and_from_values_agree(name: str, signed: str) -> None:
    bits = np.frombuffer(np.random.default_rng(1).bytes(80_000), signed)
    values = widen(name, reals(name, bits.view(np.uint8)))
    finite = np.isfinite(values)
    np.testing.assert_array_equal(places_of_bits(bits)[finite], places(DTYPES[name], values[finite]))


def test_zero_is_the_middle() -> None:
    for name in FLOATS:
        if name == "float8_e8m0fnu":
            continue
        tiny = np.array([0.0, -0.0, DTYPES[name].tiny, -DTYPES[name].tiny])
        steps = 1 << DTYPES[name].mantissa
        assert places(DTYPES[name], tiny).tolist() == [0, 0, steps, -steps]


@given(st.floats(-60000, 60000, width=32))
def test_rounding_to_a_coarser_dtype_is_that_of_numpy(value: float) -> None:
    rounded = np.array([value], np.float32).astype(np.float16).astype(np.float64)
    assert places(DTYPES["float16"], np.array([value])).tolist() == places(DTYPES["float16"], rounded).tolist()


def test_units_are_those_of_the_coarser_dtype() -> None:
    def unit(left: str, right: str) -> str | None:
        entry = common_dtype(left, right)
        return entry.name if entry else None

    assert unit("float32", "float16") == unit("float16", "float32") == "float16"
    assert unit("float16", "bfloat16") == "bfloat16"
    assert unit("complex64", "complex128") == "float32"
    assert unit("int32", "int64") == "int64"
    assert unit("int64", "float32") is None
    assert unit("uint64", "int64") is None


def test_codes_of_one_byte() -> None:
    values, found = byte_values("float8_e4m3fn"), code_places("float8_e4m3fn")
    assert found[0x01] == 1
    assert found[0x81] == -1
    assert found[0x80] == 0
    assert values[0x01] == 2.0**-9
    assert code_places("int8")[0xFF] == -1


def test_opposite_ends_of_float64_do_not_overflow() -> None:
    ends = np.array([-np.finfo(np.float64).max, np.finfo(np.float64).max])
    left, right = places(DTYPES["float64"], ends[:1]), places(DTYPES["float64"], ends[1:])
    assert int(distances(left, right)[0]) == int(distances(right, left)[0]) == 2 * 0x7FEFFFFFFFFFFFFF


@given(st.integers(0, 2**64 - 1))
def test_a_bucket_holds_what_falls_into_it(distance: int) -> None:
    (bucket,) = np.flatnonzero(bucket_counts(np.array([distance], np.uint64)))
    below = bucket_top(int(bucket) - 1) if bucket else -1
    assert below < distance <= bucket_top(int(bucket))
    assert bucket_top(int(bucket)) <= distance * 9 / 8


def test_buckets_cover_all_distances() -> None:
    assert bucket_top(BUCKETS - 1) == 2**64 - 1


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200), st.sampled_from([0.5, 0.99]))
def test_quantiles(values: list[int], share: float) -> None:
    exact = sorted(values)[max(math.ceil(share * len(values)), 1) - 1]
    (found,) = quantiles(bucket_counts(np.array(values, np.uint64)), [share], max(values))
    assert exact <= found <= max(exact * 9 / 8, exact)
    if exact < 16:
        assert found == exact
