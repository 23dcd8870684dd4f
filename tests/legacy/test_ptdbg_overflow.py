# SPDX-License-Identifier: Apache-2.0
"""Test the overflow check of ptdbg_ascend by values: files for each overflow, the exception at the limit, the files for the checker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import ptdbg_ascend
import ulpscope
from tests.legacy.ptdbg_programs import files, lines, rank_folder
from ulpscope.errors import MissingDependencyError


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def overflow(times: int = 1) -> torch.Tensor:
    """Overflow in a float16 addition."""
    big = torch.full((4,), 60000.0, dtype=torch.float16)
    for _ in range(times):
        small = big * 0.5 + 1.0
        result = big + big
    return result + small


def check(**options: Any) -> Path:
    ptdbg_ascend.set_dump_path("./overflow_dump")
    ptdbg_ascend.register_hook(None, ptdbg_ascend.overflow_check, **options)
    return rank_folder(Path("overflow_dump").absolute())


@pytest.mark.promise("P050", "P052", "P056", "P123")
def test_training_stops_at_the_third_overflow(capsys: pytest.CaptureFixture[str]) -> None:
    folder = check(overflow_nums=3)
    with pytest.raises(ValueError, match=r"^\[overflow 3 times\]: dump file is saved in '.*Tensor___add___5_forward_3\.pkl'\.$"):
        overflow(5)
    stems = ["Tensor___add___1_forward_1", "Tensor___add___3_forward_2", "Tensor___add___5_forward_3"]
    assert files(folder) == sorted([*stems, *(f"{stem}.pkl" for stem in stems)])
    printed = capsys.readouterr().out
    assert printed.count("its input is clean and its output overflows") == 3


@pytest.mark.promise("P082", "P090")
def test_one_overflow_is_the_default_and_minus_one_never_stops() -> None:
    check()
    with pytest.raises(ValueError, match=r"\[overflow 1 times\]"):
        overflow()
    ptdbg_ascend.PrecisionDebugger.forget()
    debugger = ptdbg_ascend.PrecisionDebugger("./never", hook_name="overflow_check")
    debugger.configure_hook(mode=None, acl_config=None, overflow_nums=-1, need_replicate=False)
    debugger.start()
    overflow(4)
    debugger.stop()
    assert len(list(rank_folder(Path("never")).glob("*.pkl"))) == 5


@pytest.mark.promise("P155")
def test_files_of_one_overflow(tmp_path: Path) -> None:
    folder = check(overflow_nums=-1)
    overflow()
    pkls = sorted(file.name for file in folder.glob("*.pkl"))
    assert pkls == ["Tensor___add___1_forward_1.pkl", "Tensor___add___2_forward_2.pkl"]
    first = lines(folder / pkls[0])
    assert [line[0] for line in first] == [
        "Tensor___add___1_forward_stack_info", "Tensor___add___1_forward_input.0", "Tensor___add___1_forward_input.1",
        "Tensor___add___1_forward_output",
    ]  # fmt: skip
    assert {line[1] for line in first[1:]} == {101}
    assert first[0][1][0][3] == "result = big + big"
    assert first[-1][3:] == ["torch.float16", [4], [float("inf")] * 3]
    data = folder / "Tensor___add___1_forward_1"
    assert files(data) == [f"{line[0]}.npy" for line in first[1:]]
    assert np.isinf(np.load(data / "Tensor___add___1_forward_output.npy")).all()


@pytest.mark.promise("P050")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda: torch.tensor([100.0]).exp(), ["Tensor_exp_0_forward_1"]),
        (lambda: torch.zeros(2) / torch.zeros(2), ["Tensor___truediv___0_forward_1"]),
        (lambda: torch.tensor([65504.0]).half() * 1.0, ["Tensor_half_0_forward_1", "Tensor___mul___0_forward_2"]),
        (lambda: -torch.tensor([300.0]).double().exp(), []),
        (lambda: torch.ones(3).sum() + torch.arange(3), []),
    ],
)
def test_inf_nan_and_the_largest_number_of_a_dtype_are_overflows(program: Any, expected: list[str]) -> None:
    folder = check(overflow_nums=-1)
    program()
    found = sorted((file.stem for file in folder.glob("*.pkl")), key=lambda name: name.rpartition("_")[2]) if folder.is_dir() else []
    assert found == expected


@pytest.mark.promise("P057")
def test_what_began_with_clean_inputs_is_described_for_the_checker() -> None:
    check(overflow_nums=-1)
    overflow()
    forward = json.loads(Path(f"forward_info_{os.getpid()}.json").read_text())
    assert list(forward) == ["Tensor___add___1_forward"]
    first = forward["Tensor___add___1_forward"]["args"][0]
    assert (first["type"], first["dtype"], first["shape"]) == ("torch.Tensor", "torch.float16", [4])
    assert first["Max"] == first["Min"] == 60000.0
    stacks = json.loads(Path(f"stack_info_{os.getpid()}.json").read_text())
    assert "result = big + big" in stacks["Tensor___add___1_forward"][0]
    assert not Path("forward_real_data").exists()
    (record,) = ulpscope.open_run(f"forward_info_{os.getpid()}.json").records(0, 0)
    assert [slot.dtype for slot in record.slots] == ["float16", "float16"]


@pytest.mark.promise("P057", "P091")
def test_real_data_where_they_are_asked_for() -> None:
    debugger = ptdbg_ascend.PrecisionDebugger("./dump_path", hook_name="overflow_check")
    debugger.configure_hook(overflow_nums=-1, need_replicate=True)
    debugger.start()
    overflow()
    zero = torch.zeros(2, requires_grad=True)
    zero.sqrt().sum().backward()
    debugger.stop()
    forward = json.loads(Path(f"forward_info_{os.getpid()}.json").read_text())
    paths = [Path(argument["datapath"]) for argument in forward["Tensor___add___1_forward"]["args"]]
    assert [path.relative_to(Path.cwd()).as_posix() for path in paths] == [
        "forward_real_data/rank0/Tensor___add___1_forward.0.npy", "forward_real_data/rank0/Tensor___add___1_forward.1.npy",
    ]  # fmt: skip
    assert (np.load(paths[0]) == 60000).all()
    backward = json.loads(Path(f"backward_info_{os.getpid()}.json").read_text())
    (gradient,) = backward["Tensor_sqrt_0_backward"]
    assert (np.load(gradient["datapath"]) == 1).all()
    assert Path(gradient["datapath"]).relative_to(Path.cwd()).parts[0] == "backward_real_data"
    debugger.step()
    run = ulpscope.open_run(f"forward_info_{os.getpid()}.json")
    record = next(iter(run.records(0, 0)))
    content = record.slots[0].content
    assert content is not None
    assert run.tensor(0, 0, content).shape == (4,)


@pytest.mark.promise("P059")
def test_overflows_of_an_earlier_check_are_in_the_way() -> None:
    check(overflow_nums=-1)
    overflow()
    ptdbg_ascend.PrecisionDebugger.forget()
    with pytest.raises(
        ptdbg_ascend.CompareException, match=r"holds the overflows of an earlier check, .*Tensor___add___1_forward_1\.pkl'; delete"
    ):
        check(overflow_nums=-1)


@pytest.mark.promise("P132", "P133")
def test_the_switch_limits_the_check_to_a_part_of_the_training() -> None:
    folder = check(overflow_nums=-1)
    ptdbg_ascend.set_overflow_check_switch("OFF")
    overflow()
    assert not list(folder.glob("*.pkl"))
    ptdbg_ascend.set_overflow_check_switch("ON", filter_switch="ON")
    torch.tensor([60000.0, 1.0]).half() * 2
    ptdbg_ascend.set_overflow_check_switch("OFF")
    overflow()
    (pkl,) = folder.glob("*.pkl")
    assert [line[0].partition("forward_")[2] for line in lines(pkl)] == ["stack_info", "input.0", "output"]
    assert folder.is_relative_to(Path("overflow_dump").absolute())
    with pytest.raises(ptdbg_ascend.CompareException):
        ptdbg_ascend.set_overflow_check_switch("abc")


@pytest.mark.refused("P054", "P101")
def test_overflows_at_acl_level_are_refused() -> None:
    Path("dump.json").write_text(json.dumps({"dump": {"dump_path": "."}}))
    ptdbg_ascend.set_dump_path("./overflow_dump")
    with pytest.raises(MissingDependencyError, match="CANN"):
        ptdbg_ascend.register_hook(None, ptdbg_ascend.overflow_check, dump_mode="acl", dump_config="./dump.json")
    debugger = ptdbg_ascend.PrecisionDebugger("./overflow_dump", hook_name="overflow_check")
    debugger.configure_hook(mode="acl", acl_config="./dump.json")
    with pytest.raises(MissingDependencyError, match="CANN"):
        debugger.start()


@pytest.mark.promise("P082", "P090")
@pytest.mark.parametrize("wrong", ["invalid", 0, -2, True, 1.5])
def test_numbers_of_overflows_that_make_no_sense(wrong: Any) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger("./overflow_dump", hook_name="overflow_check")
    for refused in (lambda: debugger.configure_hook(overflow_nums=wrong), lambda: check(overflow_nums=wrong)):
        with pytest.raises(ptdbg_ascend.CompareException, match="overflow_nums is a whole number") as caught:
            refused()
        assert caught.value.code == 11


@pytest.mark.promise("P104")
def test_a_dataloader_is_followed_by_the_check() -> None:
    debugger = ptdbg_ascend.PrecisionDebugger("./dump_path", hook_name="overflow_check", step=[0, 2], enable_dataloader=True)
    debugger.configure_hook(overflow_nums=-1)
    with pytest.raises(Exception, match=r"^ptdbg: exit after iteration \[0, 2\]$"):
        list(map(torch.Tensor.exp, DataLoader(torch.full((5,), 100.0))))
    assert files(Path("dump_path")) == ["step0", "step2"]
    assert (rank_folder(Path("dump_path/step0")) / "Tensor_exp_0_forward_1.pkl").is_file()
    assert (rank_folder(Path("dump_path/step2")) / "Tensor_exp_0_forward_2.pkl").is_file()


@pytest.mark.promise("P056")
def test_a_backward_pass_is_checked_as_well() -> None:
    folder = check(overflow_nums=1)
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"Tensor_sqrt_0_backward_1\.pkl"):
        x.sqrt().sum().backward()
    found = {line[0]: line for line in lines(folder / "Tensor_sqrt_0_backward_1.pkl")}
    assert found["Tensor_sqrt_0_backward_input.0"][5] == [1.0, 1.0, 1.0]
    assert found["Tensor_sqrt_0_backward_output.0"][5][0] == float("inf")


def test_a_clean_training_is_left_alone() -> None:
    folder = check(overflow_nums=1)
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    ptdbg_ascend.PrecisionDebugger.forget()
    assert not folder.exists()
