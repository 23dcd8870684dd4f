# SPDX-License-Identifier: Apache-2.0
"""Test the overflow check of msprobe through its old name: which calls are dumped, when the training ends, and the files left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe.pytorch import PrecisionDebugger
from tests.legacy.msprobe_programs import X, entries, load, tensor_files, write_config
from ulpscope.errors import InputError

BIG = torch.tensor([60000.0, 1.0], dtype=torch.float16, requires_grad=True)


def overflowing() -> torch.Tensor:
    fine = BIG.abs()
    made = fine * 2.0
    return (made - 1.0).sum()


def check(folder: Path, overflow_nums: int = 1, **common: Any) -> PrecisionDebugger:
    return PrecisionDebugger(config_path=write_config(folder, "overflow_check", {"overflow_nums": overflow_nums}, **common), layout="1.x")


@pytest.mark.promise("E11", "E01")
def test_the_first_overflow_ends_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debugger = check(tmp_path)
    debugger.start()
    with pytest.raises(Exception, match=r"ends after 1 of 1 overflows \(overflow_nums\), the last in Tensor.__mul__.0.forward"):
        overflowing()
    PrecisionDebugger.forget()
    found = entries(tmp_path / "dump")
    assert list(found) == ["Tensor.__mul__.0.forward"]
    assert found["Tensor.__mul__.0.forward"]["output"][0]["Max"] == float("inf")
    assert tensor_files(tmp_path / "dump") == ["Tensor.__mul__.0.forward.input.0.pt", "Tensor.__mul__.0.forward.output.0.pt"]
    assert torch.equal(load(tmp_path / "dump", "Tensor.__mul__.0.forward.input.0.pt"), BIG.abs())
    assert "overflow 1: Tensor.__mul__.0.forward: inf or NaN out of finite inputs" in capsys.readouterr().err
    stack = json.loads((tmp_path / "dump" / "step0" / "rank" / "stack.json").read_text())
    assert "made = fine * 2.0" in stack["Tensor.__mul__.0.forward"][0]


@pytest.mark.promise("E11")
@pytest.mark.parametrize(("overflow_nums", "expected"), [(2, ["Tensor.__mul__.0.forward", "Tensor.__sub__.0.forward"]), (-1, None)])
def test_more_overflows(tmp_path: Path, overflow_nums: int, expected: list[str] | None) -> None:
    debugger = check(tmp_path, overflow_nums)
    debugger.start()
    if expected is None:
        overflowing().backward()
        debugger.stop()
        debugger.step()
        expected = ["Tensor.__mul__.0.forward", "Tensor.__sub__.0.forward", "Tensor.sum.0.forward"]
    else:
        with pytest.raises(Exception, match="ends after 2 of 2 overflows"):
            overflowing()
    PrecisionDebugger.forget()
    assert list(entries(tmp_path / "dump")) == expected


@pytest.mark.promise("E11")
def test_steps_have_their_own_folders_and_calls_between_stop_and_start_do_not_count(tmp_path: Path) -> None:
    debugger = check(tmp_path, -1, step=[1, 2])
    for _ in range(4):
        debugger.start()
        overflowing()
        debugger.stop()
        overflowing()
        debugger.step()
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step1", "step2"]
    assert len(entries(tmp_path / "dump", step=2)) == 3


def test_a_backward_pass_that_overflows(tmp_path: Path) -> None:
    debugger = check(tmp_path)
    x = torch.tensor([0.0], requires_grad=True)
    debugger.start()
    with pytest.raises(Exception, match=r"the last in Torch\.sqrt\.0\.backward"):
        torch.sqrt(x).sum().backward()
    PrecisionDebugger.forget()
    assert list(entries(tmp_path / "dump")) == ["Torch.sqrt.0.backward"]


def test_a_clean_training_leaves_nothing(tmp_path: Path) -> None:
    debugger = check(tmp_path)
    debugger.start()
    X.abs().sum()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.forget()
    assert not (tmp_path / "dump").exists()


def test_a_number_of_overflows_from_one_up(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="overflow_nums is 0; it may be a number from 1 up, or -1"):
        check(tmp_path, 0)


def test_nan_check_goes_on(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, "nan_check"), layout="1.x")
    debugger.start()
    overflowing()
    debugger.stop()
    PrecisionDebugger.forget()
    assert len(entries(tmp_path / "dump")) == 3


def test_modules_at_level_l0(tmp_path: Path) -> None:
    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = torch.nn.Sequential(torch.nn.Identity(), Doubling())
    debugger = check(tmp_path, -1, level="L0")
    debugger.start(model)
    model(BIG)
    debugger.stop()
    PrecisionDebugger.forget()
    assert list(entries(tmp_path / "dump")) == ["Module.1.Doubling.forward.0"]
