# SPDX-License-Identifier: Apache-2.0
"""Take statistics of many tensors: every way gives the same, and shards give the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ulpscope.capture.health import readings as statistics
from ulpscope.capture.health.readings import Sampler, measure, traits
from ulpscope.numerics.summary.composing import compose, counts_of_intervals, equal_signs, norms, sample_positions

BOUNDS = (-1.0, 0.0, 1.0)
FLOATS = st.floats(width=32, allow_subnormal=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0])


def finished(pending: statistics.Pending) -> Any:
    return pending.finish([array.numpy() for array in pending.arrays])


def in_rows(tensors: list[torch.Tensor]) -> Any:
    return finished(statistics._measure_in_rows(tensors, BOUNDS))


def odd_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    tensors = [
        values,
        values[:15].view(3, 5),
        values[:8192] * 1e-30,
        values[:9000].clone(),
        torch.zeros(10),
        torch.full((7,), float("nan")),
    ]
    tensors += [values[:100] * 1e20, values[:1200].view(40, 30).t(), torch.zeros(0), values[:1]]
    tensors += [torch.cat([torch.tensor([1e-30]), values[:50]]), torch.cat([torch.zeros(1), values[:50] * 1e-25])]
    tensors = [tensor.to(dtype) for tensor in tensors]
    tensors[3][17], tensors[3][5000], tensors[0][3] = float("inf"), float("nan"), 0.0
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_joined_rows_give_what_the_kernel_of_the_trunk_gives(dtype: torch.dtype) -> None:
    tensors = odd_tensors(dtype)
    np.testing.assert_allclose(in_rows(tensors), finished(measure(tensors, BOUNDS)), rtol=3e-6, atol=1e-45)


@given(values=hnp.arrays(np.float32, st.integers(1, 40), elements=FLOATS))
def test_any_values(values: Any) -> None:
    tensor = torch.from_numpy(values)
    with np.errstate(all="ignore"):
        row, expected = in_rows([tensor])[0], finished(measure([tensor], BOUNDS))[0]
        np.testing.assert_allclose(row, expected, rtol=3e-6, atol=1e-38 + 3e-6 * np.nan_to_num(expected[3]))
        assert row[6:].astype(int).tolist() == counts_of_intervals(values, BOUNDS).tolist()


def test_tensors_of_several_dtypes_come_back_in_their_order() -> None:
    tensors = [torch.ones(3), torch.full((2,), 2.0, dtype=torch.bfloat16), torch.full((4,), 3.0, dtype=torch.float64)]
    assert finished(measure(tensors))[:, 3].tolist() == [1.0, 2.0, 3.0]


TRITON = """
import sys, numpy as np, torch
sys.path.insert(0, sys.argv[1])
from tests.health.test_statistics import BOUNDS, finished, odd_tensors
from ulpscope.capture import statistics, statistics_triton
from ulpscope.capture.health.readings import Batch, Sampler, measure
def lying(tensors):
    found = statistics_triton.Readable(torch.device("cpu"), tuple(t.dtype for t in tensors), tuple(t.numel() for t in tensors))
    found.move([tensor.data_ptr() for tensor in tensors])
    return found
tensors = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    tensors += [tensor for tensor in odd_tensors(dtype) if statistics_triton.can_read(tensor)]
readable = lying(tensors)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    places = [place for place, tensor in enumerate(tensors) if tensor.dtype is dtype]
    assert len(places) >= 9, len(places)
    pending = statistics._measure_with_triton(readable, statistics_triton.Table(readable, places), BOUNDS)
    assert not statistics_triton.failure, statistics_triton.failure
    expected = finished(measure([tensors[place] for place in places], BOUNDS))
    np.testing.assert_allclose(finished(pending), expected, rtol=3e-6, atol=1e-45)
