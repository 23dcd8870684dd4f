# SPDX-License-Identifier: Apache-2.0
"""The guide's way of working, with real dumps: the whole net, then a range around the suspect by the names of the table, then again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ptdbg_ascend
from tests.legacy.ptdbg_dumps import only, param, rows
from tests.legacy.ptdbg_programs import BATCH, apis, dump
from ulpscope.compat.ptdbg.dump.debugger import PrecisionDebugger

VERDICT = "Accuracy Reached or Not"


def train(shift: int) -> None:
    """Train a program whose only fault is the number in `roll`."""
    x = BATCH.clone().requires_grad_()
    hidden = torch.relu(x) + 1
    torch.roll(hidden, shift).abs().square().sum().backward()


def dumped(folder: Path, shift: int, **options: object) -> Path:
    """Dump as in a process of its own, as far as the old counters are concerned; return the pkl file."""
    PrecisionDebugger.forget()
    return only(dump(folder, lambda: train(shift), **options), "*dump.pkl")


@pytest.mark.promise("P005", "P020", "P102b")
def test_narrowing_down_to_the_faulty_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = param(dumped(tmp_path / "npu", 1, mode="api_stack"), dumped(tmp_path / "gpu", 0, mode="api_stack"))
    table = rows(ptdbg_ascend.compare(whole, tmp_path / "whole", stack_mode=True))
    bad = [row["NPU Name"] for row in table if row[VERDICT] == "No"]
    assert bad[0] == "Torch_roll_0_forward_output"
    assert f"Suspect Nodes: {bad[0]}" in capsys.readouterr().out

    before = table[[row["NPU Name"] for row in table].index("Torch_roll_0_forward_input.0")]["Bench Name"]
    scope = [before.partition("_input")[0], "Tensor_abs_0_forward"]
    sides = [dumped(tmp_path / side, shift, mode="range", scope=scope) for side, shift in (("npu_range", 1), ("gpu_range", 0))]
    assert apis(sides[0]) == ["Torch_roll_0_forward", "Tensor_abs_0_forward"]
    narrow = rows(ptdbg_ascend.compare(param(*sides), tmp_path / "narrow"))
    assert next(row["NPU Name"] for row in narrow if row[VERDICT] == "No") == "Torch_roll_0_forward_output"

    again = param(dumped(tmp_path / "fixed", 0, mode="api_stack"), Path(whole["bench_pkl_path"]))
    verdicts = {row[VERDICT] for row in rows(ptdbg_ascend.compare(again, tmp_path / "again")) if row["Cosine"] != "unsupported"}
    assert verdicts == {"Yes"}
