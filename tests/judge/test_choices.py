# SPDX-License-Identifier: Apache-2.0
"""Results that nothing determines fully, judged by statistics: another honest choice is no fault, and what cannot be one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.judge.test_calls import call, normal, off, verdict
from ulpscope.judge import Trail, judge_call
from ulpscope.measure import measure_slot
from ulpscope.model import JudgedCall, SlotPair, TensorData

A = normal(6, 6)
A = A @ A.T
VALUES, VECTORS = (part.astype("f4") for part in np.linalg.eigh(A.astype("f8")))
SIGNS = np.array([1, -1, 1, -1, -1, 1], "f4")


def by_statistics(op: str, subject: dict[str, Any], reference: dict[str, Any], trail: Trail | None = None, **rest: Any) -> JudgedCall:
    """Judged as if no values had been kept."""
    pair, _ = call(op, subject, reference, **rest)
    slots = tuple(
        SlotPair(one.slot, *(side and replace(side, content=None) for side in (one.subject, one.reference))) for one in pair.slots
    )
    return judge_call(replace(pair, slots=slots), [measure_slot(slot, _nothing, _nothing) for slot in slots], trail=trail)


def _nothing(content: str) -> TensorData:
    raise AssertionError(f"{content} is asked for")


def factors(change: Callable[[np.ndarray], np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    reference = {"input.0": A, "output.0": VALUES, "output.1": VECTORS}
    return reference | {"output.1": change(VECTORS)}, reference


def test_signs_of_eigenvectors_are_free() -> None:
    one = verdict(by_statistics("torch.linalg.eigh", *factors(lambda v: v * SIGNS)), "output.1")
    assert (one.level, one.rule) == ("rounding", "choice")


@pytest.mark.parametrize(
    "change", [lambda v: v * SIGNS * np.float32(1.01), lambda v: np.where(v == v[2, 3], 0, v)], ids=["scaled", "zeroed"]
)
def test_eigenvectors_of_another_size_are_a_fault(change: Callable[[np.ndarray], np.ndarray]) -> None:
    assert verdict(by_statistics("torch.linalg.eigh", *factors(change)), "output.1").level == "differs"


def test_eigenvalues_have_no_free_sign() -> None:
    reference = {"input.0": A, "output.0": VALUES, "output.1": VECTORS}
    assert verdict(by_statistics("torch.linalg.eigh", reference | {"output.0": -VALUES}, reference)).level == "differs"


def test_another_sign_is_a_fault_where_the_result_is_unique() -> None:
    assert (
        verdict(by_statistics("torch.linalg.inv", {"input.0": A, "output.0": VECTORS * SIGNS}, {"input.0": A, "output.0": VECTORS})).level
        == "differs"
    )


def test_what_is_made_of_free_signs_is_as_free_until_they_cancel() -> None:
    trail, x = Trail(), normal(8, 6, seed=3)
    by_statistics("torch.linalg.eigh", *factors(lambda v: v * SIGNS), trail=trail)
    rotated = by_statistics(
        "Tensor.matmul",
        {"input.0": x, "input.1": VECTORS * SIGNS, "output.0": x @ (VECTORS * SIGNS)},
        {"input.0": x, "input.1": VECTORS, "output.0": x @ VECTORS},
        trail,
    )
    assert (verdict(rotated).level, verdict(rotated).rule) == ("rounding", "choice")
    back = by_statistics(
        "Tensor.matmul",
        {"input.0": x @ (VECTORS * SIGNS), "input.1": (VECTORS * SIGNS).T, "output.0": off(x, 1e-7)},
        {"input.0": x @ VECTORS, "input.1": VECTORS.T, "output.0": x},
        trail,
    )
    assert (verdict(back).level, verdict(back).rule) == ("rounding", "derived")
    assert trail.drift < 1e-5
    elsewhere = by_statistics("functional.gelu", {"input.0": A, "output.0": off(x, 1e-2)}, {"input.0": A, "output.0": x}, trail)
    assert verdict(elsewhere).level == "differs"


def test_gradients_of_free_values_are_free() -> None:
    trail, x, g = Trail(), normal(8, 6, seed=3), normal(8, 6, seed=4)
    flipped = VECTORS * SIGNS
    by_statistics("torch.linalg.eigh", *factors(lambda v: v * SIGNS), trail=trail)
    by_statistics(
        "Tensor.matmul",
        {"input.0": x, "input.1": flipped, "output.0": x @ flipped},
        {"input.0": x, "input.1": VECTORS, "output.0": x @ VECTORS},
        trail,
    )
    backward = by_statistics(
        "Tensor.matmul", {"input.0": g, "output.0": g @ flipped.T}, {"input.0": g, "output.0": g @ VECTORS.T}, trail, phase="backward"
    )
    assert verdict(backward).rule == "choice"


KEYS = np.array([2, 0, 1, 1, 0, 2, 1, 0])
STABLE, OTHER = np.argsort(KEYS, kind="stable"), np.array([7, 4, 1, 6, 3, 2, 5, 0])


@pytest.mark.parametrize("op", ["torch.sort", "torch.argsort"])
@pytest.mark.parametrize("keys", [KEYS, KEYS.astype("f4")], ids=["integers", "floats"])
def test_the_order_of_equal_keys_is_free(op: str, keys: np.ndarray) -> None:
    values, slot = ({"output.0": np.sort(keys)}, "output.1") if op == "torch.sort" else ({}, "output.0")
    one = by_statistics(op, {"input.0": keys, **values, slot: OTHER}, {"input.0": keys, **values, slot: STABLE})
    assert (verdict(one, slot).level, verdict(one, slot).rule) == ("rounding", "choice")


def test_an_index_twice_is_no_order() -> None:
    twice = OTHER.copy()
    twice[0] = 6
    one = by_statistics("torch.argsort", {"input.0": KEYS, "output.0": twice}, {"input.0": KEYS, "output.0": STABLE})
    assert verdict(one).level == "differs"


def test_other_indices_of_other_values_are_a_fault() -> None:
    ours, theirs = {"output.0": np.sort(KEYS)[::-1].copy(), "output.1": OTHER}, {"output.0": np.sort(KEYS), "output.1": STABLE}
    assert verdict(by_statistics("torch.sort", {"input.0": KEYS} | ours, {"input.0": KEYS} | theirs), "output.1").level == "differs"


@pytest.mark.parametrize(
    ("x", "level"),
    [(np.array([0, 1, 1, 0]), "rounding"), (np.array([0, 0, 0.5, 0.5], "f2"), "rounding"), (normal(4), "differs")],
    ids=["integers", "float16", "float32"],
)
def test_the_place_of_a_maximum_is_free_where_values_may_be_equal(x: np.ndarray, level: str) -> None:
    ours, theirs = {"output.0": x.max(), "output.1": np.array(1)}, {"output.0": x.max(), "output.1": np.array(2)}
    assert verdict(by_statistics("torch.max", {"input.0": x} | ours, {"input.0": x} | theirs), "output.1").level == level


@pytest.mark.parametrize("place", [-1, 4])
def test_a_place_outside_of_the_input_is_no_choice(place: int) -> None:
    x = np.array([0, 1, 1, 0])
    one = by_statistics("torch.argmax", {"input.0": x, "output.0": np.array(place)}, {"input.0": x, "output.0": np.array(2)})
    assert verdict(one).level == "differs"


def test_what_is_cut_from_another_order_is_as_free() -> None:
    trail, x = Trail(), normal(8, 4)
    by_statistics("torch.argsort", {"input.0": KEYS, "output.0": OTHER}, {"input.0": KEYS, "output.0": STABLE}, trail)
    picked = by_statistics(
        "Tensor.__getitem__",
        {"input.0": x, "input.1": OTHER, "output.0": x[OTHER]},
        {"input.0": x, "input.1": STABLE, "output.0": x[STABLE]},
        trail,
    )
    cut = by_statistics(
        "Tensor.__getitem__", {"input.0": x[OTHER], "output.0": x[OTHER][:5]}, {"input.0": x[STABLE], "output.0": x[STABLE][:5]}, trail
    )
    assert [verdict(picked).rule, verdict(cut).rule] == ["choice", "choice"]
    part = by_statistics(
        "Tensor.__getitem__", {"input.0": OTHER, "output.0": OTHER[:3]}, {"input.0": STABLE, "output.0": STABLE[:3]}, trail
    )
    assert verdict(part).rule == "choice"
    back = by_statistics(
        "Tensor.index_copy",
        {"input.0": x[OTHER], "input.1": OTHER, "output.0": off(x, 1e-7)},
        {"input.0": x[STABLE], "input.1": STABLE, "output.0": x},
        trail,
    )
    assert verdict(back).rule == "derived"


@pytest.mark.parametrize(("share", "rule"), [(1.0, "choice"), (0.5, "derived")], ids=["kept", "half of it lost"])
def test_a_gradient_follows_the_choice_that_was_made_forward(share: float, rule: str) -> None:
    trail, x, g = Trail(), np.array([0, 1, 1, 0], "f2"), np.float32([0.3])
    ours, theirs = {"output.0": x.max(), "output.1": np.array(1)}, {"output.0": x.max(), "output.1": np.array(2)}
    by_statistics("torch.max", {"input.0": x} | ours, {"input.0": x} | theirs, trail)
    handed = np.float32([0, 0.3 * share, 0, 0]), np.float32([0, 0, 0.3, 0])
    sides = ({"input.0": off(g, 1e-7), "output.0": handed[0]}, {"input.0": g, "output.0": handed[1]})
    assert verdict(by_statistics("torch.max", *sides, trail, phase="backward")).rule == rule


def routed(shares: dict[int, float]) -> np.ndarray:
    gradient = normal(512, seed=8) * np.float32(0.01)
    gradient[0] = -0.06
    for place, share in shares.items():
        gradient[place] = share
    return gradient


def pooled(subject: np.ndarray, reference: np.ndarray, *, is_kept: bool = True) -> str:
    x, g = normal(512, seed=2), normal(32, seed=8)
    g += reference.sum() / 32 - g.mean()
    trail = Trail()
    by_statistics("Tensor.amax", {"input.0": off(x, 1e-5), "output.0": off(g, 1e-5)}, {"input.0": x, "output.0": g}, trail)
    trail.drift = 1e-4
    entering = {"input.0": g + (subject.sum() - reference.sum()) / 32 if is_kept else g}, {"input.0": g}
    one = by_statistics("Tensor.amax", entering[0] | {"output.0": subject}, entering[1] | {"output.0": reference}, trail, phase="backward")
    return verdict(one).level


def test_a_gradient_split_among_equals_or_handed_to_another_is_honest() -> None:
    assert pooled(routed({16: 0.014, 17: 0.014}), routed({16: 0.028, 17: 0.0})) == "rounding"
    assert pooled(routed({16: 0.0, 17: 0.028}), routed({16: 0.028, 17: 0.0})) == "rounding"


def test_a_gradient_that_gets_lost_is_not() -> None:
    assert pooled(routed({16: 0.0, 17: 0.0}), routed({16: 0.028, 17: 0.0}), is_kept=False) == "differs"


@pytest.mark.parametrize("scale", [1.25, 4.0])
def test_a_gradient_that_is_larger_everywhere_is_not(scale: float) -> None:
    assert pooled(routed({}) * np.float32(scale), routed({})) == "differs"


def test_one_gradient_of_another_order_of_magnitude_is_not() -> None:
    assert pooled(routed({16: 8.0}), routed({})) == "differs"
