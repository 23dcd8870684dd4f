# SPDX-License-Identifier: Apache-2.0
"""Show a check as rows of the older tools: their names, their columns, and the tensors of failed calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.check.test_foreign import checker_dump, msprobe_dump
from ulpscope import InputError
from ulpscope.model.check.checks import Check
from ulpscope.model.check.standards import STANDARD_METRICS
from ulpscope.workflows.check import one_call as check_calls
from ulpscope.workflows.check.checking import check_run
from ulpscope.workflows.check.old_tables import STATUS_WORDS, details_of, outcomes_of, own_name, saved_failures


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose gelu is off by a third."""
    run = check_calls.run_on_device

    def compute(program: Any, device: str) -> Any:
        made = run(program, device)
        return {slot: value * 1.3 for slot, value in made.items()} if program.name == "functional.gelu.0" else made

    monkeypatch.setattr(check_calls, "run_on_device", compute)


def _check(folder: Path, **words: Any) -> Check:
    return check_run(checker_dump(folder, ".pt"), isolated=False, rules="checker", **words)


def test_rows_have_the_names_and_figures_of_the_old_tables(tmp_path: Path, broken: None) -> None:
    rows = [row for call in _check(tmp_path).calls for row in details_of(call)]
    assert [(row.name, STATUS_WORDS[row.status]) for row in rows] == [
        ("Functional*linear*0.forward.output.0", "pass"),
        ("Functional*gelu*0.forward.output.0", "error"),
        ("Functional*gelu*0.backward.output.0", "pass"),
        ("Functional*linear*0.backward.output.0", "pass"),
        ("Functional*linear*0.backward.output.1", "pass"),
    ]
    assert {(row.golden_dtype, row.dtype) for row in rows} == {("float64", "float32")}
    assert rows[1].shape == (6, 80)
    assert set(rows[1].metrics) == set(STANDARD_METRICS)
    assert rows[1].metrics["cosine"] == pytest.approx(1.0)
    assert rows[1].metrics["within_1e2"] == 0.0
    assert "within" in rows[1].message


def test_a_row_for_each_api(tmp_path: Path, broken: None) -> None:
    first, second = outcomes_of(_check(tmp_path).calls)
    assert (first.key, first.forward, first.backward, first.message) == ("Functional*linear*0", "passed", "passed", "")
    assert (second.key, second.forward, second.backward) == ("Functional*gelu*0", "failed", "passed")
    assert "within" in second.message
    (only,) = outcomes_of(_check(tmp_path, select=["gelu", "phase:forward"]).calls)
    assert (only.forward, only.backward) == ("failed", None)


def test_names_of_msprobe_lose_their_direction(tmp_path: Path) -> None:
    check = check_run(msprobe_dump(tmp_path), isolated=False, rules="benchmark", edition="26.2")
    assert [row.name for call in check.calls for row in details_of(call)] == [
        "Functional.linear.0.forward.output.0",
        "Functional.linear.0.backward.output.0",
        "Functional.linear.0.backward.output.1",
    ]
    assert [one.key for one in outcomes_of(check.calls)] == ["Functional.linear.0"]


def test_editions_count_small_values_by_their_own_limits(tmp_path: Path) -> None:
    path = checker_dump(tmp_path, ".pt")
    figures = [
        [slot.metrics for call in check_run(path, isolated=False, rules="benchmark", edition=name).calls for slot in call.slots]
        for name in ("2024", "26.2")
    ]
    assert figures[0] != figures[1]
    with pytest.raises(InputError, match="no edition '1999'"):
        check_run(path, isolated=False, edition="1999")


@pytest.mark.parametrize("rules", ["checker", "derived"])
def test_tensors_of_what_failed(tmp_path: Path, broken: None, rules: str) -> None:
    folder = tmp_path / "failures"
    check_run(checker_dump(tmp_path, ".pt"), isolated=False, rules=rules, save_failures=folder)
    (saved,) = saved_failures(folder)
    assert (saved.key, saved.phase) == ("Functional*gelu*0", "forward")
    assert list(saved.tensors) == ["device.output.0", "exact.output.0", "input.0"]
    data = {name: torch.from_numpy(np.frombuffer(one.buffer, one.dtype).copy()) for name, one in saved.tensors.items()}
    assert data["exact.output.0"].dtype == torch.float64
    torch.testing.assert_close(data["device.output.0"].double(), data["exact.output.0"] * 1.3, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="is no folder"):
        next(saved_failures(tmp_path / "nothing"))


def test_names_in_our_words() -> None:
    assert own_name("Functional*conv2d*0") == "functional.conv2d.0"
    assert own_name("Torch_exp_3_forward") == "torch.exp.3"
    assert own_name("something else") is None
