# SPDX-License-Identifier: Apache-2.0
"""Gradients that stop on one side: the place in the forward pass is named, not the backward call that misses them."""

from __future__ import annotations

import pytest

from tests.explain.programs import compared, views_of
from ulpscope.explain.programs.cut import explain_cut
from ulpscope.model import Finding


def cut(subject: str, reference: str, keep: str = "tensors") -> Finding:
    first = views_of(compared(subject, reference, keep=keep))[0]
    found = explain_cut(first)
    assert found is not None, first.divergence
    return found


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_a_detach_on_one_side_is_named(keep: str) -> None:
    found = cut("detached", "", keep)
    assert (found.level, found.kind, found.module, found.call, found.phase) == ("fault", "calls", "second", "Tensor.detach.0", "forward")
    assert found.headline == "gradients stop in the subject only: second  detach (call 0, forward), step 0, rank 0"
    assert any(line.startswith("3 backward calls on one side only: second, second.mix, second.norm") for line in found.evidence)


def test_a_detach_in_the_reference_is_named_too() -> None:
    found = cut("", "detached")
    assert found.headline.startswith("gradients stop in the reference only: second  detach")


def test_no_grad_names_the_call_and_the_mode() -> None:
    found = cut("no_grad", "")
    assert (found.kind, found.module, found.call, found.slot) == ("arguments", "second.out", "functional.linear.3", "output.0")
    assert "mode grad: False against True" in found.evidence


def test_a_frozen_parameter_is_named() -> None:
    found = cut("frozen", "")
    assert (found.kind, found.phase, found.slot) == ("parameters", "start", "parameter.second.mix.weight")
    assert "1 gradient on one side only: gradient second.mix.weight" in found.evidence


@pytest.mark.parametrize(("subject", "reference"), [("", ""), ("buffered stale", "buffered"), ("undivided", ""), ("*dropout", "*dropout")])
def test_other_faults_are_not_cuts(subject: str, reference: str) -> None:
    comparison = compared({"mode": subject, "seed": 1}, {"mode": reference, "seed": 2}, accumulate=2)
    assert [explain_cut(view) for view in views_of(comparison)] == [None] * 3
