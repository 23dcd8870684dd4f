# SPDX-License-Identifier: Apache-2.0
"""Exact ratios: named where they are simple, for one slot and for all gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.explain.programs import compared, views_of
from tests.match.building import Recorder, scale, train
from ulpscope.explain.clues.factors import clue_gradients, clue_ratio, ratio_of
from ulpscope.explain.suspects import Suspect
from ulpscope.model import Comparison, Finding
from ulpscope.store import MemoryRun
from ulpscope.workflows.compare.comparing import compare_runs


def clues(comparison: Comparison) -> list[str]:
    views = views_of(comparison)
    first = next(view for view in views if view.divergence is not None)
    assert first.divergence is not None
    return clue_ratio(Suspect(first, first.divergence.call, first.divergence.slot), views)


def fault(step: int = 0) -> Finding:
    return Finding(level="fault", kind="optimizer", headline="", step=step, rank=0, phase="optimizer")


def scaled(factor: float, keep: str = "tensors", **place: Any) -> Comparison:
    place = place or {"phase": "forward", "module": "layers.1", "op": "functional.linear"}
    return compare_runs(train(keep=keep, change=scale(factor, **place)), train(keep=keep), replay="none")


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize(
    ("factor", "text"),
    [(2.0, "2"), (0.5, "1/2"), (-1.0, "-1"), (8.0, "8"), (2**0.5, "the root of 2"), (16 / 15, "16/15"), (1 / 3, "1/3")],
)
def test_simple_factors_are_named(keep: str, factor: float, text: str) -> None:
    assert clues(scaled(factor, keep)) == [f"exact ratio: the subject's output 0 is {text} times the reference's"]


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_a_factor_that_means_nothing_is_not_named(keep: str) -> None:
    assert clues(scaled(1.2345, keep)) == []


@given(factor=st.floats(0.1, 10), bend=st.floats(0.01, 1))
def test_what_is_not_proportional_has_no_ratio(factor: float, bend: float) -> None:
    values = np.linspace(-1, 1, 64)
    run = [_single(values), _single(factor * values + bend * values**2)]
    [call] = compare_runs(run[1], run[0], replay="none").calls
    assert ratio_of(call.slots[-1]) is None


def _single(values: np.ndarray) -> Any:
    run = MemoryRun()
    recorder = Recorder(run, 0, "tensors", lambda where, value: value)
    recorder.begin(0)
    recorder.write("forward", "", "torch.cos", {"input.0": np.ones(3), "output.0": values})
    recorder.sink.close()
    return run


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_all_gradients_are_off_by_two(keep: str) -> None:
    comparison = compared("undivided", "", accumulate=2, keep=keep)
    assert clues(comparison) == ["exact ratio: the subject's input 0 is 2 times the reference's"]
    [line] = clue_gradients(fault(), views_of(comparison))
    assert line == "all 14 gradients that enter the optimizer are 2 times the reference's"


def test_clipped_gradients_have_one_factor_whatever_it_is() -> None:
    comparison = scaled(0.3217, phase="between")
    assert clue_gradients(fault(), views_of(comparison)) == ["all 3 gradients that enter the optimizer are 0.3217 times the reference's"]


def test_gradients_that_are_scaled_one_by_one_have_none() -> None:
    comparison = scaled(2.0, phase="between", slot="gradient.layers.1.weight")
    assert clue_gradients(fault(), views_of(comparison)) == []


def test_each_rank_has_its_own_factor() -> None:
    def local(where: Any, value: np.ndarray) -> np.ndarray:
        return value * np.float32(0.5 if where.rank else 0.25) if where.phase == "between" else value

    comparison = compare_runs(train(ranks=(0, 1), change=local), train(ranks=(0, 1)), replay="none")
    [line] = clue_gradients(fault(), views_of(comparison))
    assert line.startswith("each rank's gradients are scaled by a number of its own: 1/4 on rank 0, 1/2 on rank 1")


def test_honest_runs_have_no_factor() -> None:
    assert clue_gradients(fault(), views_of(compared("", ""))) == []
