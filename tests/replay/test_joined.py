# SPDX-License-Identifier: Apache-2.0
"""A step with all parameters in a row gives what the step gives, parameter by parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ulpscope import Capture, open_run
from ulpscope.replay import optimizer_program
from ulpscope.replay.calls.joined import joined
from ulpscope.replay.program import Program

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
}


def _step(folder: Path, optimizer: str, steps: int = 2) -> Program:
    """The last step of a net of which one parameter never gets a gradient and one has a rate of its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 3))
    model[3].weight.requires_grad_(False)
    first, *others = [one for one in model.parameters() if one.requires_grad]
    made = OPTIMIZERS[optimizer]([{"params": [first], "lr": 0.5}, {"params": others}])
    with Capture(folder, model=model, optimizer=made, keep="tensors") as capture:
        for _ in range(steps):
            made.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            made.step()
            capture.step()
    run = open_run(folder)
    found = {one.step: one for step in run.steps(0) for one in run.records(0, step) if one.phase == "optimizer"}
    parameters = [one for one in run.records(0, steps - 1) if one.call.op == "state.parameters"]
    return optimizer_program(
        found[steps - 1],
        lambda content: run.tensor(0, steps - 1, content),
        parameters=parameters,
        previous=found.get(steps - 2),
        read_previous=lambda content: run.tensor(0, steps - 2, content),
    )


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_row_gives_what_each_parameter_gives(tmp_path: Path, optimizer: str, wide: bool) -> None:
    program = _step(tmp_path / "run", optimizer)
    row = joined(program)
    assert row is not program
    inputs = {slot: value.double() if wide else value for slot, value in program.inputs.items()}
    before = {slot: value.clone() for slot, value in inputs.items()}
    wanted, found = program(inputs), row(inputs)
    assert list(found) == list(wanted)
    for slot, value in wanted.items():
        assert found[slot].dtype == value.dtype
        torch.testing.assert_close(found[slot], value, rtol=1e-6, atol=1e-9)
    assert all(torch.equal(before[slot], value) for slot, value in inputs.items())
    assert row.inputs is program.inputs


def test_what_knows_more_than_elements_is_left_alone(tmp_path: Path) -> None:
    program = _step(tmp_path / "run", "adamw")
    program.cls = torch.optim.Adafactor  # type: ignore[attr-defined]
    assert joined(program) is program
