# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that does not repeat what it did."""

from __future__ import annotations

import pytest

from tests.explain.programs import compared, views_of
from ulpscope.explain.clues.recomputing import clue_recompute
from ulpscope.model import Finding

FAULT = Finding(level="fault", kind="backward", headline="", step=0, rank=0, phase="backward")


@pytest.mark.parametrize("keep", ["tensors", "statistics", "fingerprint"])
def test_dropout_that_is_drawn_anew(keep: str) -> None:
    views = views_of(compared("*dropout checkpoint forgetful", "*dropout checkpoint", keep=keep))
    [line] = clue_recompute(FAULT, views)
    assert line.startswith("recomputed otherwise: in the subject, second.drop  dropout (call 1, forward, recomputed)")


def test_honest_checkpointing_is_no_clue() -> None:
    assert clue_recompute(FAULT, views_of(compared("*dropout checkpoint", "*dropout"))) == []
