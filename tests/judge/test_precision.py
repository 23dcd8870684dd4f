# SPDX-License-Identifier: Apache-2.0
"""A machine that rounds the operands of matrix products is one note; a single wrong product is a fault."""

from __future__ import annotations

import numpy as np
import pytest

from tests.match.building import Change, Where, at, scale, train
from ulpscope.workflows.compare.comparing import compare_runs


def narrowed(bits: int, only: str | None = None) -> Change:
    """Products as from operands with so many significant bits; the error is that of rounding, as noise."""
    random = np.random.default_rng(3)

    def change(where: Where, value: np.ndarray) -> np.ndarray:
        if where.op != "functional.linear" or where.phase not in ("forward", "backward") or only not in (None, where.module):
            return value
        error = random.standard_normal(value.shape) * np.sqrt((value.astype("f8") ** 2).mean()) * 0.8 * 2.0**-bits
        return (value + error).astype(value.dtype)

    return change


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
@pytest.mark.parametrize(
    ("bits", "text"), [(11, "about 11 significant bits (float16 or TF32 operands)"), (8, "about 8 significant bits (bfloat16")]
)
def test_a_whole_family_is_one_note(keep: str, bits: int, text: str) -> None:
    comparison = compare_runs(train(keep=keep, change=narrowed(bits)), train(keep=keep))
    if keep == "tensors":
        assert text in next(note.headline for note in comparison.findings if note.kind == "precision")
    assert comparison.faults == ()


def other_rounding(where: Where, value: np.ndarray) -> np.ndarray:
    """Every call that is no product, off by a unit here and there: no input of a product agrees bitwise."""
    if where.op == "functional.linear" or where.phase not in ("forward", "backward") or not np.issubdtype(value.dtype, np.floating):
        return value
    return value * (1 + np.float32(2.0**-23) * (np.arange(value.size).reshape(value.shape) % 2))


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_a_machine_of_coarse_operands_is_one_note_where_all_else_rounds_otherwise_too(keep: str) -> None:
    machine = narrowed(8)
    comparison = compare_runs(train(keep=keep, change=lambda where, value: other_rounding(where, machine(where, value))), train(keep=keep))
    assert comparison.faults == ()
    assert ["about 8 significant bits" in note.headline for note in comparison.findings if note.kind == "precision"] == [True]


def test_rounding_in_all_other_products_is_not_taken_for_a_format() -> None:
    """Statistics of every product move a little; those of one move by what a narrow format explains."""
    wrong = narrowed(9, only="layers.1")
    ours = train(keep="statistics", change=lambda where, value: other_rounding(where, wrong(where, value)))
    comparison = compare_runs(ours, train(keep="statistics"))
    assert [one.call for one in comparison.faults] == ["functional.linear.1"]


def test_one_product_among_exact_ones_is_a_fault() -> None:
    comparison = compare_runs(train(change=narrowed(11, only="layers.1")), train())
    assert [(one.kind, one.call) for one in comparison.findings if one.kind != "coverage"] == [("contributed", "functional.linear.1")]


def test_a_scale_is_not_taken_for_a_format() -> None:
    comparison = compare_runs(train(change=scale(1.0003, op="functional.linear", phase="forward")), train())
    assert comparison.faults[0].call == "functional.linear.0"
    assert all(one.kind != "precision" for one in comparison.findings)


def test_a_few_wrong_elements_are_not_taken_for_a_format() -> None:
    def spike(value: np.ndarray) -> np.ndarray:
        value = value.copy()
        value[0, 0] += np.float32(0.01)
        return value

    comparison = compare_runs(train(change=at(spike, op="functional.linear", phase="forward")), train())
    assert comparison.faults[0].call == "functional.linear.0"


def test_a_worse_call_on_such_a_machine_is_still_found() -> None:
    machine, wrong = narrowed(11), scale(1.05, module="layers.1", op="functional.leaky_relu", phase="forward")
    comparison = compare_runs(train(change=lambda where, value: wrong(where, machine(where, value))), train())
    assert [one.kind for one in comparison.findings if one.kind != "coverage"] == ["contributed", "precision"]
    assert comparison.faults[0].call == "functional.leaky_relu.1"
