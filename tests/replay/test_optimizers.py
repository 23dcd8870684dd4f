# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps, run again from what was recorded before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.capture.recording import Recording, recording
from ulpscope.model import Arguments, CallRecord, Slot
from ulpscope.replay import NotReplayable, Reader, optimizer_program, recorded_results, stepped_parameters

Maker = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "RAdam": torch.optim.RAdam,
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}
OTHER_FORMS: dict[str, Maker] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
}


def trained(make: Maker, *, steps: int = 3, skip: int = 0) -> Recording:
    """A model with a parameter of no dimension and one that never gets a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizer = make(model.parameters())
    x = torch.randn(5, 4)

    def step() -> None:
        optimizer.zero_grad()
        (model(x).square().mean() * model.scale).backward()
        optimizer.step()

    for _ in range(skip):
        step()
    with recording(models=[model]) as run:
        for _ in range(steps):
            step()
            run.session.step()
    assert run.ledger == []
    return run


def reader(run: Recording, step: int) -> Reader:
    return lambda content: run.run.tensor(0, step, content)


def optimizer_records(run: Recording) -> list[CallRecord]:
    return [record for record in run.records if record.phase == "optimizer"]


def parameters(run: Recording, step: int) -> list[CallRecord]:
    return [record for record in run.run.records(0, step) if record.call.op == "state.parameters"]


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHER_FORMS])
def test_a_step_gives_what_was_recorded(name: str) -> None:
    run = trained((OPTIMIZERS | OTHER_FORMS)[name])
    previous: CallRecord | None = None
    for record in optimizer_records(run):
        program = optimizer_program(
            record,
            reader(run, record.step),
            parameters=parameters(run, record.step),
            previous=previous,
            read_previous=reader(run, record.step - 1),
        )
        found, wide = program(program.inputs), program({slot: tensor.double() for slot, tensor in program.inputs.items()})
        recorded = {slot: value for slot, value in recorded_results(record, reader(run, record.step)).items() if "unused" not in slot.path}
        assert len(recorded) >= 5
        for slot, value in recorded.items():
            assert found[slot].dtype == value.dtype
            assert torch.equal(found[slot], value) or (name in OTHER_FORMS and torch.allclose(found[slot], value, rtol=1e-6)), str(slot)
            assert torch.allclose(wide[slot].double(), value.double(), rtol=1e-4, atol=1e-6), str(slot)
            if slot.path[-1] not in ("step", "mu_product", "eta", "mu"):
                assert wide[slot].dtype is torch.float64, str(slot)
        previous = record


def test_parameters_can_be_replayed_one_at_a_time() -> None:
    run = trained(OPTIMIZERS["Adam"], steps=1)
    (record,) = optimizer_records(run)
    names = stepped_parameters(record)
    assert names == ("scale", "0.weight", "0.bias", "2.weight", "2.bias")
    read, before = reader(run, 0), parameters(run, 0)
    program = optimizer_program(record, read, parameters=before)
    every = program(program.inputs)
    alone: dict[Slot, torch.Tensor] = {}
    for name in names:
        one = optimizer_program(record, read, parameters=before, names=[name])
        assert len(one.inputs) == 2
        alone |= one(one.inputs)
    assert alone.keys() == every.keys()
    assert all(torch.equal(alone[slot], every[slot]) for slot in every)


@pytest.mark.parametrize("name", ["Adam", "momentum"])
def test_without_the_state_before_nothing_is_claimed(name: str) -> None:
    """The recording begins in the middle of a training, or leaves out a step."""
    late = trained(OPTIMIZERS[name], steps=1, skip=2)
    (record,) = optimizer_records(late)
    with pytest.raises(NotReplayable, match="state before this step was not recorded"):
        optimizer_program(record, reader(late, 0), parameters=parameters(late, 0))
    run = trained(OPTIMIZERS[name])
    first, _, third = optimizer_records(run)
    with pytest.raises(NotReplayable, match="state before this step was not recorded"):
        optimizer_program(third, reader(run, 2), parameters=parameters(run, 2), previous=first, read_previous=reader(run, 0))


def test_two_steps_within_one() -> None:
    """The second starts from what the first left, not from the parameters at the start."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recording(models=[model]) as run:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    first, second = optimizer_records(run)
    program = optimizer_program(second, reader(run, 0), parameters=parameters(run, 0), previous=first)
    recorded = recorded_results(second, reader(run, 0))
    assert all(torch.equal(program(program.inputs)[slot], value) for slot, value in recorded.items())


def test_what_is_not_torchs_own_is_not_replayed() -> None:
    run = trained(OPTIMIZERS["Adam"], steps=1)
    (record,) = optimizer_records(run)
    groups = [dict(group) for group in (record.arguments or Arguments()).kwargs["groups"]]  # type: ignore[index]
    no_amsgrad = [{key: value for key, value in group.items() if key != "amsgrad"} for group in groups]
    tensor_rate = [{**group, "lr": {"$tensor": "input.lr"}} for group in groups]
    for changed, reason in (
        (replace(record, call=type(record.call)("optimizer.LBFGS", 0)), "LBFGS is not known here"),
        (replace(record, call=type(record.call)("optimizer.os.system", 0)), "is not known here"),
        (replace(record, arguments=Arguments(kwargs={"groups": no_amsgrad})), "settings lack amsgrad"),
        (replace(record, arguments=Arguments(kwargs={"groups": tensor_rate})), "lacks the tensor"),
        (replace(record, arguments=Arguments(kwargs={"groups": "x"})), "none of its parameters"),
        (replace(record, arguments=None), "none of its parameters"),
        (replace(record, slots=tuple(slot for slot in record.slots if slot.slot.role != "gradient")), "had no gradient"),
    ):
        with pytest.raises(NotReplayable, match=reason):
            optimizer_program(changed, reader(run, 0), parameters=parameters(run, 0))
    with pytest.raises(NotReplayable, match="was not recorded before the step"):
        optimizer_program(record, reader(run, 0), parameters=[])
    hostile = [{**group, "lr": "fast"} for group in groups]
    program = optimizer_program(
        replace(record, arguments=Arguments(kwargs={"groups": hostile})), reader(run, 0), parameters=parameters(run, 0)
    )
    with pytest.raises(NotReplayable, match="fails on the CPU"):
        program(program.inputs)
