# SPDX-License-Identifier: Apache-2.0
"""Test `check --rules NAME` by the published standards: the operands of each comparison, and that each finds a wrong kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import ulpscope
from ulpscope.model import CallName, CallRecord, Slot
from ulpscope.model.check.checks import CheckedSlot
from ulpscope.model.check.standards import STANDARD_METRICS
from ulpscope.workflows.check import rules as check_rules
from ulpscope.workflows.check.checking import check_run
from ulpscope.workflows.check.rules import Judged
from ulpscope.workflows.check.standard_rules import STANDARD_RULES

OUT = Slot("output", (0,))
LEFT, RIGHT = Slot("input", (0,)), Slot("input", (1,))


@dataclass
class Product:
    """A matrix product, and the order of its rows; it notes what it was given."""

    inputs: Mapping[Slot, torch.Tensor]
    given: list[Mapping[Slot, torch.Tensor]] = field(default_factory=list)
    name: str = "torch.matmul.0"

    def __call__(self, inputs: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        self.given.append(inputs)
        made = inputs[LEFT] @ inputs[RIGHT]
        return {OUT: made, Slot("output", (1,)): made.sum(1).argsort()}


def judged(rules: str, program: Product, made: Mapping[Slot, torch.Tensor], precision: str = "auto") -> list[CheckedSlot]:
    record = CallRecord(rank=0, step=0, order=0, call=CallName("torch.matmul", 0), phase="forward")
    return list(STANDARD_RULES[rules](Judged(record=record, program=program, made=made, precision=precision)))  # type: ignore[arg-type]


def product(dtype: torch.dtype = torch.float32) -> Product:
    chance = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, 16, generator=chance) + 3 for _ in range(2))
    return Product({LEFT: left.to(dtype), RIGHT: right.to(dtype)})


@pytest.mark.parametrize("rules", ["checker", "benchmark", "ulp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_honest_kernel_passes(rules: str, dtype: torch.dtype) -> None:
    program = product(dtype)
    found = judged(rules, program, program(program.inputs))
    assert [slot.status for slot in found] == ["passed", "passed"]
    assert set(found[0].metrics) >= set(STANDARD_METRICS)
    assert (found[0].dtype, found[0].shape) == (str(dtype).removeprefix("torch."), (16, 16))


@pytest.mark.parametrize("rules", ["checker", "benchmark", "ulp", "binary", "absolute"])
def test_a_wrong_kernel_fails(rules: str) -> None:
    program = product()
    made = program(program.inputs)
    made[OUT] = made[OUT] * 1.002
    matrix, order = judged(rules, program, made)
    assert (matrix.status, matrix.blamed) == ("failed", "device")
    assert matrix.reason
    assert matrix.multiple is not None
    assert matrix.multiple > 1
    assert order.status == "passed"


@pytest.mark.parametrize("rules", list(STANDARD_RULES))
def test_integers_have_to_be_equal(rules: str) -> None:
    program = product()
    made = program(program.inputs)
    made[Slot("output", (1,))] = made[Slot("output", (1,))].flip(0)
    assert judged(rules, program, made)[1].status == "failed"


@pytest.mark.parametrize("rules", list(STANDARD_RULES))
def test_nan_or_another_shape_fails(rules: str) -> None:
    program = product()
    made = program(program.inputs)
    made[OUT][3, 4] = torch.nan
    assert judged(rules, program, made)[0].status == "failed"
    (found,) = judged(rules, program, {OUT: torch.zeros(3)})
    assert found.status == "failed"
    assert "its shape is [3]" in found.reason


@pytest.mark.parametrize(
    ("dtype", "precision", "wide"),
    [
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.float32),
        (torch.float32, "auto", torch.float64),
        (torch.bfloat16, "float64", torch.float64),
    ],
)
def test_the_reference_is_one_precision_up(dtype: torch.dtype, precision: str, wide: torch.dtype) -> None:
    program = product(dtype)
    made = program(program.inputs)
    program.given.clear()
    judged("checker", program, made, precision)
    assert [{value.dtype for value in given.values()} for given in program.given] == [{wide}]


def test_one_tensor_in_two_slots_stays_one() -> None:
    same = torch.randn(4, 4).t()
    program = Product({LEFT: same, RIGHT: same})
    made = program(program.inputs)
    judged("checker", program, made)
    given = program.given[-1]
    assert given[LEFT] is given[RIGHT]
    assert given[LEFT].is_contiguous()


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rule in STANDARD_RULES.items():
        monkeypatch.setitem(check_rules.RULES, name, rule)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    with ulpscope.Capture(tmp_path / "run", model=model, keep="tensors") as capture:
        model(torch.randn(5, 8)).sum().backward()
        capture.step()
    for name in ("checker", "benchmark", "ulp"):
        found = check_run(tmp_path / "run", rules=name, isolated=False)
        assert (found.counts["failed"], found.counts["skipped"], found.rules) == (0, 0, name)
