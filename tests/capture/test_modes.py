# SPDX-License-Identifier: Apache-2.0
"""Our mode on the stack: off where nothing is recorded, and never in the way of the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tests.capture.recording import recording
from ulpscope.capture.intercept.torch_modes import ApiMode


class Users(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def stack() -> list[object]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def test_there_is_no_mode_in_a_step_that_is_not_recorded() -> None:
    with recording(steps=[1]) as run:
        assert stack() == []
        run.session.step()
        (mode,) = stack()
        assert isinstance(mode, ApiMode)
        torch.ones(2).exp()
        run.session.step()
        assert stack() == []
    assert [record.step for record in run.calls("Tensor.exp")] == [1]


def test_a_step_that_begins_inside_a_mode_of_the_users_leaves_the_stack_in_order() -> None:
    users = Users()
    with recording(steps=[1, 3]) as run:
        for _ in range(4):
            with users:
                run.session.step()
                assert stack()[-1] is users
                torch.ones(2).exp()
            assert users not in stack()
    assert [record.step for record in run.calls("Tensor.exp")] == [1, 3]
    assert stack() == []


def test_an_optimizer_of_torch_is_not_looked_at_and_the_mode_is_back_afterwards() -> None:
    users, model = Users(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        with users:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert [type(mode) for mode in stack()] == [ApiMode, Users]
        assert [type(mode) for mode in stack()] == [ApiMode]
        torch.ones(2).exp()
    assert len(run.calls("Tensor.exp")) == 1


def test_the_closure_of_an_optimizer_is_recorded() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    with recording() as run:
        optimizer.step(closure)  # type: ignore[arg-type]
    assert run.calls("functional.linear")
    assert run.calls("functional.linear", "backward")


def test_after_an_optimizer_that_failed_calls_are_recorded_again() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = "not a number"
    with recording() as run:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            optimizer.step()
        model(torch.ones(1, 2))
    assert len(run.calls("functional.linear")) == 2


class CallsAModule(torch.Tensor):
    """Calls a module from inside a call of torch: our mode is off the stack there, and torch puts it back."""

    module = nn.Linear(2, 2)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            cls.module(torch.ones(2))
            return func(*args, **(kwargs or {}))


def test_a_mode_that_is_at_work_is_not_put_on_a_second_time() -> None:
    with recording() as run:
        before = stack()
        for _ in range(3):
            torch.ones(2).as_subclass(CallsAModule).sin()
        assert stack() == before
        torch.ones(2).exp()
    assert len(run.calls("Tensor.exp")) == 1
