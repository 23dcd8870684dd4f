# SPDX-License-Identifier: Apache-2.0
"""PrecisionDebugger: steps, ranks, the DataLoader and the exception that ends a training; and modules dumped as one unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ptdbg_ascend
import ulpscope
from tests.legacy.ptdbg_programs import BATCH, MODEL, Net, apis, dump, files, lines, names, rank_folder, step
from ulpscope.errors import InputError

STEMS = ["api_stack_dump", "api_stack_dump.pkl", "compare_data.py"]


@pytest.mark.promise("P070", "P071", "P072", "P080")
def test_the_debugger_dumps_everything_with_stacks_by_default(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump")
    model = Net()
    debugger.start()
    step(model)
    debugger.stop()
    debugger.step()
    folder = rank_folder(tmp_path)
    assert files(folder) == STEMS
    assert apis(folder / "api_stack_dump.pkl")[0] == "Functional_linear_0_forward"
    assert "Functional_linear_0_forward_stack_info" in names(folder / "api_stack_dump.pkl")


@pytest.mark.promise("P073", "P081", "P102a")
def test_the_mode_stands_before_the_names(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump")
    debugger.configure_hook(
        mode="api_list", scope=[], api_list=["linear"], filter_switch="OFF", acl_config=None, backward_input=[], input_output_mode=["all"],
        summary_only=False,
    )  # fmt: skip
    model = Net()
    debugger.start()
    step(model)
    debugger.stop()
    assert files(rank_folder(tmp_path)) == ["api_list_dump", "api_list_dump.pkl", "compare_data.py"]


@pytest.mark.promise("P102", "P103", "P079")
def test_several_pairs_of_start_and_stop_make_one_dump(tmp_path: Path) -> None:
    ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump", step=[0])
    x = torch.ones(2, requires_grad=True)
    ptdbg_ascend.PrecisionDebugger.start()
    y = x * 2
    ptdbg_ascend.PrecisionDebugger.stop()
    y.exp()
    ptdbg_ascend.PrecisionDebugger.start()
    (y * 3).sum().backward()
    ptdbg_ascend.PrecisionDebugger.stop()
    ptdbg_ascend.PrecisionDebugger.step()
    found = apis(rank_folder(tmp_path / "step0") / "api_stack_dump.pkl")
    assert found[:3] == ["Tensor___mul___0_forward", "Tensor___mul___1_forward", "Tensor_sum_0_forward"]
    assert found[-1] == "Tensor___mul___0_backward"
    assert not any("exp" in name for name in found)


@pytest.mark.promise("P077", "P151")
def test_the_steps_that_were_asked_for_have_folders_of_their_own(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump", step=list(range(0, 4, 2)))
    for number in range(3):
        debugger.start()
        step()
        if number == 2:
            torch.ones(2).exp()
        debugger.stop()
        debugger.step()
    assert files(tmp_path) == ["step0", "step2"]
    first, third = (apis(rank_folder(tmp_path / f"step{number}") / "api_stack_dump.pkl") for number in (0, 2))
    assert third[: len(first)] == first
    assert third[-1] == "Tensor_exp_0_forward"
    run_ = ulpscope.open_run(tmp_path)
    assert run_.steps(0) == (0, 2)


@pytest.mark.promise("P077")
def test_without_a_list_every_step_is_dumped(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump")
    for _ in range(2):
        debugger.start()
        step()
        debugger.stop()
        debugger.step()
    assert files(tmp_path) == ["ptdbg_dump_v4.0", "step1"]
    assert ulpscope.open_run(tmp_path).steps(0) == (0, 1)


@pytest.mark.promise("P078", "P104")
def test_a_dataloader_is_followed_and_training_left_after_the_last_step(tmp_path: Path) -> None:
    original = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump", step=[0, 2], enable_dataloader=True)
    batches = []

    def train() -> None:
        for batch in DataLoader(torch.arange(40.0).reshape(10, 4), batch_size=2, shuffle=False):
            batches.append(batch)
            MODEL(batch).sum().backward()

    with pytest.raises(Exception, match=r"^ptdbg: exit after iteration \[0, 2\]$"):
        train()
    assert len(batches) == 3
    assert files(tmp_path) == ["step0", "step2"]
    for number, top in ((0, 7.0), (2, 23.0)):
        (given_,) = (
            line
            for line in lines(rank_folder(tmp_path / f"step{number}") / "api_stack_dump.pkl")
            if line[0].endswith("linear_0_forward_input.0")
        )
        assert given_[5][0] == top
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is original


@pytest.mark.promise("P078")
def test_a_dataloader_without_a_list_dumps_all_its_steps(tmp_path: Path) -> None:
    ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump", enable_dataloader=True)
    for batch in DataLoader(torch.ones(6, 4), batch_size=2):
        MODEL(batch)
    assert files(tmp_path) == ["step0", "step1", "step2"]
    assert all("Functional_linear_1_forward" in apis(rank_folder(tmp_path / folder) / "api_stack_dump.pkl") for folder in files(tmp_path))


def test_by_hand_training_ends_at_the_next_start_after_the_last_step(tmp_path: Path) -> None:
    debugger = ptdbg_ascend.PrecisionDebugger(dump_path=str(tmp_path), hook_name="dump", step=[0])
    debugger.start()
    debugger.stop()
    debugger.step()
    with pytest.raises(Exception, match=r"^ptdbg: exit after iteration \[0\]$"):
        debugger.start()


@pytest.mark.promise("P075", "P070", "P102")
def test_what_the_debugger_refuses(tmp_path: Path) -> None:
    with pytest.raises(ptdbg_ascend.CompareException, match="no PrecisionDebugger"):
        ptdbg_ascend.PrecisionDebugger.start()
    for wrong, message in (
        ({}, "needs hook_name"), ({"hook_name": "dumps"}, "hook_name is 'dump' or"),
        ({"hook_name": "dump", "rank": -1}, "rank is a whole number"), ({"hook_name": "dump", "rank": "0"}, "rank is"),
        ({"hook_name": "dump", "step": "x"}, "step is a list"),
        ({"hook_name": "dump", "step": [1.5]}, "step is a list"), ({"hook_name": "dump", "enable_dataloader": 1}, "enable_dataloader is"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ptdbg_ascend.PrecisionDebugger(str(tmp_path), **wrong)  # type: ignore[arg-type]


@pytest.mark.promise("P074")
def test_the_debugger_takes_the_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ptdbg_ascend.CompareException, match="ASCEND_WORK_PATH"):
        ptdbg_ascend.PrecisionDebugger(hook_name="dump")
    monkeypatch.setenv("ASCEND_WORK_PATH", str(tmp_path / "work"))
    debugger = ptdbg_ascend.PrecisionDebugger(hook_name="dump")
    debugger.start()
    step()
    debugger.stop()
    assert files(rank_folder(tmp_path / "work" / "dump_data")) == STEMS


@pytest.mark.promise("P076")
def test_only_the_rank_that_was_asked_for(tmp_path: Path) -> None:
    for rank, expected in ((0, ["ptdbg_dump_v4.0"]), (4, [])):
        (tmp_path / str(rank)).mkdir()
        debugger = ptdbg_ascend.PrecisionDebugger(str(tmp_path / str(rank)), hook_name="dump", rank=rank)
        debugger.start()
        step()
        debugger.stop()
        debugger.step()
        assert files(tmp_path / str(rank)) == expected


def test_a_new_debugger_replaces_the_old_one(tmp_path: Path) -> None:
    ptdbg_ascend.PrecisionDebugger(str(tmp_path / "1"), hook_name="dump", enable_dataloader=True)
    second = ptdbg_ascend.PrecisionDebugger(str(tmp_path / "2"), hook_name="dump")
    list(DataLoader(torch.ones(2, 4)))
    second.start()
    step()
    second.stop()
    assert files(tmp_path) == ["2"]


# ---- modules as units


@pytest.mark.promise("P137", "P138")
def test_a_module_is_dumped_as_one_unit_instead_of_its_apis(tmp_path: Path) -> None:
    x = BATCH.clone().requires_grad_()

    def program() -> None:
        ptdbg_ascend.module_dump(MODEL, "MyModule")
        out = MODEL(x)
        again = MODEL(x)
        out.exp()
        ptdbg_ascend.module_dump_end()
        (out + again).sum().backward()

    folder = dump(tmp_path, program)
    assert apis(folder / "dump.pkl") == [
        "MyModule_0_forward", "MyModule_1_forward", "Tensor___add___0_forward", "Tensor_sum_0_forward", "Tensor_sum_0_backward",
        "Tensor___add___0_backward", "MyModule_1_backward", "MyModule_0_backward",
    ]  # fmt: skip
    assert {
        "MyModule_0_forward_input.0.npy", "MyModule_0_forward_output.npy", "MyModule_0_backward_input.0.npy",
        "MyModule_0_backward_output.0.npy",
    } <= set(files(folder / "dump"))  # fmt: skip
    by_name = {line[0]: line for line in lines(folder / "dump.pkl")}
    assert by_name["MyModule_0_forward_output"][4] == [3, 2]
    assert by_name["MyModule_0_backward_output.0"][4] == [3, 4]
    assert {line[1] for name, line in by_name.items() if name.startswith("MyModule")} == {1}
    assert {line[1] for name, line in by_name.items() if not name.startswith("MyModule")} == {0}
    records = list(ulpscope.open_run(tmp_path).records(0, 0))
    assert [str(record.call) for record in records[:2]] == ["module.MyModule.0", "module.MyModule.1"]


@pytest.mark.promise("P137")
@pytest.mark.parametrize(("module", "name"), [(Net, "MyModule"), ("net", "MyModule"), (MODEL, 3), (MODEL, "../MyModule"), (MODEL, "")])
def test_what_is_no_module_or_no_name_is_refused(module: Any, name: Any) -> None:
    with pytest.raises(InputError, match=r"module_dump takes|module_name becomes") as caught:
        ptdbg_ascend.module_dump(module, name)
    assert type(caught.value).__name__ == "DumpException"
    assert caught.value.code == 11  # type: ignore[attr-defined]


def test_without_a_dump_a_module_is_just_called(capsys: pytest.CaptureFixture[str]) -> None:
    ptdbg_ascend.module_dump(MODEL, "MyModule")
    assert MODEL(BATCH).shape == (3, 2)
    ptdbg_ascend.module_dump_end()
    assert "has no effect while the dump is off" in capsys.readouterr().out


# ---- what vendors call their own


@pytest.mark.promise("P153")
def test_functions_of_torch_vf_have_their_prefix(tmp_path: Path) -> None:
    lstm = torch.nn.LSTM(3, 2)
    found = apis(dump(tmp_path, lambda: lstm(torch.ones(4, 1, 3))) / "dump.pkl")
    assert "VF_lstm_0_forward" in found
