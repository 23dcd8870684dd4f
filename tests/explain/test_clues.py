# SPDX-License-Identifier: Apache-2.0
"""Clues are added to the evidence of a fault, once each, and change nothing else of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.explain.programs import compared, views_of
from ulpscope.explain.clues.clue_table import with_clues
from ulpscope.explain.programs.missing import explain_missing
from ulpscope.model import Comparison, Finding


def missing(comparison: Comparison) -> Finding:
    return next(found for view in views_of(comparison) if (found := explain_missing(view)) is not None)


@pytest.mark.parametrize(
    ("subject", "reference", "options", "clues"),
    [
        ("buffered stale", "buffered", {}, ["stale: "]),
        ("balanced constant", "balanced", {}, ["constant: "]),
        ("undivided", "", {"accumulate": 2}, ["exact ratio: ", "all 14 gradients "]),
    ],
)
def test_what_the_values_look_like_is_said(subject: str, reference: str, options: dict[str, Any], clues: list[str]) -> None:
    comparison = compared(subject, reference, **options)
    fault = replace(missing(comparison), evidence=())
    found = with_clues(fault, views_of(comparison))
    assert [line[: len(clue)] for line, clue in zip(found.evidence, clues, strict=True)] == clues
    assert replace(found, evidence=()) == fault
    assert with_clues(found, views_of(comparison)) == found


def test_a_plain_fault_gets_no_clue() -> None:
    comparison = compared({"before_optimizer": lambda model, step: model.head.weight.grad.add_(model.head.weight.detach())}, "")
    fault = missing(comparison)
    assert with_clues(fault, views_of(comparison)) == fault
