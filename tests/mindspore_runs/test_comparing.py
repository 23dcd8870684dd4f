# SPDX-License-Identifier: Apache-2.0
"""A run of MindSpore against one of torch: calls pair by their names, without a mapping file, and a fault is named in either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional as F

import ulpscope
from tests.mindspore_runs.transformer import made, train
from ulpscope.match import match_calls

MINDSPORE = Path(__file__).parent / "recorded" / "transformer"


def recorded(folder: Path) -> Path:
    net = made()
    with ulpscope.Capture(folder, net, keep="tensors") as capture:
        train(net, capture.step)
    return folder


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("torch") / "run")


def test_every_call_of_torch_has_a_partner(torch_run: Path) -> None:
    ours, theirs = ulpscope.open_run(MINDSPORE), ulpscope.open_run(torch_run)
    pairs = [pair for step in range(3) for pair in match_calls(ours.records(0, step), theirs.records(0, step))]
    wanted = [pair for pair in pairs if pair.reference is not None and pair.reference.level == "api"]
    paired = [pair for pair in wanted if pair.subject is not None]
    assert len(wanted) == 321
    assert len(paired) / len(wanted) == 1.0
    assert {pair.matched_by for pair in paired} == {"name"}
    slots = [slot for pair in paired for slot in pair.slots]
    assert all(slot.subject is not None and slot.reference is not None for slot in slots)
    assert len(slots) == 912


def test_a_clean_pair_is_quiet(torch_run: Path) -> None:
    comparison = ulpscope.compare_runs(MINDSPORE, torch_run)
    assert comparison.faults == ()
    assert not any(call.contribution == "contributed" for call in comparison.calls)
    assert comparison.verdict == "unknown"  # the optimizer and the random state of MindSpore are not recorded yet
    arguments = next(finding for finding in comparison.findings if finding.kind == "arguments")
    assert "6 calls differ" in arguments.headline  # labels of 32 bits against 64


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def test_a_planted_fault_is_named(tmp_path: Path) -> None:
    gelu = F.gelu
    with replaced(F, "gelu", lambda x: gelu(x, approximate="tanh")):
        run = recorded(tmp_path / "faulty")
    for subject, reference in ((run, MINDSPORE), (MINDSPORE, run)):
        comparison = ulpscope.compare_runs(subject, reference)
        assert comparison.verdict == "diverges"
        assert "gelu" in comparison.faults[0].headline
        assert (comparison.faults[0].module, comparison.faults[0].step) == ("blocks.0", 0)
