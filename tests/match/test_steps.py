# SPDX-License-Identifier: Apache-2.0
"""Ranks and steps pair by number, and what only one side has is said."""

from __future__ import annotations

import pytest

from ulpscope.errors import NothingComparableError
from ulpscope.match import match_steps
from ulpscope.store import MemoryRun


def run(parts: dict[int, list[int]], path: str = "run") -> MemoryRun:
    made = MemoryRun(path=path)
    for rank, steps in parts.items():
        sink = made.sink(rank)
        for step in steps:
            sink.begin_step(step)
        sink.close()
    return made


def test_common_parts_come_step_by_step() -> None:
    overlap = match_steps(run({0: [0, 1], 1: [0, 1]}), run({0: [0, 1], 1: [0, 1]}))
    assert overlap.common == ((0, 0), (1, 0), (0, 1), (1, 1))
    assert overlap.notes == ()


def test_the_rest_is_named() -> None:
    overlap = match_steps(run({0: [0, 1, 2, 3], 1: [0]}), run({0: [3, 5], 2: [0]}))
    assert overlap.common == ((0, 3),)
    assert overlap.notes == (
        "rank 1 only in the subject: not compared",
        "rank 2 only in the reference: not compared",
        "steps 0-2 of rank 0 only in the subject: not compared",
        "step 5 of rank 0 only in the reference: not compared",
    )


@pytest.mark.parametrize(("ours", "theirs"), [({0: [0]}, {0: [1, 2]}), ({0: [0]}, {1: [0]}), ({}, {0: [0]})])
def test_nothing_in_common_names_both_sides(ours: dict[int, list[int]], theirs: dict[int, list[int]]) -> None:
    with pytest.raises(NothingComparableError, match=r"the subject left holds .*, the reference right holds .*rank"):
        match_steps(run(ours, "left"), run(theirs, "right"))
