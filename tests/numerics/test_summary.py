# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ulpscope.model import DTYPES, Summary
from ulpscope.numerics.casting import real_dtype, reals, widen
from ulpscope.numerics.summary import summary as door

from .conftest import Implementation, Raw

EVERY_IMPLEMENTATION = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


def by_the_letter(dtype: str, raw: Raw) -> Summary:
    """Compute the definitions in the slowest possible form."""
    values = [float(value) for value in widen(real_dtype(dtype), reals(dtype, raw))]
    ordered = [value for value in values if not math.isnan(value)]
    finite = [value for value in ordered if not math.isinf(value)]
    scale = max(map(abs, finite), default=0.0) or 1.0
    return Summary(
        len(values),
        min(ordered, default=None),
        max(ordered, default=None),
        math.fsum(value / scale for value in finite) / len(finite) * scale if finite else None,
        math.sqrt(math.fsum((value / scale) ** 2 for value in finite) / len(finite)) * scale if finite else None,
        sum(map(math.isnan, values)),
        values.count(math.inf),
        values.count(-math.inf),
        values.count(0.0),
        sum(0 < abs(value) < DTYPES[dtype].tiny for value in values) if DTYPES[dtype].is_floating else 0,
    )


def assert_same(found: Summary, expected: Summary) -> None:
    exact = ("numel", "min", "max", "num_nan", "num_posinf", "num_neginf", "num_zero", "num_subnormal")
    assert {name: getattr(found, name) for name in exact} == {name: getattr(expected, name) for name in exact}
    assert (found.mean is None, found.rms is None) == (expected.mean is None, expected.rms is None)
    if expected.mean is not None and expected.rms is not None:
        assert found.rms == pytest.approx(expected.rms, rel=1e-12, abs=0)
        assert found.mean == pytest.approx(expected.mean, rel=1e-12, abs=1e-13 * expected.rms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits(implementation: Implementation, dtype: str) -> None:
    """Random bits hold every kind of value; sizes lie around the blocks and lanes of every pass."""
    size = DTYPES[dtype].size_bytes
    for numel in (0, 1, 2, 7, 15, 16, 17, 33, 4095, 4096, 4097):
        raw = np.frombuffer(np.random.default_rng(numel).bytes(numel * size), np.uint8)
        assert_same(implementation.summarize(dtype, raw)[0], by_the_letter(dtype, raw))


@EVERY_IMPLEMENTATION
@given(dtype=st.sampled_from(list(DTYPES)), data=st.data())
def test_any_bits(implementation: Implementation, dtype: str, data: st.DataObject) -> None:
    size = DTYPES[dtype].size_bytes
    chunk = data.draw(st.binary(min_size=size, max_size=40 * size))
    raw = np.frombuffer(chunk[: len(chunk) // size * size], np.uint8)
    assert_same(implementation.summarize(dtype, raw)[0], by_the_letter(dtype, raw))


SPECIAL = {
    "all NaN": [math.nan] * 40,
    "all +inf": [math.inf] * 40,
    "all -inf": [-math.inf] * 40,
    "NaN and infinities": [math.nan, math.inf, -math.inf] * 20,
    "NaN first": [math.nan, *range(30)],
    "NaN last": [*range(30), math.nan],
    "a causal mask": [0.0, -math.inf] * 30,
    "negative zero": [-0.0] * 20,
    "both zeros": [0.0, -0.0] * 20,
    "all negative": [-float(i + 1) for i in range(50)],
    "all positive": [float(i + 1) for i in range(50)],
    "inf among negatives": [-1.0] * 30 + [math.inf],
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_special_values(implementation: Implementation, case: str, dtype: str) -> None:
    values = np.array(SPECIAL[case], "<f4")
    carrier = (values.view("<u4") >> 16).astype("<u2") if dtype == "bfloat16" else values.astype(dtype)
    found = implementation.summarize(dtype, carrier.view(np.uint8))[0]
    assert_same(found, by_the_letter(dtype, carrier.view(np.uint8)))
    for bound in (found.min, found.max):
        assert bound is None or math.copysign(1, bound) == 1 or bound < 0, "a zero is always positive"


@pytest.mark.parametrize("scale", [3e38, 1e20, 1e-20, 1e-44])
def test_float32_extremes_do_not_overflow(implementation: Implementation, scale: float) -> None:
    values = (np.linspace(-1, 1, 1001) * scale).astype("<f4")
    assert_same(implementation.summarize("float32", values.view(np.uint8))[0], by_the_letter("float32", values.view(np.uint8)))


@pytest.mark.parametrize("scale", [1.7e308, 1e200, 1e-200, 5e-324])
def test_float64_extremes_do_not_overflow(implementation: Implementation, scale: float) -> None:
    values = np.array([scale, -scale / 2, scale, 0.0, math.nan, math.inf] * 900)
    found = implementation.summarize("float64", values.view(np.uint8))[0]
    finite = values[np.isfinite(values)] / scale
    assert found.mean == pytest.approx(float(finite.mean()) * scale, rel=1e-12)
    assert found.rms == pytest.approx(float(np.sqrt(np.square(finite).mean())) * scale, rel=1e-12)


def test_integers_are_exact_as_far_as_float64_goes(implementation: Implementation) -> None:
    values = np.array([2**53, -(2**53), 2**62, -(2**63), 7], "<i8")
    found = implementation.summarize("int64", values.view(np.uint8))[0]
    assert (found.min, found.max, found.num_zero) == (-(2.0**63), 2.0**62, 0)
    largest = implementation.summarize("uint64", np.array([2**64 - 1, 0], "<u8").view(np.uint8))[0]
    assert (largest.min, largest.max, largest.num_zero) == (0.0, 2.0**64, 1)


def test_a_long_sum_keeps_its_digits(implementation: Implementation) -> None:
    values = np.full(3_000_001, 0.1, "<f4")
    found = implementation.summarize("float32", values.view(np.uint8))[0]
    assert found.mean == pytest.approx(float(np.float32(0.1)), rel=1e-13)


MEAN, RMS = "-0x1.6776cb2adc163p-7", "0x1.ff3e5d5c55ba0p-1"


def test_every_instruction_set_gives_the_same_bits(implementation: Implementation) -> None:
    raw = np.random.default_rng(1).standard_normal(10_001).astype("<f4").view(np.uint8)
    found = implementation.summarize("float32", raw)[0]
    tolerance = 1e-14 if implementation.name == "numpy" else 0  # NumPy sums in an order of its own
    assert found.mean == pytest.approx(float.fromhex(MEAN), rel=tolerance, abs=tolerance)
    assert found.rms == pytest.approx(float.fromhex(RMS), rel=tolerance, abs=0)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_unaligned_memory(implementation: Implementation, offset: int) -> None:
    values = np.random.default_rng(2).standard_normal(5000).astype("<f4")
    memory = np.zeros(values.nbytes + 8, np.uint8)
    memory[offset : offset + values.nbytes] = values.view(np.uint8)
    assert implementation.summarize("float32", memory[offset : offset + values.nbytes]) == implementation.summarize(
        "float32", values.view(np.uint8)
    )


def test_a_thread_that_flushes_subnormals_sees_the_same(implementation: Implementation) -> None:
    """NumPy's conversions flush, so there the test holds for the counts and the fingerprint only."""
    torch = pytest.importorskip("torch")
    raw = {name: np.arange(900, dtype=unsigned).view(np.uint8) for name, unsigned in (("float32", "<u4"), ("float16", "<u2"))}

    def seen() -> list[object]:
        found = [implementation.summarize(name, raw[name]) for name in raw]
        return [(s.num_zero, s.num_subnormal, text) for s, text in found] if implementation.name == "numpy" else list(found)

    before = seen()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    try:
        assert seen() == before
        assert torch.tensor([1e-40]).mul(1).item() == 0.0, "the thread still flushes afterwards"
    finally:
        torch.set_flush_denormal(False)


def test_part_of_an_element_is_refused(implementation: Implementation) -> None:
    with pytest.raises(ValueError):
        implementation.summarize("float32", np.zeros(6, np.uint8))


def test_threads_do_not_disturb_each_other(implementation: Implementation) -> None:
    tensors = [np.random.default_rng(seed).standard_normal(20_000).astype("<f4").view(np.uint8) for seed in range(8)]
    expected = [implementation.summarize("float32", raw) for raw in tensors]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda raw: implementation.summarize("float32", raw), tensors)) == expected


def test_the_door() -> None:
    values = np.array([1.0, -3.0, math.nan], "<f4")
    raw = values.view(np.uint8)
    summary, fingerprint = door.summarize("float32", raw)
    assert (summary.numel, summary.min, summary.max, summary.mean, summary.num_nan) == (3, -3.0, 1.0, -1.0, 1)
    assert fingerprint == door.fingerprint(raw) == door.fingerprint_address(values.ctypes.data, values.nbytes)
    assert door.summarize_address("float32", values.ctypes.data, values.nbytes) == (summary, fingerprint)
    assert door.summarize_address("complex64", 0, 0)[0] == Summary(0, None, None, None, None, 0, 0, 0, 0, 0)


def test_the_door_refuses_what_is_not_bytes() -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        door.fingerprint(np.zeros(4, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous uint8"):
        door.summarize("uint8", np.zeros(8, np.uint8)[::2])
    with pytest.raises(ValueError, match="unknown dtype"):
        door.summarize("float7", np.zeros(4, np.uint8))


@pytest.mark.parametrize("setting", ["0", "1"])
def test_numpy_on_request(setting: str) -> None:
    program = "from ulpscope.numerics import kernel; from ulpscope.numerics.summary import summary; import numpy as np; "
    program += "print(kernel.KERNEL is None, summary.fingerprint(np.arange(9, dtype=np.uint8)))"
    environment = {**os.environ, "ULPSCOPE_NO_KERNEL": setting}
    output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert output[1] == door.fingerprint(np.arange(9, dtype=np.uint8))
    assert setting == "0" or output[0] == "True"
