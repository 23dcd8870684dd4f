# SPDX-License-Identifier: Apache-2.0
"""Test steps, and the records beside calls: parameters, buffers, batch, random generators, optimizers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.capture.recording import recording, slot_of, slots_of


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_parameters_buffers_and_batch_stand_at_the_start_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight = model[0].weight.detach().clone()
    with recording() as run:
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    start = run.one("state.parameters", "start")

    assert slots_of(start)[:2] == ["parameter.0.weight", "parameter.0.bias"]
    assert {"buffer.1.running_mean", "buffer.1.running_var"} < set(slots_of(start))
    assert torch.equal(run.array(start, "parameter.0.weight"), weight)
    assert torch.equal(run.array(run.one("state.batch", "start"), "input.0"), torch.ones(2, 3))


def test_an_optimizer_step_has_gradients_before_and_parameters_and_state_after() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    with recording() as run:
        _train(model, optimizer)
    record = run.one("optimizer.AdamW", "optimizer")

    assert torch.equal(run.array(record, "gradient.weight"), model.weight.grad)
    assert torch.equal(run.array(record, "mutated.weight"), model.weight)
    assert torch.equal(run.array(record, "state.weight.exp_avg"), optimizer.state[model.weight]["exp_avg"])
    assert record.arguments is not None
    assert record.arguments.kwargs is not None
    (group,) = record.arguments.kwargs["groups"]
    assert (group["lr"], group["params"]) == (0.125, ["weight", "bias"])
    assert not [record for record in run.records if "mul_" in record.call.op], "the optimizer's own arithmetic is not recorded"


def test_random_generators_are_fingerprinted_without_being_drawn_from() -> None:
    def rng() -> dict[str, str]:
        with recording() as run:
            torch.ones(1)
        (record,) = run.calls("state.rng", "start")
        assert record.arguments is not None
        return dict(record.arguments.kwargs or {})

    torch.manual_seed(1)
    first, again = rng(), rng()
    random.random()
    torch.rand(1)
    other = rng()
    assert first == again
    assert first["torch"] != other["torch"]
    assert first["python"] != other["python"]
    assert first["numpy"] == other["numpy"]


def test_names_begin_anew_with_each_step_and_unwanted_steps_are_left_out() -> None:
    with recording(steps=[1]) as run:
        for _ in range(3):
            torch.ones(1).exp()
            run.session.step()
    assert run.run.steps(0) == (1,)
    assert str(run.one("Tensor.exp").call) == "Tensor.exp.0"


def test_steps_are_found_from_the_optimizer() -> None:
    model = nn.Linear(3, 2)
    with recording(find_steps=True) as run:
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1), num_steps=3)
    assert run.run.steps(0) == (0, 1, 2)
    assert all(run.run.is_complete(0, step) for step in (0, 1, 2))


def test_with_several_optimizers_the_first_one_that_steps_is_the_clock() -> None:
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
    with recording(find_steps=True) as run:
        for _ in range(2):
            critic(generator(torch.ones(2, 3))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert run.run.steps(0) == (0, 1, 2), "what follows the last step of the clock is a step of its own"
    assert len(run.calls("optimizer.SGD", "optimizer")) == 4


def test_a_step_that_the_scaler_skips_is_a_step() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with recording(find_steps=True) as run:
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert run.run.steps(0)[:3] == (0, 1, 2)
    assert any("GradScaler skipped it" in line for line in run.ledger)


@pytest.mark.parametrize("complete", [True, False])
def test_a_step_is_complete_unless_the_program_failed_in_it(complete: bool) -> None:
    run = None
    try:
        with recording() as run:
            torch.ones(1)
            if not complete:
                raise KeyError
    except KeyError:
        pass
    assert run is not None
    assert run.run.is_complete(0, 0) is complete


def test_wrappers_leave_no_trace_in_names() -> None:
    class DataParallelLike(nn.DataParallel):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.module(*inputs)  # type: ignore[no-any-return]

    model = DataParallelLike(nn.Sequential(nn.Linear(3, 3)))
    x = torch.ones(1, 3, device=next(model.parameters()).device)
    with recording() as run:
        model(x)
    assert run.one("functional.linear").module == "0"
    assert slot_of(run.one("state.parameters", "start"), "parameter.0.weight").shape == (3, 3)


class Counting(nn.Module):
    """Writes to its buffers in every way: behind autograd's back, in place, by a new tensor, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        for name in ("silent", "in_place", "replaced", "constant"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("large", torch.zeros(1 << 17))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.silent.data[:] = x.detach().mean(0)
        self.in_place += 1
        self.replaced = self.replaced + 2
        return x * self.weight


@pytest.mark.parametrize("level", ["api", "module", "both", "op"])
def test_buffers_that_a_step_has_changed_stand_at_its_end(level: str) -> None:
    model = nn.Sequential(Counting(), nn.BatchNorm1d(3))
    with recording(level=level) as run:
        for _ in range(2):
            _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
            run.session.step()
    first, second = run.calls("state.end", "end")
    assert slots_of(first) == [
        *(f"buffer.0.{name}" for name in ("silent", "in_place", "replaced")),
        *(f"buffer.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    ]
    assert slots_of(second)[:2] == ["buffer.0.in_place", "buffer.0.replaced"], "the same batch leaves the same values"
    assert torch.equal(run.array(second, "buffer.0.in_place"), torch.full((3,), 2.0))
    assert torch.equal(run.array(second, "buffer.1.running_mean"), model[1].running_mean)
    assert first.order > max(record.order for record in run.records if record.step == 0 and record is not first)
    assert run.ledger == []


def test_random_generators_stand_at_the_end_of_a_step_that_draws() -> None:
    model = nn.Linear(3, 2)
    with recording() as run:
        _train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.session.step()
        torch.rand(1)
    (record,) = run.calls("state.end", "end")
    (_, before) = run.calls("state.rng", "start")
    assert record.step == 1
    assert record.arguments is not None
    assert before.arguments is not None
    after, start = record.arguments.kwargs or {}, before.arguments.kwargs or {}
    assert after["torch"] != start["torch"]
    assert after["python"] == start["python"]


@pytest.mark.parametrize("level", ["api", "op"])
def test_running_statistics_are_results_of_the_call_that_writes_to_them(level: str) -> None:
    """Torch writes to them without raising their version."""
    model = nn.BatchNorm1d(3)
    x = torch.arange(12.0).reshape(4, 3)
    with recording(level=level) as run:
        model(x)
        mean = model.running_mean.clone()  # type: ignore[union-attr]
        model(x)
        model.eval()
        model(x)
    op, place = ("functional.batch_norm", 1) if level == "api" else ("aten.native_batch_norm.default", 3)
    calls = run.calls(op)
    assert [f"mutated.{place}" in slots_of(call) for call in calls[:3]] == [True, True, False][: len(calls)]
    assert torch.equal(run.array(calls[0], f"mutated.{place}"), mean)
    assert torch.equal(run.array(calls[1], f"input.{place}"), mean), "what was read before the call is not taken for it"
    assert torch.equal(run.array(calls[1], f"mutated.{place}"), model.running_mean)
