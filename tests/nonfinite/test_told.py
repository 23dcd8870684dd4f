# SPDX-License-Identifier: Apache-2.0
"""`NonFinite(on_event=...)` is called for each event while its call happens, with the tensors, and may stop the program there."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from tests.nonfinite.programs import Net, square, train
from ulpscope.model import NonFinite, NonFiniteCall


def as_older_tools(told: Any, **more: Any) -> NonFinite:
    """Return the options that the overflow check of older tools uses."""
    return NonFinite(limit=None, passed_on=True, saturation=True, ring=0, calls=True, at_once=True, on_event=told, **more)


def watched(folder: Path, options: NonFinite) -> Any:
    return lambda model=None, optimizer=None: ulpscope.Capture(folder / "run", model, watch=options)


def passing(h: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.exp(h * 0 + 100) * 2)


def test_each_call_is_told_with_its_record_and_its_tensors(tmp_path: Path) -> None:
    told: list[NonFiniteCall] = []
    train(watched(tmp_path, as_older_tools(told.append)), Net(passing), square, steps=1)
    forward = [(str(call.record.call), call.kind) for call in told if call.record.phase == "forward"]
    assert forward[:3] == [("torch.exp.0", "made"), ("Tensor.mul.1", "passed"), ("torch.relu.0", "passed")]
    first = told[0]
    assert first.record.module == ""
    assert first.record.source is not None
    assert first.record.source.code == "return torch.relu(torch.exp(h * 0 + 100) * 2)"
    assert {str(slot.slot) for slot in first.record.slots} == {str(slot) for slot in first.tensors} == {"input.0", "output.0"}
    by_name = {str(slot): tensor for slot, tensor in first.tensors.items()}
    assert by_name["input.0"].eq(100).all()
    assert by_name["output.0"].isposinf().all()
    assert any(call.record.phase == "backward" for call in told)


def test_without_passed_on_only_beginnings_are_told(tmp_path: Path) -> None:
    told: list[NonFiniteCall] = []
    train(watched(tmp_path, NonFinite(on_event=told.append)), Net(passing), square, steps=1)
    assert [str(call.record.call) for call in told] == ["torch.exp.0"]


def test_what_it_raises_is_raised_at_that_call(tmp_path: Path) -> None:
    told: list[NonFiniteCall] = []

    def stop_at_the_second(call: NonFiniteCall) -> None:
        told.append(call)
        if len(told) == 2:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough") as caught:
        train(watched(tmp_path, as_older_tools(stop_at_the_second)), Net(passing), square)
    assert str(told[-1].record.call) == "Tensor.mul.1"
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "return torch.relu(torch.exp(h * 0 + 100) * 2)" in lines
    assert ulpscope.open_run(tmp_path / "run").ledger(0) == ()


def test_in_backward_it_is_raised_there(tmp_path: Path) -> None:
    def stop(call: NonFiniteCall) -> None:
        raise ValueError(f"{call.record.call} {call.record.phase}")

    model = Net(lambda h: torch.sqrt(h * 0))
    with watched(tmp_path, as_older_tools(stop))(model):
        loss = square(model, 0)
        with pytest.raises(ValueError, match=r"torch\.sqrt\.0 backward"):
            loss.backward()


def test_a_call_of_several_nodes_is_told_once(tmp_path: Path) -> None:
    told: list[NonFiniteCall] = []

    def program(model: Any, step: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(torch.randn(4, 8)) * torch.tensor([float("inf"), 1.0]), torch.tensor([0, 1, 0, 1]))

    model = Net()
    model.down = torch.nn.Linear(8, 2)
    train(watched(tmp_path, as_older_tools(told.append)), model, program, steps=1)
    names = [f"{call.record.call} {call.record.phase}" for call in told]
    assert "functional.cross_entropy.0 backward" in names
    assert len(names) == len(set(names))


def test_masks_count_where_every_call_does(tmp_path: Path) -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        return torch.softmax(h.masked_fill(torch.eye(4, 8) > 0, float("-inf")), -1)

    for passed_on, expected in ((True, ["Tensor.masked_fill.0"]), (False, [])):
        told: list[NonFiniteCall] = []
        options = NonFinite(limit=None, passed_on=passed_on, on_event=told.append)
        train(watched(tmp_path / str(passed_on), options), Net(middle), square, steps=1)
        assert [str(call.record.call) for call in told] == expected
    assert ulpscope.find_nonfinite(tmp_path / "True" / "run").first is None


def test_the_same_place_is_told_every_time(tmp_path: Path) -> None:
    told: list[NonFiniteCall] = []
    zeros = torch.zeros(3)
    with watched(tmp_path, as_older_tools(told.append))() as capture:
        for _ in range(6):
            (zeros / zeros).nan_to_num()
            capture.step()
    assert [str(call.record.call) for call in told] == ["Tensor.div.0"] * 6


def test_the_dtypes_extreme_counts(tmp_path: Path) -> None:
    told: list[NonFiniteCall] = []
    with watched(tmp_path, as_older_tools(told.append))():
        torch.full((3,), 65503.0).half() + 32
    assert [str(call.record.call) for call in told] == ["Tensor.half.0", "Tensor.add.0"]


def test_it_may_use_torch_without_being_seen(tmp_path: Path) -> None:
    told: list[float] = []

    def count(call: NonFiniteCall) -> None:
        told.append(float(sum(torch.log(tensor * 0).isinf().sum() for tensor in call.tensors.values())))

    train(watched(tmp_path, as_older_tools(count)), Net(passing), square, steps=1)
    assert told[0] == 32.0


def test_the_run_remembers_the_options_without_the_function(tmp_path: Path) -> None:
    with watched(tmp_path, NonFinite(on_event=lambda call: None, limit=3))():
        pass
    options = json.loads((tmp_path / "run" / "run.json").read_text())["options"]["watch"]["nonfinite"]
    assert options["limit"] == 3
    assert "on_event" not in options


def test_on_a_device_it_is_told_at_once_too() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("told_on_npu.py"))], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"told": ["functional.gelu.1"], "line": "return self.down(F.gelu(self.up(x)))"}
