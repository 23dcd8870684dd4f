# SPDX-License-Identifier: Apache-2.0
"""Test calls recorded as one (modules and functions without their inside), patterns that are functions, and patches that front doors ask
for.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.capture.test_operators import ListSink
from ulpscope import Capture
from ulpscope.capture.intercept.patching import Patches
from ulpscope.model import CallName


def test_a_module_taken_whole_is_one_call_with_its_gradients() -> None:
    sink, model = ListSink(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    x = torch.ones(1, 2, requires_grad=True)
    capture = Capture.into_sink(lambda rank: sink, select=["phase:forward", "phase:backward"])
    with capture:
        capture.take_whole(model, "Block")
        model(x).sum().backward()
        capture.take_apart()
        model(x)
    assert sink.calls() == ["module.Block.0", "Tensor.sum.0", "functional.linear.0", "functional.relu.0"]
    assert sink.calls("backward") == ["Tensor.sum.0", "module.Block.0"]
    assert [str(slot.slot) for slot in sink.records[-3].slots if sink.records[-3].phase == "backward"] == ["input.0", "output.0"]


def test_a_function_of_python_is_one_call_and_put_back() -> None:
    def gate(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.sigmoid(x) * x * scale

    vendor = types.SimpleNamespace(gate=gate)
    sink, x, code = ListSink(), torch.ones(2, requires_grad=True), gate.__code__
    with Capture.into_sink(lambda rank: sink, functions=[(vendor, "gate", "vendor.gate")], select=["phase:forward", "phase:backward"]):
        assert vendor.gate.__code__ is not code
        vendor.gate(x, scale=2.0).sum().backward()
    assert vendor.gate is gate
    assert gate.__code__ is code
    assert sink.calls() == ["vendor.gate.0", "Tensor.sum.0"]
    assert sink.calls("backward") == ["Tensor.sum.0", "vendor.gate.0"]
    assert sink.records[0].arguments is not None
    assert sink.records[0].arguments.args == ({"$tensor": "input.0"}, 2.0)


def test_a_pattern_may_be_a_function_and_is_asked_once_for_each_call() -> None:
    asked: list[str] = []

    def wanted(module: str, call: CallName) -> bool:
        asked.append(str(call))
        return call.short == "exp"

    sink, x = ListSink(), torch.ones(2)
    with Capture.into_sink(lambda rank: sink, select=[wanted, "phase:forward"]):
        (x.exp() + 1).exp()
    assert asked == ["Tensor.exp.0", "Tensor.add.0", "Tensor.exp.1"]
    assert sink.calls() == ["Tensor.exp.0", "Tensor.exp.1"]


@pytest.mark.parametrize(
    "dropout", [F.dropout, F.dropout2d, F.dropout3d, torch.nn.Dropout(0.5), torch.nn.Dropout2d(0.5), torch.nn.Dropout3d(0.5)]
)
def test_dropout_that_drops_nothing_draws_nothing(dropout: Any) -> None:
    originals = F.dropout, F.dropout2d, F.dropout3d
    patches = Patches()
    patches.no_dropout()
    x, state = torch.ones(2, 8, 8, 8), torch.get_rng_state()
    name = getattr(dropout, "__name__", "")
    result = (getattr(F, name) if name else dropout)(x)
    patches.undo()
    assert torch.equal(result, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert (F.dropout, F.dropout2d, F.dropout3d) == originals


def test_batches_are_seen_and_may_end_the_training() -> None:
    seen: list[Any] = []
    patches = Patches()
    patches.batches(lambda next_batch: seen.append(next_batch()) or seen[-1])
    assert [batch.tolist() for batch in DataLoader(torch.arange(4), batch_size=2)] == [[0, 1], [2, 3]]
    patches.undo()
    list(DataLoader(torch.arange(4)))
    assert len(seen) == 2
