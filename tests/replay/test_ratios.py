# SPDX-License-Identifier: Apache-2.0
"""Ratios by the formula at the head of their module, whatever shortcut is taken to them."""

from __future__ import annotations

import gc
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ulpscope.model import DTYPES
from ulpscope.replay.yardstick import ratios as module
from ulpscope.replay.yardstick.probes import STEP
from ulpscope.replay.yardstick.ratios import Evidence, Ratios, ratios

FLOAT32 = DTYPES["float32"]
SHAPES = [(7, 9), (40,), (), (3, 4, 5), (1, 1), (5, 1)]


def _values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _rounded(exact: Tensor, seed: int, size: float = 1.0) -> Tensor:
    return (exact * (1 + size * 2.0**-24 * _values(*exact.shape, seed=seed))).float()


def _evidence(exact: Tensor, parts: str) -> Evidence:
    return Evidence(
        exact=exact,
        moved2=exact.square() * 2 + 1 if "moved" in parts else None,
        step=STEP,
        kernel=_rounded(exact, 3) if "kernel" in parts else None,
        decomposed=_rounded(exact, 4, 3.0) if "decomposed" in parts else None,
        rounded=_rounded(exact, 5, 50.0).double() if "rounded" in parts else None,
    )


def _by_formula(recorded: Tensor, evidence: Evidence) -> tuple[float, float]:
    """Compute the largest and the rms ratio of finite tensors without jumps, by their definition."""
    exact = np.atleast_1d(evidence.exact.numpy())

    def pool(values: Any) -> Any:
        return values + values.mean(-1, keepdims=True) / 16 + values.mean() / 16

    def squared(other: Tensor | None) -> Any:
        return pool((np.atleast_1d(other.double().numpy()) - exact) ** 2) if other is not None else 0.0

    unit2 = exact**2 if evidence.moved2 is None else np.maximum(np.atleast_1d(evidence.moved2.numpy()), exact**2)
    base = (FLOAT32.eps / 2) ** 2 * pool(unit2) + FLOAT32.tiny**2 + squared(evidence.rounded)
    independent = base + squared(evidence.decomposed)
    kernel2 = squared(evidence.kernel)
    s2 = independent + (np.minimum(kernel2, independent) if evidence.decomposed is not None else kernel2)
    found = np.sqrt((np.atleast_1d(recorded.double().numpy()) - exact) ** 2 / s2)
    return float(found.max()), float(np.sqrt((found**2).mean()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "parts", ["", "moved", "moved kernel", "moved kernel decomposed", "moved kernel decomposed rounded", "moved decomposed"]
)
def test_ratios_are_what_the_formula_says(shape: tuple[int, ...], parts: str) -> None:
    exact = _values(*shape, seed=1)
    recorded, evidence = _rounded(exact, 2), _evidence(exact, parts)
    found = ratios(recorded, evidence, FLOAT32, FLOAT32.max)
    assert (found.max_ratio, found.rms_ratio) == pytest.approx(_by_formula(recorded, evidence), rel=1e-12)
    assert found.num_nonfinite == 0
    assert found.error == pytest.approx(float((recorded - exact).norm() / exact.norm()), rel=1e-12)


def _same(one: Ratios, other: Ratios) -> None:
    for name, value in asdict(one).items():
        there = getattr(other, name)
        assert value is there is None or value == pytest.approx(there, rel=1e-12, abs=1e-300, nan_ok=True), name


@settings(deadline=None, max_examples=60)
@given(
    numbers=st.lists(
        st.sampled_from([0.0, 1.0, -2.5, 1e30, -1e-30, 3.4e38, 1e39, math.inf, -math.inf, math.nan]), min_size=12, max_size=12
    ),
    changed=st.lists(st.sampled_from([None, None, None, math.nan, math.inf, 0.0, 7.0]), min_size=12, max_size=12),
    fragile=st.booleans(),
)
def test_blocks_change_nothing(numbers: list[float], changed: list[float | None], fragile: bool) -> None:
    exact = torch.tensor(numbers, dtype=torch.float64).view(3, 4)
    recorded = torch.tensor([there if there is not None else here for here, there in zip(numbers, changed, strict=True)]).view(3, 4).float()
    evidence = Evidence(
        exact=exact,
        moved2=torch.where(exact.abs() < 2, exact.square() + 1, 1e20),
        step=STEP,
        is_fragile=torch.isnan(exact) if fragile else None,
        kernel=exact.float(),
        decomposed=recorded * 1.5,
    )
    whole = ratios(recorded, evidence, FLOAT32, FLOAT32.max)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", 4)
        _same(whole, ratios(recorded, evidence, FLOAT32, FLOAT32.max))
        patch.setattr(module, "_BLOCK", 3)
        _same(whole, ratios(recorded, evidence, FLOAT32, FLOAT32.max))


@pytest.mark.parametrize("shape", [(7, 9), (40,), (3, 4, 5)])
def test_a_result_that_is_the_exact_one_is_told_at_once_and_alike(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = _values(*shape, seed=1).float().double()
    quick = ratios(exact.float(), Evidence(exact=exact), FLOAT32, FLOAT32.max)
    monkeypatch.setattr(module, "_nothing_apart", lambda *_: None)
    _same(quick, ratios(exact.float(), Evidence(exact=exact), FLOAT32, FLOAT32.max))
    assert (quick.max_ratio, quick.rms_ratio, quick.error) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("place", [0, 17, 62])
def test_one_element_that_differs_is_not_taken_for_the_exact_one(place: int) -> None:
    exact = _values(7, 9, seed=1).float().double()
    recorded = exact.float()
    recorded.view(-1)[place] = torch.nextafter(recorded.view(-1)[place], torch.tensor(math.inf))
    found = ratios(recorded, Evidence(exact=exact), FLOAT32, FLOAT32.max)
    assert found.worst == place
    assert found.max_ratio > 0


def test_a_nan_where_the_exact_result_is_finite_is_counted() -> None:
    exact = _values(7, 9, seed=1)
    recorded = exact.float()
    recorded[3, 3] = math.nan
    exact[5, 5] = math.inf
    assert ratios(recorded, Evidence(exact=exact), FLOAT32, FLOAT32.max).num_nonfinite == 2
    recorded[5, 5] = math.inf
    assert ratios(recorded, Evidence(exact=exact), FLOAT32, FLOAT32.max).num_nonfinite == 1


def test_no_tensor_waits_for_the_garbage_collector() -> None:
    exact = _values(7, 9, seed=1)
    gc.collect()
    gc.disable()
    try:
        ratios(_rounded(exact, 2), _evidence(exact, "moved kernel decomposed"), coarsest=FLOAT32, finest_max=math.inf)
        left = [one for one in gc.get_objects() if type(one).__module__ == module.__name__ and not isinstance(one, type)]
    finally:
        gc.enable()
    assert left == []
