# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ulpscope.measure import measure_summaries, measure_tensors
from ulpscope.model import DTYPES, NotMeasured, Summary, SummaryMeasurement, TensorData, Undefined
from ulpscope.numerics.summary.summary import summarize

from .tensors import data

SPECIAL = st.sampled_from([0.0, 1.0, math.nan, math.inf, -math.inf, 3e38, 1e-45])
ANY = st.floats(width=32) | SPECIAL
ARRAYS = hnp.arrays(np.float32, st.integers(1, 30), elements=ANY)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw unrelated tensors, and tensors that differ in a few places or by a small factor."""
    one = draw(ARRAYS)
    kind = draw(st.sampled_from(["unrelated", "some places", "factor"]))
    if kind == "unrelated":
        return one, draw(hnp.arrays(np.float32, one.shape, elements=ANY))
    other = one.copy()
    if kind == "factor":
        with np.errstate(all="ignore"):
            return one, (other * np.float32(1 + draw(st.floats(-1e-3, 1e-3)))).astype(np.float32)
    for place in draw(st.lists(st.integers(0, one.size - 1), max_size=4)):
        other[place] = draw(ANY)
    return one, other


def native(tensor: TensorData) -> Summary:
    return summarize(tensor.dtype, np.frombuffer(tensor.buffer, np.uint8))[0]


def measured(subject: Summary, reference: Summary, dtype: str = "float32", equal: bool | None = None) -> SummaryMeasurement:
    found = measure_summaries(dtype, subject, dtype, reference, equal)
    assert isinstance(found, SummaryMeasurement)
    return found


@settings(max_examples=500)
@given(pairs())
def test_never_above_the_distance_from_values(both: tuple[np.ndarray, np.ndarray]) -> None:
    subject, reference = data(both[0]), data(both[1])
    bound = measured(native(subject), native(reference)).distance
    assert bound <= measure_tensors(subject, reference).distance * (1 + 1e-9)


@settings(max_examples=300)
@given(pairs(), st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from(["both", "subject", "reference"]), st.data())
def test_never_above_it_with_foreign_statistics(both: tuple[np.ndarray, np.ndarray], dtype: str, which: str, draw: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(array.copy()).to(getattr(torch, dtype)) for array in both]
    stored = [
        TensorData(dtype, tuple(tensor.shape), tensor.view(torch.int16 if dtype != "float32" else torch.int32).numpy().tobytes())
        for tensor in tensors
    ]
    taken = draw.draw(st.sets(st.sampled_from(["min", "max", "mean", "rms"]), min_size=1))

    def foreign(tensor: object) -> Summary:
        """Summarise as other tools do: reductions in the tensor's own dtype, NaN let through, no counts."""
        statistics = {
            "min": tensor.min().item(),  # type: ignore[attr-defined]
            "max": tensor.max().item(),  # type: ignore[attr-defined]
            "mean": tensor.mean().item(),  # type: ignore[attr-defined]
            "rms": tensor.norm().item() / math.sqrt(tensor.numel()),  # type: ignore[attr-defined]
        }
        return Summary(tensor.numel(), **{name: statistics[name] for name in taken})  # type: ignore[attr-defined]

    sides = [
        foreign(tensor) if which in ("both", side) else native(values)
        for tensor, values, side in zip(tensors, stored, ("subject", "reference"), strict=True)
    ]
    found = measure_summaries(dtype, sides[0], dtype, sides[1], None)
    true = measure_tensors(*stored)
    if isinstance(found, SummaryMeasurement):
        assert found.distance <= true.distance * (1 + 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_foreign_sums_over_many_elements_are_allowed_their_rounding(dtype: str, offset: float) -> None:
    torch = pytest.importorskip("torch")
    tensor = (torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) + offset).to(getattr(torch, dtype))
    foreign = Summary(tensor.numel(), mean=tensor.mean().item(), rms=tensor.norm().item() / math.sqrt(tensor.numel()))
    ours = summarize(dtype, tensor.view(torch.int16 if dtype != "float32" else torch.int32).numpy().view(np.uint8))[0]
    assert measured(foreign, ours, dtype).distance == 0.0
    assert measured(ours, foreign, dtype).distance == 0.0


