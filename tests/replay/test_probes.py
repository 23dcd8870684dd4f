# SPDX-License-Identifier: Apache-2.0
"""Noise on inputs: the same for a seed however it was come by, and none where a value has to stay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ulpscope.model import Slot
from ulpscope.replay.yardstick import probes
from ulpscope.replay.yardstick.probes import STEP, Probes, coarsest_dtype

X, Y, Z = (Slot("input", (place,)) for place in range(3))


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_KEPT", {})


def _inputs() -> dict[Slot, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 30, generator=generator)
    x[0, :4] = torch.tensor([0.0, math.inf, -math.inf, math.nan])
    return {X: x, Y: torch.randn(5, generator=generator).bfloat16(), Z: torch.arange(4)}


def _plainly(value: Tensor, generator: torch.Generator) -> Tensor:
    wide = value.double()
    noise = torch.empty_like(wide).normal_(generator=generator)
    moves = (wide != 0) & torch.isfinite(wide)
    return wide + torch.where(moves, noise * wide.abs().clamp(min=torch.finfo(value.dtype).tiny) * STEP, 0.0)


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=1e300), other.nan_to_num(nan=1e300))


@pytest.mark.parametrize("seed", [0, 3])
def test_noise_is_that_of_the_seed_the_first_time_and_again(seed: int) -> None:
    inputs = _inputs()
    generator = torch.Generator().manual_seed(seed)
    wanted = [_plainly(inputs[slot], generator) for slot in (X, Y)]
    for _ in range(2):
        found = Probes(inputs).noisy(seed)
        assert _equal(found[X], wanted[0])
        assert _equal(found[Y], wanted[1])
        assert found[Z] is inputs[Z]
    assert len(probes._KEPT) == 1


def test_what_lies_in_blocks_is_disturbed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Probes(_inputs()).noisy(1)
    monkeypatch.setattr(probes, "_BLOCK", 16)
    monkeypatch.setattr(probes, "_MOST_KEPT_AT_ONCE", 0)
    monkeypatch.setattr(probes, "_KEPT", {})
    parts = Probes(_inputs()).noisy(1)
    assert all(_equal(whole[slot], parts[slot]) for slot in whole)
    assert not probes._KEPT


def test_only_so_much_noise_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_MOST_KEPT", 400)
    for size in range(50, 100, 10):
        Probes({X: torch.ones(size)}).noisy(0)
    assert sum(sum(sizes) for _, sizes in probes._KEPT) <= 400
    assert (0, (90,)) in probes._KEPT


def test_a_tensor_in_two_slots_is_disturbed_once() -> None:
    x = torch.randn(3, 3)
    found = Probes({X: x, Y: x}).noisy(0)
    assert found[X] is found[Y]


def test_the_coarsest_dtype_is_that_of_any_input_or_of_the_result() -> None:
    wide, narrow, whole = torch.zeros(1), torch.zeros(1).bfloat16(), torch.zeros(1, dtype=torch.int64)
    assert coarsest_dtype([wide, narrow, wide]).name == "bfloat16"
    assert coarsest_dtype([whole, wide, narrow]).name == "bfloat16"
    assert coarsest_dtype([whole, whole]).name == "int64"
