# SPDX-License-Identifier: Apache-2.0
"""What counts as a difference between two calls, and what does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.match.building import record
from ulpscope.judge.differences import argument_differences
from ulpscope.judge.limits import are_same_limit
from ulpscope.match import match_calls
from ulpscope.model import Arguments, CallRecord, Modes, Slot, TensorRecord


def differences(subject: CallRecord, reference: CallRecord) -> list[tuple[str, str, str]]:
    [pair] = match_calls([subject], [reference])
    return [(one.what, one.subject, one.reference) for one in argument_differences(pair)]


def called(*args: Any, **kwargs: Any) -> CallRecord:
    return replace(record("functional.gelu"), arguments=Arguments(args=args, kwargs=kwargs))


@pytest.mark.parametrize(
    ("subject", "reference"),
    [
        (called(1, eps=1e-5), called(1, eps=1e-5)),
        (called({"$tensor": "input.0"}, 0.5), called({"$tensor": "input.0"}, p=0.5)),
        (called({"$tensor": "input.0"}), called(input={"$tensor": "input.0"})),
        (called({"$device": "npu:0"}), called({"$device": "cuda:1"})),
        (called("npu"), called("cpu")),
        (called({"$object": "G", "repr": "<G at 0x7f12>"}), called({"$object": "G", "repr": "<G at 0x9a>"})),
        (called([1, 2]), called({"$tuple": [1, 2]})),
        (called(1), replace(record("functional.gelu"), arguments=None)),
    ],
)
def test_no_difference(subject: CallRecord, reference: CallRecord) -> None:
    assert differences(subject, reference) == []


LIMITS: dict[str, Callable[[str], float]] = {
    "min": lambda dtype: float(torch.finfo(getattr(torch, dtype)).min),
    "max": lambda dtype: float(torch.finfo(getattr(torch, dtype)).max),
    "half of min": lambda dtype: float(torch.finfo(getattr(torch, dtype)).min) / 2,
    "tiny": lambda dtype: float(torch.finfo(getattr(torch, dtype)).tiny),
    "eps": lambda dtype: float(torch.finfo(getattr(torch, dtype)).eps),
    "four eps": lambda dtype: 4 * float(torch.finfo(getattr(torch, dtype)).eps),
}


def masked(dtype: str, value: float, *, name: str = "Tensor.masked_fill", autocast: str | None = None, **rest: Any) -> CallRecord:
    """A call on floating tensors of a dtype that is given a number."""
    slots = ("input.0", "input.1", "output.0")
    tensors = tuple(TensorRecord(slot=Slot.parse(slot), dtype="bool" if slot == "input.1" else dtype, shape=(4, 8)) for slot in slots)
    arguments = Arguments(args=({"$tensor": "input.0"}, {"$tensor": "input.1"}, value), **rest)
    return replace(record(name), slots=tensors, arguments=arguments, modes=Modes(autocast=autocast))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_same_limit_of_each_sides_dtype_is_the_same_argument(dtype: str, limit: str) -> None:
    ours, theirs = LIMITS[limit](dtype), LIMITS[limit]("float32")
    by_autocast = masked("float32", ours, autocast=dtype)
    for subject in (masked(dtype, ours), by_autocast):
        for reference in (masked("float32", theirs), masked("float32", float(f"{theirs:.7g}"))):
            assert "argument 2" not in {what for what, _, _ in differences(subject, reference)}
    of_nothing = (TensorRecord(slot=Slot.parse("output.0"), dtype="float32", shape=(4,)),)
    made = [replace(record("torch.full"), slots=of_nothing, arguments=Arguments(args=([4], value))) for value in (ours, theirs)]
    assert differences(*made) == []


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_of_a_dtype_that_a_side_does_not_work_in_is_another_argument(limit: str) -> None:
    ours, theirs = LIMITS[limit]("float16"), LIMITS[limit]("float32")
    assert [what for what, _, _ in differences(masked("float32", ours), masked("float32", theirs))] == ["argument 2"]


@pytest.mark.parametrize("value", [-1e4, -1e9, -65504.0, 3.3895313892515355e38, 1e-6, float("-inf"), 0.0])
def test_another_number_in_place_of_a_limit_is_another_argument(value: float) -> None:
    found = differences(masked("bfloat16", value), masked("float32", LIMITS["min"]("float32")))
    assert "argument 2" in {what for what, _, _ in found}


_USUAL = [digit * 10.0**power for power in range(-8, 2) for digit in (1, 2, 5, 8)] + [0.9, 0.99, 0.999, 0.95, 0.5, 0.25, 2.0, -1.0, 0.0]


@pytest.mark.parametrize(
    "dtypes", list(itertools.combinations_with_replacement(["float32", "float16", "bfloat16", "float8_e5m2"], 2)), ids=str
)
def test_numbers_that_programs_choose_are_no_limits(dtypes: tuple[str, str]) -> None:
    records = [masked(dtype, 0.0) for dtype in dtypes]
    of_nothing = [replace(one, slots=()) for one in records]
    pairs = [(ours, theirs) for ours in _USUAL for theirs in _USUAL if ours != theirs]
    assert [pair for pair in pairs if are_same_limit(*pair, *records) or are_same_limit(*pair, *of_nothing)] == []


def test_limits_of_integers() -> None:
    ours, theirs = ((torch.iinfo(getattr(torch, one)).min, masked(one, torch.iinfo(getattr(torch, one)).min)) for one in ("int32", "int64"))
    assert ours[0] != theirs[0]
    assert "argument 2" not in {what for what, _, _ in differences(ours[1], theirs[1])}
    other = masked("int32", torch.iinfo(torch.int16).min)
    assert "argument 2" in {what for what, _, _ in differences(other, theirs[1])}


@pytest.mark.parametrize(
    ("subject", "reference", "expected"),
    [
        (called(approximate="tanh"), called(approximate="none"), ("approximate", "'tanh'", "'none'")),
        (called(1, 2), called(1, 3), ("argument 1", "2", "3")),
        (called(approximate="none"), called(), ("approximate", "'none'", "not given")),
        (called(groups=[{"lr": 1.0, "betas": [0.9]}]), called(groups=[{"lr": 2.0, "betas": [0.9]}]), ("groups.0.lr", "1.0", "2.0")),
        (called(betas={"$tuple": [0.9, 0.999]}), called(betas={"$tuple": [0.9, 0.99]}), ("betas.1", "0.999", "0.99")),
        (called([1, [{"a": [2]}]]), called([1, [{"a": [3]}]]), ("argument 0.1.0.a.0", "2", "3")),
        (called([1, 2]), called([1, 2, 3]), ("argument 0", "[1, 2]", "[1, 2, 3]")),
        (called(groups=[{"lr": 1.0}]), called(groups=[{"lr": 1.0}, {"lr": 2.0}]), ("length of groups", "1", "2")),
        (called(groups=[{"lr": 1.0}]), called(groups=[{"lr": 1.0, "fused": True}]), ("groups.0.fused", "not given", "True")),
        (called({"$dtype": "float16"}), called({"$dtype": "float32"}), ("argument 0", "'float16'", "'float32'")),
    ],
)
def test_arguments(subject: CallRecord, reference: CallRecord, expected: tuple[str, str, str]) -> None:
    assert differences(subject, reference) == [expected]


def test_tensors_modes_and_names() -> None:
    first, *rest = record().slots
    other = replace(first, dtype="bfloat16", strides=(1, 4), requires_grad=True, device="npu")
    plain = replace(first, strides=(8, 1), device="cpu")
    subject = replace(record("Tensor.add"), slots=(other, *rest), modes=Modes(autocast="bfloat16", grad=False))
    reference = replace(record("torch.add"), slots=(plain, *rest), modes=Modes())
    assert [what for what, _, _ in differences(subject, reference)] == [
        "operation",
        "dtype of input.0",
        "strides of input.0",
        "requires_grad of input.0",
        "mode autocast",
        "mode grad",
    ]


def test_strides_of_single_elements_mean_nothing() -> None:
    first, *rest = record(shapes=((1, 8),)).slots
    sides = [replace(record(), slots=(replace(first, strides=(stride, 1)), *rest)) for stride in (8, 1)]
    assert differences(sides[0], sides[1]) == []


def test_long_values_are_shortened() -> None:
    [(_, ours, _)] = differences(called("a" * 1000), called("b"))
    assert len(ours) == 120


def test_long_values_show_where_they_differ() -> None:
    [(_, ours, theirs)] = differences(called("a" * 1000 + "x" + "b" * 1000), called("a" * 1000 + "y" + "b" * 1000))
    assert ("x" in ours, "y" in theirs) == (True, True)
    assert max(len(ours), len(theirs)) <= 120


def test_differences_are_bounded() -> None:
    assert len(differences(called(list(range(1000))), called(list(range(1, 1001))))) == 64
