# SPDX-License-Identifier: Apache-2.0
"""Test the rule for one call: its passage, from the non-finite values that it received and left."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.model import Summary
from ulpscope.numerics.nonfinite_rule import (
    CLEAN,
    Kinds,
    asks_for,
    gives_data,
    is_move,
    kinds_of,
    kinds_of_range,
    makes_nothing_new,
    pass_through,
)
from ulpscope.numerics.summary.summary import summarize

NAN, INF, NEG = Kinds.NAN, Kinds.POSINF, Kinds.NEGINF


@pytest.mark.parametrize(
    ("op", "entering", "leaving", "asked", "passage"),
    [
        ("torch.exp", {}, CLEAN, False, "clean"),
        ("torch.exp", {}, INF, False, "made"),
        ("Tensor.div", {}, NAN, False, "made"),
        ("functional.linear", {}, NEG, False, "made"),
        ("torch.log", {}, NEG, False, "soft"),
        ("Tensor.masked_fill", {}, NEG, True, "masked"),
        ("Tensor.fill_", {}, NAN, True, "given"),
        ("torch.tensor", {}, INF, False, "masked"),
        ("Tensor.add", {None: NEG}, NEG, False, "masked"),
        ("functional.softmax", {"masked": NEG}, CLEAN, False, "masked"),
        ("functional.softmax", {"masked": NEG}, NAN, False, "made"),
        ("Tensor.neg", {"soft": NEG}, INF, False, "passed"),
        ("Tensor.mean", {"soft": NEG}, NEG, False, "soft"),
        ("functional.linear", {None: NAN}, NAN, False, "given"),
        ("functional.linear", {"made": NAN}, NAN, False, "passed"),
        ("functional.linear", {"given": INF}, NAN, False, "passed"),
        ("torch.where", {"made": NAN}, CLEAN, False, "swallowed"),
        ("torch.where", {None: INF}, CLEAN, False, "swallowed"),
        ("functional.relu", {"masked": NEG}, CLEAN, False, "masked"),
    ],
)
def test_what_a_call_did(op: str, entering: dict[str | None, Kinds], leaving: Kinds, asked: bool, passage: str) -> None:
    assert pass_through(op, entering, leaving, asked=asked) == passage  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "leaving", "answer"),
    [
        ((1.0, None, "sum"), NEG, False),
        ((float("-inf"),), NEG, True),
        ((float("inf"),), INF, True),
        ((-1e9,), NEG, True),
        ((-1e9,), INF, False),
        ((1e9,), NEG, False),
        (({"$tuple": [0, [float("-inf")]]},), NEG, True),
    ],
)
def test_who_gives_an_infinity_asked_for_it(values: tuple[object, ...], leaving: Kinds, answer: bool) -> None:
    assert asks_for(values, leaving) is answer


def test_names_of_operations_in_every_spelling() -> None:
    assert makes_nothing_new("Tensor.reshape")
    assert makes_nothing_new("aten.view.default")
    assert makes_nothing_new("functional.gelu")
    assert not is_move("functional.gelu")
    assert not makes_nothing_new("functional.linear")
    assert not makes_nothing_new("Tensor.half")
    assert gives_data("torch.tensor")


def test_without_counts_the_extremes_tell() -> None:
    assert kinds_of(Summary(3, min=-math.inf, max=1.0)) == NEG
    assert kinds_of(Summary(3, num_nan=1)) == NAN
    assert kinds_of(Summary(3)) == CLEAN
    assert kinds_of(None) == CLEAN


def test_the_end_of_the_dtype_counts_only_where_a_device_stops_there() -> None:
    summary = Summary(3, min=0.0, max=65504.0, num_nan=0, num_posinf=0, num_neginf=0)
    assert kinds_of(summary, "float16") == CLEAN
    assert kinds_of(summary, "float16", saturates=True) == Kinds.LIMIT
    assert kinds_of(summary, "bfloat16", saturates=True) == CLEAN
    assert kinds_of_range(0.0, 65504.0, 65504.0) == Kinds.LIMIT
    assert kinds_of_range(0.0, 65504.0) == CLEAN


@given(st.lists(st.sampled_from([0.0, 1.5, -2.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=20))
def test_extremes_and_summaries_agree(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    summary, _ = summarize("float32", array.view(np.uint8))
    by_range = kinds_of_range(float(array.min()), float(array.max()))
    by_summary = kinds_of(summary, "float32")
    assert bool(by_range) == bool(by_summary)
    if NAN not in by_summary:
        assert by_range == by_summary
