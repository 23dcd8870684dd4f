# SPDX-License-Identifier: Apache-2.0
"""Values made from statistics: in range to the ends, as many zeros and infinities as counted, and fit for the operation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.model import Arguments, CallName, CallRecord, Slot, Summary, TensorRecord
from ulpscope.replay.calls.arguments import read_tensor
from ulpscope.replay.calls.generating import Generated
from ulpscope.replay.program import NotReplayable


def _record(op: str, *slots: TensorRecord, args: tuple[Any, ...] = ()) -> CallRecord:
    named = tuple({"$tensor": str(slot.slot)} for slot in slots if slot.slot.role == "input")
    return CallRecord(
        rank=0, step=0, order=0, call=CallName(op, 0), phase="forward", arguments=Arguments(args=(*named, *args)), slots=slots
    )


def _slot(path: int, dtype: str, shape: tuple[int, ...], role: str = "input", **statistics: Any) -> TensorRecord:
    numel = math.prod(shape)
    summary = Summary(numel=numel, **statistics) if statistics else None
    return TensorRecord(slot=Slot(role, (path,)), dtype=dtype, shape=shape, summary=summary)  # type: ignore[arg-type]


def _made(record: CallRecord, place: int = 0, seed: int = 0) -> torch.Tensor:
    generated = Generated(seed)
    return read_tensor(generated.record(record).slots[place], generated.read)


FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"]
_ends = st.floats(-100, 100, width=16)


@given(st.sampled_from(FLOATS), st.tuples(_ends, _ends), st.integers(2, 300), st.integers(0, 5))
def test_floats_meet_both_ends_of_their_range(dtype: str, ends: tuple[float, float], count: int, seed: int) -> None:
    low, high = (float(torch.tensor(end).to(getattr(torch, dtype)).double()) for end in sorted(ends))
    mean = (low + high) / 2
    record = _record("torch.exp", _slot(0, dtype, (count,), min=low, max=high, mean=mean, rms=max(abs(low), abs(high)) / 1.5))
    values = _made(record, seed=seed).double()
    assert values.min() == low
    assert values.max() == high
    assert torch.equal(values, _made(record, seed=seed).double())


def test_sizes_zeros_and_nonfinite_numbers_are_as_counted() -> None:
    statistics = dict(min=-2.0, max=5.0, mean=0.4, rms=1.3, num_nan=3, num_posinf=0, num_neginf=0, num_zero=1000)
    values = _made(_record("torch.exp", _slot(0, "float32", (50, 60), **statistics)))
    finite = values[torch.isfinite(values)].double()
    assert int(values.isnan().sum()) == 3
    assert int((values == 0).sum()) == 1000
    assert abs(float(finite.mean()) - 0.4) < 0.1
    assert abs(float(finite.square().mean().sqrt()) - 1.3) < 0.15


def test_infinite_ends_are_planted_and_the_rest_stays_finite() -> None:
    statistics = dict(min=-math.inf, max=4.0, mean=0.0, rms=1.0, num_nan=0, num_posinf=0, num_neginf=7, num_zero=0)
    values = _made(_record("torch.exp", _slot(0, "float32", (100,), **statistics)))
    assert int(values.isneginf().sum()) == 7
    assert values.max() == 4.0


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8"])
def test_integers_stay_in_range_and_meet_its_ends(dtype: str) -> None:
    values = _made(_record("torch.add", _slot(0, dtype, (40,), min=3.0, max=17.0)))
    assert (values.min(), values.max()) == (3, 17)
    assert str(values.dtype) == f"torch.{dtype}"


def test_as_many_integers_as_the_range_holds_are_a_permutation() -> None:
    values = _made(_record("torch.index_select", _slot(0, "float32", (9,)), _slot(1, "int64", (9,), min=0.0, max=8.0)), 1)
    assert sorted(values.tolist()) == list(range(9))


def test_booleans_have_as_many_true_as_were_counted() -> None:
    values = _made(_record("Tensor.__getitem__", _slot(0, "float32", (4, 5)), _slot(1, "bool", (4, 5), min=0.0, max=1.0, num_zero=13)), 1)
    assert int(values.sum()) == 7


def test_strides_and_complex_numbers() -> None:
    slot = TensorRecord(
        slot=Slot("input", (0,)), dtype="complex64", shape=(3, 4), strides=(1, 3), summary=Summary(numel=24, min=-1.0, max=1.0)
    )
    values = _made(_record("torch.abs", slot))
    assert values.dtype == torch.complex64
    assert values.stride() == (1, 3)


def test_slots_of_one_fingerprint_hold_the_same_values() -> None:
    slots = [
        TensorRecord(
            slot=Slot("input", (place,)), dtype="float32", shape=(5,), summary=Summary(numel=5, min=0.0, max=1.0), fingerprint="u1:a"
        )
        for place in (0, 1)
    ]
    generated = Generated()
    record = generated.record(_record("torch.add", *slots))
    assert record.slots[0].content == record.slots[1].content


def _matrix(seed: int) -> torch.Tensor:
    return _made(_record("torch.linalg.cholesky", _slot(0, "float32", (3, 6, 6), min=-4.0, max=9.0)), seed=seed)


@given(st.integers(0, 50))
def test_matrices_for_cholesky_are_positive_definite(seed: int) -> None:
    matrix = _matrix(seed)
    assert bool((torch.linalg.eigvalsh(matrix.double()) > 0).all())
    assert float(matrix.max()) == pytest.approx(9.0)


def test_classes_are_classes_and_the_ignored_one() -> None:
    record = _record("functional.cross_entropy", _slot(0, "float32", (40, 7)), _slot(1, "int64", (40,), min=-100.0, max=6.0))
    values = set(_made(record, 1).tolist())
    assert values <= {-100, *range(7)}
    assert {-100, 6} <= values


def test_places_to_write_to_are_named_once() -> None:
    slots = (_slot(0, "float32", (5, 9)), _slot(1, "int64", (5, 4), min=0.0, max=8.0))
    record = CallRecord(
        rank=0,
        step=0,
        order=0,
        call=CallName("Tensor.scatter", 0),
        phase="forward",
        arguments=Arguments(args=({"$tensor": "input.0"}, 1, {"$tensor": "input.1"}, 2.0)),
        slots=slots,
    )
    values = _made(record, 1)
    assert all(len(set(row)) == len(row) for row in values.tolist())


def test_boundaries_ascend_and_masks_hide_no_whole_row() -> None:
    boundaries = _made(_record("torch.searchsorted", _slot(0, "float32", (20,), min=0.0, max=1.0), _slot(1, "float32", (5,))))
    assert torch.equal(boundaries, boundaries.sort().values)
    shape = (2, 2, 6, 4)
    slots = [_slot(place, "float32", shape) for place in range(3)]
    mask = _slot(3, "bool", (6, 6), min=0.0, max=1.0, num_zero=30)
    values = _made(_record("functional.scaled_dot_product_attention", *slots, mask), 3)
    assert bool(values.any(-1).all())


def test_repetitions_add_up_to_the_recorded_result() -> None:
    made = _slot(0, "float32", (23, 2), role="output")
    counts = _slot(1, "int64", (6,), min=1.0, max=9.0)
    record = _record("torch.repeat_interleave", _slot(0, "float32", (6, 2)), counts, made, args=(0,))
    assert int(_made(record, 1).sum()) == 23


def test_a_shape_that_no_memory_holds_is_refused_before_it_is_made() -> None:
    with pytest.raises(NotReplayable, match="1,000,000,000,000 elements"):
        Generated().record(_record("torch.exp", _slot(0, "float32", (10**6, 10**6), min=0.0, max=1.0)))