@pytest.mark.parametrize("which", ["subject", "reference"])
def test_a_foreign_mean_alone_is_allowed_its_rounding(which: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.full((15,), 1290557.0)
    foreign = Summary(15, min=tensor.min().item(), mean=tensor.mean().item())
    assert foreign.mean != 1290557.0
    ours = native(data(tensor.numpy()))
    assert measured(*((foreign, ours) if which == "subject" else (ours, foreign))).distance == 0.0


@pytest.mark.parametrize("factor", [1.01, 1.5, -1.0, 0.0])
def test_a_gross_difference_is_seen(factor: float) -> None:
    values = np.random.default_rng(0).standard_normal(5000) + 0.5
    found = measured(native(data(values * factor)), native(data(values)))
    true = measure_tensors(data(values * factor), data(values)).distance
    assert found.distance > 0.3 * true


def test_one_outlier_is_seen_by_its_eighth() -> None:
    values = np.ones(10_000)
    outlier = values.copy()
    outlier[77] = 101.0
    assert measured(native(data(outlier)), native(data(values))).distance == pytest.approx(100 / 8)


def test_equal_statistics_are_no_distance() -> None:
    values = native(data([1.0, -2.0, 3.0]))
    found = measured(values, values)
    assert (found.equal, found.distance) == (None, 0.0)
    assert found.differences == dict.fromkeys(("min", "max", "mean", "rms", "num_nan", "num_posinf", "num_neginf"), 0.0)
    assert measured(values, values, equal=False).equal is False


def test_nonfinite_counts_that_differ_are_an_infinite_distance() -> None:
    plain = native(data([1.0, 2.0]))
    for bad in ([1.0, math.nan], [1.0, math.inf], [-math.inf, 2.0]):
        assert measured(native(data(bad)), plain).distance == math.inf
    masked = native(data([1.0, -math.inf]))
    assert measured(masked, masked).distance == 0.0


def test_zero_reference() -> None:
    zero = native(data([0.0, 0.0]))
    assert measured(native(data([0.0, 1e-20])), zero).distance == math.inf
    assert measured(zero, zero).distance == 0.0
    assert measured(zero, native(data([1.0, 1.0]))).distance == pytest.approx(1.0)


def test_foreign_nan() -> None:
    """Reductions of other tools let NaN through: it shows in the statistics of the side that has it."""
    broken = Summary(4, math.nan, math.nan, math.nan, math.nan)
    plain = Summary(4, -1.0, 1.0, 0.0, 0.7)
    assert measured(broken, plain).distance == math.inf
    assert measured(broken, broken).distance == 0.0
    assert measured(broken, native(data([math.nan, 1.0, 2.0, 3.0]))).distance == 0.0
    assert measured(plain, native(data([math.nan, 1.0, 2.0, 3.0]))).distance == math.inf
    assert measured(broken, plain).differences["max"] == Undefined("NaN on a side")


def test_a_norm_that_overflowed_its_dtype_says_nothing() -> None:
    """A norm summed in float16 overflows where no element does."""
    overflowed = Summary(1_000_000, 100.0, 100.0, 100.0, math.inf)
    assert measured(overflowed, overflowed, "float16").distance == 0.0
    assert measured(overflowed, native(data(np.full(1_000_000, 100.0), "float16")), "float16").distance == 0.0


def test_a_norm_that_underflowed_its_dtype_is_no_zero_reference() -> None:
    reference = Summary(4, 1e-6, 2e-6, 0.0, 0.0)
    found = measured(Summary(4, 1e-6, 2.1e-6, 0.0, 0.0), reference, "float16")
    assert 0 <= found.distance < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_foreign_rounding_is_no_difference(dtype: str) -> None:
    eps = max(DTYPES[dtype].eps, DTYPES["float32"].eps)
    one, other = Summary(100, -1.0, 1.0, 0.25, 0.5), Summary(100, -1.0, 1.0, 0.25 * (1 + eps / 2), 0.5 * (1 - eps / 2))
    assert measured(one, other, dtype).distance == 0.0
    assert measured(one, Summary(100, -1.0, 1.0, 0.3, 0.5), dtype).distance > 0.05


def test_missing_statistics() -> None:
    found = measured(Summary(4, max=2.0), Summary(4, max=1.0))
    assert found.differences["max"] == 1.0
    assert found.differences["mean"] == Undefined("not taken by the subject and the reference")
    assert found.distance == 0.0, "nothing bounds the reference from above"
    assert measured(Summary(4, max=2.0), Summary(4, max=1.0, min=0.0)).distance == pytest.approx(0.5)
    assert measure_summaries("float32", Summary(4, max=2.0), "float32", Summary(4, mean=1.0), None) == NotMeasured(
        "the two sides have no statistic in common"
    )


def test_complex_statistics_of_different_tools_do_not_compare() -> None:
    found = measure_summaries("complex64", Summary(4, max=2.0), "complex64", native(data([1j], "complex64")), None)
    assert isinstance(found, NotMeasured)
    assert "complex" in found.reason


@pytest.mark.parametrize("value", [3.3581858e-32, 1e-22, 3e-20])
def test_a_norm_whose_squares_underflow_is_allowed_what_it_lost(value: float) -> None:
    tensor = torch.full((2,), value)
    foreign = Summary(2, min=value, max=value, mean=value, rms=tensor.norm().item() / math.sqrt(2))
    ours = summarize("float32", tensor.numpy().view(np.uint8))[0]
    for sides in ((foreign, ours), (ours, foreign)):
        found = measure_summaries("float32", sides[0], "float32", sides[1], equal=None)
        assert isinstance(found, SummaryMeasurement)
        assert found.distance < 1e-6


@pytest.mark.parametrize("end", [-1, 1])
@pytest.mark.parametrize("num_masked", [5, 64])
def test_the_limit_of_each_sides_dtype_is_one_number(end: int, num_masked: int) -> None:
    """A mask of `torch.finfo(dtype).min` differs by its whole size and means the same."""

    def masked(dtype: str, many: int) -> Summary:
        values = np.linspace(-2, 2, 64)
        values[:many] = end * DTYPES[dtype].max
        return summarize(dtype, np.frombuffer(values.astype(dtype).tobytes(), np.uint8))[0]

    for other in ("float32", "float64"):
        found = measure_summaries("float16", masked("float16", num_masked), other, masked(other, num_masked), equal=False)
        assert isinstance(found, SummaryMeasurement)
        assert found.distance == 0.0
    other_many = measure_summaries("float16", masked("float16", num_masked), "float32", masked("float32", num_masked - 1), equal=False)
    one_dtype = measure_summaries("float32", masked("float16", num_masked), "float32", masked("float32", num_masked), equal=False)
    assert isinstance(other_many, SummaryMeasurement)
    assert isinstance(one_dtype, SummaryMeasurement)
    assert min(other_many.distance, one_dtype.distance) > 0.1
