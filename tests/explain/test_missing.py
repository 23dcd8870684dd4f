# SPDX-License-Identifier: Apache-2.0
"""Calls on one side only: of several the ones that matter are named, and writes to parameters are seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.explain.programs import compared, views_of
from ulpscope.explain.programs.missing import explain_missing, explain_writing
from ulpscope.model import Finding


def blamed(explain: Any, subject: Any, reference: Any, **options: Any) -> Finding:
    found = next((finding for view in views_of(compared(subject, reference, **options)) if (finding := explain(view))), None)
    assert found is not None
    return found


def test_a_loss_that_is_not_divided() -> None:
    found = blamed(explain_missing, "undivided", "", accumulate=2)
    assert (found.call, found.phase, found.kind) == ("Tensor.div.0", "forward", "calls")
    assert found.headline.startswith("calls only in the reference: div")


def test_calls_that_lead_nowhere_are_not_named() -> None:
    """Between the extra factor and the difference the subject also looks at norms, nearer to the difference."""

    def program(done: Any, mode: str) -> None:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4), torch.randn(3, 4)
        y = model(x)
        if mode:
            y = y * 1.5
            x.abs().mean()
        y.tanh().sum().backward()
        done()

    found = blamed(explain_missing, "scaled", "", program=program)
    assert found.headline == "calls only in the subject: mul (call 0, forward), step 0, rank 0"
    assert not any("abs" in line for line in found.evidence)


def test_what_else_used_a_parameter_takes_part_in_its_gradient() -> None:
    def program(done: Any, mode: str) -> None:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4), torch.randn(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(x).tanh().sum()
        if mode:
            loss.backward()
            loss = model.weight.square().sum()
        loss.backward()
        optimizer.step()
        done()

    found = blamed(explain_missing, "penalty", "", program=program)
    assert found.call == "Tensor.square.0"


def test_a_parameter_that_is_written_to_during_the_step() -> None:
    def enlarge(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.second.mix.weight.mul_(1.01)

    found = blamed(explain_writing, {"before_optimizer": enlarge}, "")
    assert (found.call, found.step) == ("Tensor.mul_.0", 0)
    assert "it changes parameter second.mix.weight before the optimizer's step" in found.evidence


def test_an_optimizer_that_errs_by_itself_is_no_writing() -> None:
    views = views_of(compared({"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.2)}, ""))
    assert [explain_writing(view) for view in views] == [None] * 3
