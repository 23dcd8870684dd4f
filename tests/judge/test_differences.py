# SPDX-License-Identifier: Apache-2.0
"""What counts as a difference between two calls, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.match.building import record
from ulpscope.judge.differences import argument_differences
from ulpscope.match import match_calls
from ulpscope.model import Arguments, CallRecord, Modes


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
