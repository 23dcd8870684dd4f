# SPDX-License-Identifier: Apache-2.0
"""Which calls, phases and slots a selection lets through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.capture.recording import recording, slots_of
from ulpscope.capture import Selection
from ulpscope.errors import InputError
from ulpscope.model import CallName

NAMES = [
    ("layers.0", "functional.gelu.0"),
    ("layers.0.fc", "functional.linear.0"),
    ("layers.1", "functional.gelu.1"),
    ("layers.10", "functional.gelu.2"),
    ("", "Tensor.add.0"),
]


def _chosen(select: str | list[str] | None) -> list[str]:
    selection = Selection.parse(select=select)
    selection.begin_step()
    return [f"{module}/{call}" for module, call in NAMES if selection.wants_call(module, CallName.parse(call))]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        ("layers.0*/*", [0, 1]),
        ("gelu", [0, 2, 3]),
        ("functional.gelu.1", [2]),
        ("gelu.1", [2]),
        ("module:layers.1", [2]),
        ("module:layers.0", [0, 1]),
        (["gelu", "module:layers.0.fc"], [0, 1, 2, 3]),
        (["gelu", "!module:layers.1"], [0, 3]),
        ("!gelu", [1, 4]),
        (r"re:layers\.\d/.*", [0, 2]),
        ("range:*/functional.linear*..layers.10/*", [1, 2, 3]),
        ("range:nothing..nothing", []),
    ],
)
def test_patterns_choose_calls(select: str | list[str] | None, expected: list[int]) -> None:
    assert _chosen(select) == ["/".join(NAMES[index]) for index in expected]


def test_a_range_begins_anew_with_each_step() -> None:
    selection = Selection.parse(select="range:gelu.0..gelu.0")
    for _ in range(2):
        selection.begin_step()
        assert [selection.wants_call("m", CallName("gelu", index)) for index in (0, 1)] == [True, False]


def test_patterns_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "select.txt"
    file.write_text("# the activation only\ngelu  # all of them\n\n!module:layers.10\n")
    assert _chosen(f"@{file}") == ["layers.0/functional.gelu.0", "layers.1/functional.gelu.1"]


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ("phase:sideways", "phases are start, forward, backward, optimizer"),
        ("re:(", "not a regular expression"),
        ("range:a", "write range:FIRST..LAST"),
        ("@no/such/file", "cannot be read"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_in_a_sentence(select: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Selection.parse(select=select)


@pytest.mark.parametrize("steps", [[-1], ["0"], [1.5]])
def test_steps_are_whole_numbers(steps: list[int]) -> None:
    with pytest.raises(InputError, match="steps are whole numbers"):
        Selection.parse(steps=steps)


def _one_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_one_phase_alone() -> None:
    with recording(select="phase:backward") as run:
        _one_step()
    assert {record.phase for record in run.records} == {"backward"}
    with recording(select=["phase:forward", "phase:optimizer"]) as run:
        _one_step()
    assert {record.phase for record in run.records} == {"forward", "optimizer"}
    with recording(select="!phase:backward") as run:
        _one_step()
    assert {record.phase for record in run.records} == {"start", "forward", "optimizer", "end"}


def test_some_slots_alone() -> None:
    with recording(select=["linear", "slot:output*"]) as run:
        _one_step()
    assert slots_of(run.one("functional.linear")) == ["output.0"]
    assert slots_of(run.one("functional.linear", "backward")) == ["output.1", "output.2"]
