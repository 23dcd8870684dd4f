# SPDX-License-Identifier: Apache-2.0
"""Stacks name the user's lines, however deep modules are nested and whichever call came before."""

from __future__ import annotations

from typing import Any

import torch

from tests.capture.recording import recording


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x = self.helped(x)
        return torch.nn.functional.gelu(x)

    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x = self.linear(x)
        return self.inner(x)


def functions_of(record: Any) -> list[str]:
    return [frame.function.rpartition(".")[2] for frame in record.stack if frame.file.endswith("test_stacks.py")]


def run(model: torch.nn.Module) -> Any:
    with recording(keep="fingerprint") as found:
        model(torch.ones(2, 2))
        model(torch.ones(2, 2))
    return found


def test_every_call_has_the_lines_above_it() -> None:
    found = run(Outer())
    for record in found.calls("Tensor.sin"):
        assert functions_of(record) == ["forward", "forward", "run", "test_every_call_has_the_lines_above_it"]
    for record in found.calls("Tensor.cos"):
        assert functions_of(record)[:3] == ["helped", "forward", "forward"]
    for record in found.calls("functional.linear"):
        assert functions_of(record)[:2] == ["forward", "run"]


def test_calls_of_one_module_from_two_lines_are_told_apart() -> None:
    found = run(Outer())
    lines = [record.stack[1].line for record in found.calls("Tensor.sin")]
    assert lines == [lines[0], lines[0] + 2] * 2
    codes = [record.stack[0].code for record in found.calls("functional.gelu")]
    assert codes == ["return torch.nn.functional.gelu(x)"] * 4
    callers = [[frame.line for frame in record.stack if frame.function == "run"] for record in found.calls("Tensor.sin")]
    assert callers[0] != callers[2]


def test_hooks_of_the_user_stand_where_they_stand() -> None:
    model = Outer()
    model.inner.register_forward_pre_hook(lambda module, args: (args[0].tan(),))
    model.inner.register_forward_hook(lambda module, args, result: result.exp())
    found = run(model)
    for record in found.calls("Tensor.tan") + found.calls("Tensor.exp"):
        assert functions_of(record)[1:] == ["forward", "run", "test_hooks_of_the_user_stand_where_they_stand"]
    for record in found.calls("Tensor.cos"):
        assert functions_of(record)[:3] == ["helped", "forward", "forward"]
