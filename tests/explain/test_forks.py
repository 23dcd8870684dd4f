# SPDX-License-Identifier: Apache-2.0
"""Differences that nobody is to blame for are told once, with what would settle them."""

from __future__ import annotations

import numpy as np

from tests.judge.test_calls import normal
from tests.judge.test_choices import KEYS, OTHER, STABLE, by_statistics
from tests.match.building import train
from ulpscope.explain import explain
from ulpscope.judge import Trail
from ulpscope.model import Finding, JudgedCall


def findings(*calls: JudgedCall) -> list[Finding]:
    info = train().info
    return [one for one in explain(calls, info, info, subject_path="runs/npu")[1] if one.kind != "coverage"]


def sorted_and_picked(picked: np.ndarray) -> tuple[JudgedCall, JudgedCall]:
    trail, x = Trail(), normal(8, 4)
    order = by_statistics("torch.argsort", {"input.0": KEYS, "output.0": OTHER}, {"input.0": KEYS, "output.0": STABLE}, trail)
    ours, theirs = {"input.0": x, "input.1": OTHER, "output.0": picked}, {"input.0": x, "input.1": STABLE, "output.0": x[STABLE]}
    return order, by_statistics("Tensor.__getitem__", ours, theirs, trail)


def test_a_free_choice_is_one_note_with_the_command_that_tells_more() -> None:
    [note] = findings(*sorted_and_picked(normal(8, 4)[OTHER]))
    assert (note.level, note.kind, note.call) == ("note", "fork", "torch.argsort.0")
    assert "free among equal keys" in note.evidence[0]
    assert any("1 result made of such choices" in line for line in note.evidence)
    assert "--keep tensors" in note.next
    assert "--select /torch.argsort.0" in note.next


def test_a_fault_is_told_before_it() -> None:
    trail, x = Trail(), normal(64)
    wrong = by_statistics("functional.gelu", {"input.0": x, "output.0": x * np.float32(1.1)}, {"input.0": x, "output.0": x}, trail)
    assert [one.kind for one in findings(*sorted_and_picked(normal(8, 4)[OTHER]), wrong)] == ["contributed", "fork"]