tensors = [odd_tensors(dtype)[place] for place, dtype in ((1, torch.float32), (7, torch.bfloat16), (9, torch.float16), (4, torch.float32))]
sampler = Sampler([np.arange(min(5, tensor.numel())) for tensor in tensors])
taken = statistics_triton.sample_matrix(lying(tensors), sampler.offsets(tensors))
assert torch.equal(taken, sampler.take(tensors))
rows = finished(statistics._measure_with_triton(*statistics_triton.readable_rows(taken, sampler.counts), ()))
np.testing.assert_allclose(rows, finished(statistics.measure_rows(taken, sampler.counts)), rtol=3e-6)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
def test_the_triton_kernels_give_the_same() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", TRITON, root], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@given(
    values=hnp.arrays(np.float64, st.integers(2, 60), elements=st.floats(-1e150, 1e150) | st.sampled_from([0.0, np.inf, np.nan])),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_shards_compose_to_the_whole(values: Any, cuts: list[int]) -> None:
    edges = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    shards = [torch.from_numpy(values[first:last]) for first, last in pairwise(edges)]
    numel = np.array([len(shard) for shard in shards], dtype=np.int64)
    joined = compose(finished(measure(shards)), numel, np.zeros(len(shards), dtype=np.int64), 1)[0]
    expected = finished(measure([torch.from_numpy(values)]))[0]
    np.testing.assert_allclose(joined, expected, rtol=1e-9, atol=1e-9 * np.nan_to_num(expected[3]))


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_groups_compose_as_each_does_alone(groups: list[int], random: Any) -> None:
    shards = [torch.tensor([random.choice([0.0, 1.5, -2.0, float("nan")]) for _ in range(random.randrange(1, 4))]) for _ in groups]
    values, numel = finished(measure(shards)), np.array([len(shard) for shard in shards], dtype=np.int64)
    found = compose(values, numel, np.array(groups), 4)
    for group in range(4):
        mine = [shard for shard, other in zip(shards, groups, strict=True) if other == group]
        expected = finished(measure([torch.cat(mine)]))[0] if mine else np.full(6, np.nan)
        np.testing.assert_allclose(found[group], expected, rtol=1e-12, atol=1e-15)


def test_norms_are_over_finite_elements() -> None:
    rows = finished(measure([torch.tensor([3.0, 4.0]), torch.tensor([3.0, float("nan"), 4.0])]))
    assert norms(rows, np.array([2, 3])).tolist() == pytest.approx([5.0, 5.0])


@given(st.integers(1, 5_000_000_000), st.integers(1, 1024), st.text(max_size=20))
def test_sampled_positions_are_a_set_within_the_tensor(numel: int, at_most: int, name: str) -> None:
    positions = sample_positions(name, numel, at_most)
    assert len(positions) == min(numel, at_most)
    assert positions[0] >= 0
    assert positions[-1] < numel
    assert (np.diff(positions) > 0).all()


def test_sampled_positions_never_change() -> None:
    """Runs of years ago sample the same positions, or their signs cannot be compared."""
    assert sample_positions("layers.0.weight", 1_000_000, 4).tolist() == [187503, 309302, 503736, 935585]


def test_equal_signs_count_only_what_was_sampled() -> None:
    one, other = np.array([[0b10100000]], dtype=np.uint8), np.array([[0b10010000]], dtype=np.uint8)
    assert equal_signs(one, other, np.array([4])).tolist() == [0.5]
    assert np.isnan(equal_signs(one, other, np.array([0]))).all()


class Own(torch.Tensor): ...


def test_traits_tell_tensors_that_moved_from_tensors_that_changed() -> None:
    one = torch.zeros(2, 3, 4, 5)
    (address,), forms = traits([one])
    assert address == one.data_ptr()
    assert traits([one.clone()])[1] == forms
    own, turned = one.as_subclass(Own), one.to(memory_format=torch.channels_last)
    assert all(traits([other])[1] != forms for other in (one.double(), one[:1], turned, own))
    assert traits([own, one])[1] != traits([own, turned])[1]


def test_memory_that_was_given_back_holds_nothing() -> None:
    gone = torch.ones(100)
    gone.untyped_storage().resize_(0)
    rows = finished(measure([gone, torch.ones(3)], BOUNDS))
    assert np.isnan(rows[0, :4]).all()
    assert rows[1, :4].tolist() == [1.0] * 4


def test_a_sampler_reads_in_index_order_whatever_the_memory_format() -> None:
    plain = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    other = plain.to(memory_format=torch.channels_last)
    sampler = Sampler([np.array([0, 7, 119]), np.array([1])])
    assert sampler.take([other, torch.tensor([5.0, 6.0])]).tolist() == [[0.0, 7.0, 119.0], [6.0, 0.0, 0.0]]
    offsets = sampler.offsets([other, torch.tensor([5.0, 6.0])])
    assert other.as_strided((120,), (1,))[offsets[0]].tolist() == [0.0, 7.0, 119.0]
