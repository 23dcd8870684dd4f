# SPDX-License-Identifier: Apache-2.0
"""Values that are constant where the reference's vary."""

from __future__ import annotations

import pytest
import torch

from tests.explain.programs import compared, views_of
from ulpscope.explain.clues.constants import clue_constant
from ulpscope.explain.suspects import Suspect
from ulpscope.model import Comparison


def clues(comparison: Comparison) -> list[str]:
    views = views_of(comparison)
    first = next(view for view in views if view.divergence is not None)
    assert first.divergence is not None
    return clue_constant(Suspect(first, first.divergence.call, first.divergence.slot), views)


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_a_loss_that_never_changes(keep: str) -> None:
    [line] = clues(compared("balanced constant", "balanced", keep=keep))
    assert line.startswith("constant: the subject's input 0 is the same (1) in all 3 steps from 0 to 2")


def test_a_tensor_whose_elements_are_all_the_same() -> None:
    zeroed = {"before_optimizer": lambda model, step: model.head.weight.grad.zero_()}
    [line] = clues(compared(zeroed, ""))
    assert line == "constant: every element of the subject's gradient head.weight is 0; the reference's vary"


def test_what_varies_is_not_constant() -> None:
    assert clues(compared({"before_optimizer": lambda model, step: model.head.weight.grad.add_(torch.ones(()))}, "")) == []
