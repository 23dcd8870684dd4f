# SPDX-License-Identifier: Apache-2.0
"""Values that are old ones: not written, carried over from the call before, or one step late."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.explain.programs import compared, views_of
from ulpscope.explain.clues.stale import clue_stale
from ulpscope.explain.suspects import Suspect
from ulpscope.model import Comparison


def clues(comparison: Comparison) -> list[str]:
    views = views_of(comparison)
    first = next(view for view in views if view.divergence is not None)
    assert first.divergence is not None
    return clue_stale(Suspect(first, first.divergence.call, first.divergence.slot), views)


def test_a_buffer_that_was_not_written_holds_the_step_before() -> None:
    [line] = clues(compared("buffered stale", "buffered"))
    assert line.startswith("stale: the subject's input 1 is ")
    assert "step 0" in line


def test_a_gradient_that_is_one_step_late() -> None:
    kept: dict[bool, torch.Tensor] = {}

    def late(is_late: bool) -> Any:
        def change(model: nn.Module, step: int) -> None:
            gradient = model.second.mix.weight.grad
            now = gradient.clone()
            gradient.copy_(kept.get(is_late, torch.zeros_like(now)) if is_late else now)
            kept[is_late] = now

        return change

    [line] = clues(compared({"before_optimizer": late(True)}, {"before_optimizer": late(False)}))
    assert line == "one step late: the subject's input 1 of step 1 is the reference's of step 0", "the copy_ that writes the gradient"


def test_an_offset_carried_into_the_second_call() -> None:
    def program(done: Any, mode: str) -> None:
        table, positions = torch.arange(20.0).reshape(10, 2), [0, 4]
        for start in positions:
            offset = torch.tensor(positions[0] if mode == "carried" else start)
            rows = torch.index_select(table, 0, torch.arange(3) + offset)
            rows.cos()
        done()

    [line] = clues(compared("carried", "", program=program))
    assert line.startswith("stale: the subject's ")
    assert "is that of the call before" in line


def test_a_plain_error_is_not_stale() -> None:
    comparison = compared({"before_optimizer": lambda model, step: model.head.weight.grad.mul_(2)}, "")
    assert clues(comparison) == []
