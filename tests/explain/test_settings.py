# SPDX-License-Identifier: Apache-2.0
"""Settings that values alone do not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.explain.programs import compared, views_of
from ulpscope.explain.arithmetic.optimizer import explain_left_out
from ulpscope.explain.programs.settings import explain_optimizer_settings
from ulpscope.explain.views import StepView
from ulpscope.model import Finding

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adam(**settings: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **settings})


def without_divergence(view: StepView) -> StepView:
    return replace(view, divergence=None)


def first(subject: Make, reference: Make) -> Finding | None:
    views = views_of(compared({"optimizer": subject}, {"optimizer": reference}))
    return explain_optimizer_settings(without_divergence(views[0]))


@pytest.mark.parametrize(
    ("settings", "text"), [({"lr": 5e-3}, "lr: 0.005 against 0.01"), ({"weight_decay": 0.3}, "weight_decay: 0.3 against 0.01")]
)
def test_a_setting_that_moves_parameters(settings: dict[str, Any], text: str) -> None:
    found = first(adam(**settings), adam())
    assert found is not None
    assert (found.kind, found.phase, found.slot) == ("optimizer", "optimizer", "mutated.embed.weight")
    assert found.evidence[0].startswith(f"{text} for embed.weight")


def test_a_parameter_in_the_wrong_group() -> None:
    def grouped(*names: str) -> Make:
        def make(model: nn.Module) -> torch.optim.Optimizer:
            named = dict(model.named_parameters())
            plain = [p for name, p in named.items() if name in names]
            return torch.optim.AdamW(
                [{"params": [p for n, p in named.items() if n not in names], "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                lr=1e-2,
            )

        return make

    found = first(grouped(), grouped("first.norm.weight"))
    assert found is not None
    assert found.slot == "mutated.first.norm.weight"


@pytest.mark.parametrize("subject", [adam(fused=True), adam(foreach=True), adam(lr=1e-2 * (1 + 1e-9)), adam(eps=1.1e-8)])
def test_other_implementations_and_settings_without_effect_are_no_fault(subject: Make) -> None:
    comparison = compared({"optimizer": subject}, {"optimizer": adam(foreach=False)})
    assert comparison.faults == ()
    assert [explain_optimizer_settings(view) for view in views_of(comparison)] == [None] * 3


def test_a_parameter_that_the_optimizer_leaves_out() -> None:
    def some(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for name, p in model.named_parameters() if name != "head.weight"], lr=0.1)

    found = explain_left_out(views_of(compared({"optimizer": some}, ""))[0])
    assert found is not None
    assert (found.kind, found.slot) == ("optimizer", "mutated.head.weight")
    assert found.headline == "1 parameter updated by the reference's optimizer only: head.weight, step 0, rank 0"


def test_two_optimizers_against_one_leave_nothing_out() -> None:
    class Both:
        def __init__(self, model: nn.Module) -> None:
            parameters = list(model.parameters())
            self.parts = [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.SGD(parameters[3:], lr=0.1)]

        def step(self) -> None:
            for part in self.parts:
                part.step()

        def zero_grad(self) -> None:
            for part in self.parts:
                part.zero_grad()

    views = views_of(compared({"optimizer": Both}, ""))
    assert [explain_left_out(view) for view in views] == [None] * 3
