# SPDX-License-Identifier: Apache-2.0
"""Test values at the ends of their range: every 16-bit pattern, thresholds hit exactly, and the same bits from each instruction set."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from ulpscope.model import DTYPES
from ulpscope.numerics.buffers import address_of, flat_view, value_at
from ulpscope.numerics.casting import reals, widen
from ulpscope.numerics.difference.difference import difference
from ulpscope.numerics.difference.difference_kernel import differencing_with
from ulpscope.numerics.kernel import kernel_name
from ulpscope.numerics.summary.summary_kernel import summarizing_with
from ulpscope.numerics.summary.summary_numpy import summarize_blocks

from .conftest import TARGETS, Implementation, Raw
from .test_difference import assert_same
from .test_summary import assert_same as assert_same_summary

HALVES = ["float16", "bfloat16"]


def every_pattern() -> Raw:
    return np.arange(1 << 16, dtype="<u2").view(np.uint8)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("chosen", ["all", "finite", "positive", "NaN and infinities"])
def test_statistics_of_every_16_bit_pattern(implementation: Implementation, dtype: str, chosen: str) -> None:
    bits = every_pattern().view("<u2")
    values = widen(dtype, bits if dtype == "bfloat16" else bits.view("<f2"))
    chosen_bits = {
        "all": bits,
        "finite": bits[np.isfinite(values)],
        "positive": bits[np.isfinite(values) & ~np.signbit(values)],
        "NaN and infinities": bits[~np.isfinite(values)],
    }[chosen]
    raw = np.ascontiguousarray(chosen_bits).view(np.uint8)
    (found, fingerprint), (expected, expected_fingerprint) = implementation.summarize(dtype, raw), summarize_blocks(dtype, raw)
    assert_same_summary(found, expected)
    assert fingerprint == expected_fingerprint


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shift", [1, 7, 0x8000, 0x7C01])
def test_every_16_bit_pattern_against_another(implementation: Implementation, dtype: str, shift: int) -> None:
    """Against its neighbour, its negative and something far away: every sign, NaN and infinity meets every other kind."""
    left = every_pattern()
    right = ((left.view("<u2").astype(np.uint32) + shift) & 0xFFFF).astype("<u2").view(np.uint8)
    assert_same(difference(dtype, left, dtype, right, implementation.difference), difference(dtype, left, dtype, right, None))


@pytest.mark.parametrize("dtype", [name for name, entry in DTYPES.items() if entry.size_bytes == 1])
def test_every_8_bit_pattern_against_every_other(implementation: Implementation, dtype: str) -> None:
    left = np.repeat(np.arange(256, dtype=np.uint8), 256)
    right = np.tile(np.arange(256, dtype=np.uint8), 256)
    assert_same(difference(dtype, left, dtype, right, implementation.difference), difference(dtype, left, dtype, right, None))


def sample(kind: str, dtype: str, numel: int = 5000) -> tuple[Raw, Raw]:
    """Draw pairs that take every way through the pass: nearly equal, at a threshold, far apart, huge, subnormal, zero, not finite."""
    rng = np.random.default_rng(len(kind))
    y = rng.standard_normal(numel)
    y[::7] = 0.0
    noise = {"nearly equal": 1e-7, "around 1e-4": 1e-4, "around 1e-3": 1e-3, "far": 2.0, "some far": 1e-6}.get(kind, 1e-3)
    x = y * (1 + noise * rng.standard_normal(numel))
    if kind == "some far":
        x[rng.integers(0, numel, 40)] *= -3.0
    if kind == "at the thresholds":
        x = y * (1 + np.resize([1e-4, -1e-4, 1e-3, -1e-3, 5e-3, -5e-3], numel))
    if kind == "ratios that grow":
        x = y * (1 + np.linspace(0, 2e-4, numel))
    if kind == "zero reference":
        x, y = y, np.zeros(numel)
    if kind == "huge":
        x, y = x * 1e30, y * 1e30
    if kind == "subnormal":
        x, y = x * 1e-40, y * 1e-40
    with np.errstate(over="ignore"):
        left, right = x.astype(dtype), y.astype(dtype)
    if kind == "not finite":
        left[[3, 700, 701]], right[[3, 700, 900]] = [np.nan, np.inf, -np.inf], [np.nan, -np.inf, np.nan]
    return left.view(np.uint8), right.view(np.uint8)


KINDS = [
    "nearly equal",
    "around 1e-4",
    "around 1e-3",
    "far",
    "some far",
    "at the thresholds",
    "ratios that grow",
    "zero reference",
    "huge",
    "subnormal",
    "not finite",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_every_way_through_the_pass(implementation: Implementation, dtype: str, kind: str) -> None:
    left, right = sample(kind, dtype)
    assert_same(difference(dtype, left, dtype, right, implementation.difference), difference(dtype, left, dtype, right, None))


def test_the_largest_ratio_among_subnormal_numbers(implementation: Implementation) -> None:
    """Their products with a threshold round up: the larger ratio is the one that is within it."""
    tiny = 2.0**-1074
    right = np.zeros(64)
    left = right.copy()
    right[:3] = [1.0, 6000 * tiny, 1e3]
    left[:3] = [1.0 + 1.2e-4, 6001 * tiny, 1e3]
    found = difference("float64", left.view(np.uint8), "float64", right.view(np.uint8), implementation.difference)
    assert found.max_rel == max(abs(left[0] - right[0]) / right[0], 1 / 6000)
    assert found.max_rel == 1 / 6000


def test_float32_whose_squares_are_beyond_float32(implementation: Implementation) -> None:
    values = np.array([3e38, -2e37, 1e19, 1e20, 1e-45, -1e-40, 0.0], "<f4")
    summary, _ = implementation.summarize("float32", values.view(np.uint8))
    wide = values.astype(np.float64)
    assert summary.rms == pytest.approx(math.sqrt(float(np.square(wide).sum()) / wide.size), rel=1e-12)
    assert (summary.min, summary.max, summary.num_subnormal, summary.num_zero) == (wide.min(), wide.max(), 2, 1)
    found = difference("float32", values.view(np.uint8), "float32", (values * np.float32(0.5)).view(np.uint8), implementation.difference)
    assert found.sum_squares_subject == pytest.approx(float(np.square(wide).sum()), rel=1e-12)


@pytest.mark.compiled("kernel")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "int64", "float8_e4m3fn", "bool"])
def test_each_instruction_set_gives_the_same_bits(library: ctypes.CDLL, dtype: str) -> None:
    """Sums too: runs recorded on different machines stay comparable to the last bit."""
    if library.ulpscope_level() == 0:
        pytest.skip("one instruction set only")
    rng = np.random.default_rng(3)
    size = DTYPES[dtype].size_bytes
    left = np.frombuffer(rng.bytes(20_011 * size), np.uint8)
    right = left.copy()
    right[:: 5 * size] ^= 1
    targets = [target for target in TARGETS.values() if target <= library.ulpscope_level()]
    summaries = {repr(summarizing_with(library, target)(dtype, left.ctypes.data, left.size)) for target in targets}
    pairs = {repr(dataclasses.astuple(differencing_with(library, target)(dtype, left, right))) for target in targets}
    assert (len(summaries), len(pairs)) == (1, 1)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_value_at_a_position(dtype: str) -> None:
    raw = np.frombuffer(np.random.default_rng(0).bytes(48 * DTYPES[dtype].size_bytes), np.uint8)
    expected = widen(dtype, reals(dtype, raw))
    for position in range(0, expected.size, 5):
        found = value_at(dtype, memoryview(raw), position)
        assert found == expected[position] or (math.isnan(found) and math.isnan(expected[position]))


def test_the_address_of_what_may_not_be_written() -> None:
    raw = np.arange(10, dtype=np.uint8)
    raw.flags.writeable = False
    assert address_of(raw) == raw.ctypes.data
    assert address_of(memoryview(raw)[3:]) == raw.ctypes.data + 3
    assert ctypes.string_at(address_of(b"bytes"), 5) == b"bytes"


def test_complex_memory_is_flat_too() -> None:
    from ulpscope.model import TensorData

    values = np.arange(6, dtype=np.complex64).reshape(2, 3)
    assert flat_view(TensorData("complex64", (2, 3), values)).tobytes() == values.tobytes()


def test_the_name_of_what_does_the_work() -> None:
    asked = "from ulpscope.numerics.kernel import kernel_name; print(kernel_name())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, env={"ULPSCOPE_NO_KERNEL": "1"})
    assert done.stdout.startswith("NumPy")
    assert kernel_name().startswith(("compiled kernel, ", "NumPy"))


def test_comparing_does_not_load_numpy() -> None:
    """Its import takes as long as comparing a small run; only pairs of two dtypes, float8 and pictures of faults need it."""
    asked = "import sys, ulpscope.workflows.compare.comparing; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
