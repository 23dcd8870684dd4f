# SPDX-License-Identifier: Apache-2.0
"""Run a call on the device under test: its results, and how often the device is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ulpscope.model import Arguments, CallName, CallRecord, Slot, TensorData, TensorRecord
from ulpscope.replay import forward_program, is_random
from ulpscope.replay.calls.devices import run_on_device
from ulpscope.replay.program import Program
from ulpscope.testing import npu

X = Slot("input", (0,))


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    npu.install()


def _program(op: str, values: torch.Tensor, *args: Any) -> Program:
    dtype = str(values.dtype).removeprefix("torch.")
    data = TensorData(dtype, tuple(values.shape), values.reshape(-1).view(torch.uint8).numpy())
    slot = TensorRecord(slot=X, dtype=dtype, shape=data.shape, content="x")
    arguments = Arguments(args=({"$tensor": "input.0"}, *args))
    call = CallRecord(rank=0, step=0, order=0, call=CallName(op, 0), phase="forward", arguments=arguments, slots=(slot,))
    return forward_program(call, {"x": data}.__getitem__)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_all_results_come_back_and_the_device_is_waited_for_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(torch.npu, "synchronize", waits.append)
    values = torch.randn(6, 4)
    found = run_on_device(_program("torch.chunk", values, 3), device)
    assert [one.tolist() for one in found.values()] == [one.tolist() for one in values.chunk(3)]
    assert {one.device.type for one in found.values()} == {"cpu"}
    assert waits == ([] if device == "cpu" else ["npu"])


def test_results_that_are_views_of_the_imaginary_come_back_as_they_are() -> None:
    values = torch.randn(5, dtype=torch.complex64)
    (found,) = run_on_device(_program("torch.conj", values), "cpu").values()
    assert not found.is_conj()
    assert torch.equal(found, values.conj().resolve_conj())


@pytest.mark.parametrize(("op", "draws"), [("functional.dropout", True), ("functional.gelu", False)])
def test_whether_a_call_draws_is_known_from_its_run_on_the_cpu(op: str, draws: bool) -> None:
    program = _program(op, torch.randn(50))
    run_on_device(program, "cpu")
    assert getattr(program, "has_drawn") is draws  # noqa: B009
    assert is_random(program) is draws
