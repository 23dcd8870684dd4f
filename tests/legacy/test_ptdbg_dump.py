# SPDX-License-Identifier: Apache-2.0
"""Dumps of ptdbg_ascend through its old name: the tree, the names, the lines and the files."""

from __future__ import annotations

import json
import math
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import ptdbg_ascend
import ulpscope
from tests.legacy.ptdbg_programs import Net, apis, dump, files, lines, names, rank_folder, run, step
from ulpscope.compat.ptdbg.files.line_names import api_name
from ulpscope.errors import CaptureWarning

NAMES = """
    PrecisionDebugger acc_cmp_dump compare compare_distributed module_dump module_dump_end overflow_check parse register_hook seed_all
    set_backward_input set_dump_path set_dump_switch set_overflow_check_switch
""".split()


@pytest.mark.promise("P021")
def test_a_star_import_gives_the_fourteen_names() -> None:
    space: dict[str, Any] = {}
    exec("from ptdbg_ascend import *", space)
    assert sorted(name for name in space if name != "__builtins__") == sorted(NAMES)
    assert all(callable(space[name]) for name in NAMES)


@pytest.mark.promise("P002", "P022", "P023", "P121", "P154")
def test_the_scenario_of_the_guide_leaves_its_tree(tmp_path: Path) -> None:
    ptdbg_ascend.seed_all()
    ptdbg_ascend.set_dump_path(str(tmp_path / "npu_dump"), dump_tag="all")
    ptdbg_ascend.register_hook(Net(), ptdbg_ascend.acc_cmp_dump)
    ptdbg_ascend.set_dump_switch("ON", mode="api_stack", filter_switch="OFF")
    step()
    ptdbg_ascend.set_dump_switch("OFF")
    folder = tmp_path / "npu_dump" / "all_v4.0" / "rank0"
    assert files(folder) == ["api_stack_dump", "api_stack_dump.pkl", "compare_data.py"]
    found = apis(folder / "api_stack_dump.pkl")
    assert found[:4] == ["Functional_linear_0_forward", "Torch_relu_0_forward", "Functional_dropout_0_forward", "Tensor___add___0_forward"]
    assert "Functional_linear_1_backward" in found
    assert found.index("Functional_linear_1_backward") < found.index("Functional_linear_0_backward")


@pytest.mark.promise("P004", "P150", "P152", "P153")
def test_lines_and_files_by_the_rule_of_names(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        first, second = torch.split(x, 2, dim=1)
        joined = torch.cat([first, second], 1) + 1
        joined.add_(2.0)
        (torch.relu(input=joined) * 2 + torch.relu(joined)).sum().backward()

    folder = dump(tmp_path, program)
    found = {line[0]: line for line in lines(folder / "dump.pkl")}
    assert files(folder / "dump") == sorted(f"{name}.npy" for name in found)
    assert [name for name in found if name.startswith("Torch_split_0_forward")] == [
        "Torch_split_0_forward_input.0", "Torch_split_0_forward_input.1", "Torch_split_0_forward_output.0",
        "Torch_split_0_forward_output.1",
    ]  # fmt: skip
    assert {"Torch_cat_0_forward_input.0.0", "Torch_cat_0_forward_input.0.1", "Torch_cat_0_forward_input.1"} <= set(found)
    assert {"Tensor_add__0_forward_input.0", "Tensor_add__0_forward_output", "Tensor___add___1_forward_output"} <= set(found)
    assert "Torch_relu_0_forward_input.0" not in found
    assert "Torch_relu_0_forward_output" in found
    assert "Torch_relu_1_forward_input.0" in found
    assert found["Torch_split_0_forward_input.0"] == ["Torch_split_0_forward_input.0", 0, [], "torch.float32", [2, 3], [5.0, 0.0, 2.5]]
    assert found["Torch_split_0_forward_input.1"] == ["Torch_split_0_forward_input.1", 0, [], "<class 'int'>", "[]", [2, 2, 2]]
    assert found["Tensor_add__0_forward_input.1"][3:] == ["<class 'float'>", "[]", [2.0, 2.0, 2.0]]
    scalar = np.load(folder / "dump" / "Torch_split_0_forward_input.1.npy", allow_pickle=False)
    assert scalar.shape == ()
    assert scalar == 2
    before, after = (np.load(folder / "dump" / f"Tensor_add__0_forward_{slot}.npy") for slot in ("input.0", "output"))
    assert (after == before + 2).all()


def test_gradients_come_in_the_order_of_the_inputs(tmp_path: Path) -> None:
    weight, bias = torch.ones(3, 2, requires_grad=True), torch.ones(3, requires_grad=True)
    table = torch.ones(5, 2, requires_grad=True)

    def program() -> None:
        F.linear(F.embedding(torch.tensor([0, 3]), table), weight, bias).sum().backward()
        F.linear(torch.ones(4, 2), weight, bias).sum().backward()

    shapes = {line[0]: line[4] for line in lines(dump(tmp_path, program) / "dump.pkl")}
    assert [shapes[f"Functional_linear_0_backward_output.{at}"] for at in range(3)] == [[2, 2], [3, 2], [3]]
    assert "Functional_linear_1_backward_output.0" not in shapes
    assert [shapes[f"Functional_linear_1_backward_output.{at}"] for at in (1, 2)] == [[3, 2], [3]]
    assert shapes["Functional_embedding_0_backward_output.0"] == [5, 2]


def test_statistics_are_torchs_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(5)
    tensors = {
        "float32": torch.randn(1000),
        "float64": torch.randn(7, dtype=torch.float64) * 1e30,
        "bfloat16": torch.randn(33).bfloat16(),
        "float16": torch.randn(33).half(),
        "int64": torch.arange(-3, 9),
    }
    kept = dump(tmp_path, lambda: [torch.clone(tensor) for tensor in tensors.values()])
    found = {line[0]: line for line in lines(kept / "dump.pkl")}
    for number, (dtype, tensor) in enumerate(tensors.items()):
        line = found[f"Torch_clone_{number}_forward_input.0"]
        plain = tensor.float()
        assert line[3] == f"torch.{dtype}"
        assert line[5] == [plain.max().item(), plain.min().item(), plain.mean().item()]
        saved = np.load(kept / "dump" / f"{line[0]}.npy", allow_pickle=False)
        assert saved.dtype == (np.float32 if dtype == "bfloat16" else dtype)
        assert (saved == (plain if dtype == "bfloat16" else tensor).numpy()).all()


def test_values_that_have_no_plain_statistics(tmp_path: Path) -> None:
    given_ = [
        torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.tensor([math.inf, -math.inf]), torch.tensor([True, False]),
        torch.empty(0), torch.tensor(5.0), torch.tensor(7), torch.tensor([1 + 2j]),
    ]  # fmt: skip
    kept = dump(tmp_path, lambda: [torch.clone(tensor) for tensor in given_])
    statistics = [line[5] for line in lines(kept / "dump.pkl") if line[0].endswith("input.0")]
    assert all(math.isnan(value) for value in statistics[0])
    assert statistics[1] == [math.inf, 1.0, math.inf]
    assert statistics[2][:2] == [math.inf, -math.inf]
    assert math.isnan(statistics[2][2])
    assert statistics[3:7] == [[[], [], []], [[], [], []], [5.0, 5.0, 5.0], [7.0, 7.0, 7.0]]
    assert "NaN" in (kept / "dump.pkl").read_text()
    assert np.load(kept / "dump" / "Torch_clone_7_forward_output.npy") == [1 + 2j]


def test_uninitialised_and_meta_tensors_are_left_out(tmp_path: Path) -> None:
    meta = torch.ones(3, device="meta")
    kept = dump(tmp_path, lambda: (torch.empty(3).fill_(1.0), meta + 1))
    assert names(kept / "dump.pkl") == ["Tensor_fill__0_forward_input.1", "Tensor_fill__0_forward_output"]


@pytest.mark.promise("P122")
def test_a_second_dump_into_the_same_place_replaces_the_first(tmp_path: Path) -> None:
    dump(tmp_path, lambda: torch.ones(2) + 1)
    (rank_folder(tmp_path) / "dump" / "notes.txt").write_text("the user's own")
    kept = dump(tmp_path, lambda: torch.ones(2).exp())
    assert [name for name in apis(kept / "dump.pkl") if "ones" not in name] == ["Tensor_exp_0_forward"]
    assert not list((kept / "dump").glob("*add*"))
    assert (kept / "dump" / "notes.txt").read_text() == "the user's own"


def test_calls_are_counted_over_the_whole_process(tmp_path: Path) -> None:
    x = torch.ones(2)
    dump(tmp_path, lambda: [x + 1, x + 2, x.exp()])
    kept = dump(tmp_path, lambda: [x + 1, x.exp()])
    assert apis(kept / "dump.pkl") == ["Tensor___add___2_forward", "Tensor_exp_1_forward"]


def test_what_a_killed_process_left_is_not_taken_for_a_tensor(tmp_path: Path) -> None:
    first = dump(tmp_path, lambda: torch.ones(3).exp())
    hidden = first / "dump" / ".content"
    hidden.mkdir()
    for file in (first / "dump").glob("*.npy"):
        (hidden / file.name).write_bytes(b"half")
    kept = dump(tmp_path, lambda: torch.ones(3).exp())
    assert ".content" not in files(kept / "dump")
    assert all(np.load(file).size for file in (kept / "dump").glob("*.npy"))


def test_equal_tensors_are_one_file_with_several_names(tmp_path: Path) -> None:
    kept = dump(tmp_path)
    sizes = {(entry := file.stat()).st_ino: entry.st_nlink for file in (kept / "dump").iterdir()}
    assert sum(sizes.values()) == len(files(kept / "dump")) > len(sizes)


@pytest.mark.promise("P150")
def test_rights_are_those_of_the_old_tool(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        kept = dump(tmp_path / "new" / "folder")
    finally:
        os.umask(old)
    rights = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert rights[kept] == rights[kept / "dump"] == rights[tmp_path / "new" / "folder"] == 0o750
    assert {mode for path, mode in rights.items() if path.is_file()} == {0o640}


def test_a_dump_opens_as_a_run_with_the_same_records(tmp_path: Path) -> None:
    kept = dump(tmp_path, mode="api_stack")
    opened = ulpscope.open_run(tmp_path)
    records = list(opened.records(0, 0))
    assert [f"{record.call.op.rpartition('.')[2]}_{record.phase}" for record in records][:3] == [
        "linear_forward",
        "relu_forward",
        "dropout_forward",
    ]
    assert len(records) == len(apis(kept / "api_stack_dump.pkl"))
    slots = [slot for record in records for slot in record.slots]
    written = [line for line in lines(kept / "api_stack_dump.pkl") if len(line) == 6 and line[3].startswith("torch.")]
    assert [list(slot.shape) for slot in slots] == [line[4] for line in written]
    assert [slot.summary and slot.summary.max for slot in slots] == [line[5][0] for line in written]
    for slot in slots:
        assert slot.content is not None
        assert opened.tensor(0, 0, slot.content).shape == slot.shape
    assert records[0].source is not None
    assert records[0].source.code == "hidden = self.drop(torch.relu(self.one(x)))"


@pytest.mark.promise("P001")
def test_what_the_tool_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    npu, bench = dump(tmp_path / "npu"), dump(tmp_path / "bench")
    ptdbg_ascend.PrecisionDebugger.forget()
    paths = {f"{side}_pkl_path": str(folder / "dump.pkl") for side, folder in (("npu", npu), ("bench", bench))}
    paths |= {f"{side}_dump_data_dir": str(folder / "dump") for side, folder in (("npu", npu), ("bench", bench))}
    (tmp_path / "output").mkdir()
    ptdbg_ascend.compare(paths, str(tmp_path / "output"))
    assert list((tmp_path / "output").glob("compare_result_*.csv"))
    ptdbg_ascend.set_dump_path(str(tmp_path / "overflow"))
    ptdbg_ascend.register_hook(None, ptdbg_ascend.overflow_check)
    with pytest.raises(ValueError, match="overflow 1 times"):
        torch.tensor([1e30]).square()


def test_nothing_that_is_computed_changes(tmp_path: Path) -> None:
    ptdbg_ascend.seed_all()
    plain, dumped = Net(), Net()
    dumped.load_state_dict(plain.state_dict())
    reference = step(plain)
    losses: list[float] = []
    dump(tmp_path, lambda: losses.append(step(dumped)), mode="api_stack")
    assert losses == [reference]
    for ours, theirs in zip(dumped.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_a_full_disk_costs_the_dump_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ulpscope.compat.ptdbg.files.pkl_writer.os.write", full)
    with pytest.warns(CaptureWarning, match="No space left"):
        dump(tmp_path, lambda: step())
    assert math.isfinite(step())


def test_a_folder_that_cannot_be_made_costs_the_dump_only(tmp_path: Path) -> None:
    ptdbg_ascend.set_dump_path(str(tmp_path / "dump"))
    (tmp_path / "dump").write_text("in the way")
    ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ptdbg_ascend.set_dump_switch("ON")
        assert math.isfinite(step())
        ptdbg_ascend.set_dump_switch("OFF")
    assert any("cannot record into" in str(warning.message) for warning in caught)


def test_everything_patched_is_put_back(tmp_path: Path) -> None:
    before = dict(vars(torch.Tensor)), torch.nn.Module.__call__, torch.distributed.all_reduce
    dump(tmp_path)
    assert (dict(vars(torch.Tensor)), torch.nn.Module.__call__, torch.distributed.all_reduce) == before


def test_recomputed_calls_are_not_dumped_twice(tmp_path: Path) -> None:
    def program() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        torch.utils.checkpoint.checkpoint(Net(), x, use_reentrant=False).sum().backward()

    found = names(dump(tmp_path, program) / "dump.pkl")
    assert len(found) == len(set(found))
    assert any("backward" in name for name in found)


@given(st.sampled_from(["Tensor", "functional", "torch", "distributed", "npu", "aten"]), st.from_regex(r"[a-z_]{1,20}", fullmatch=True))
def test_names_are_file_names_and_can_be_told_apart(namespace: str, name: str) -> None:
    old = api_name(f"{namespace}.{name}")
    assert old is not None
    assert old.rpartition("/")[2] == old
    assert old.endswith(f"_{name}")


def test_a_hostile_name_stays_inside_the_folder() -> None:
    assert api_name("mylib./../../etc.pass wd<b>") == "Torch_mylib________etc_pass_wd_b_"


def test_comparing_alone_loads_no_torch_and_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, "import sys\nfrom ptdbg_ascend import compare, parse\nassert 'torch' not in sys.modules")


def test_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="seed_all wants"):
        ptdbg_ascend.seed_all(-1)


@pytest.mark.promise("P130", "P131")
@pytest.mark.parametrize(("mode", "stem", "stacks"), [("all", "dump", "False"), ("api_stack", "api_stack_dump", "True")])
def test_a_template_for_the_comparison_is_left(tmp_path: Path, mode: str, stem: str, stacks: str) -> None:
    folder = dump(tmp_path, mode=mode)
    text = (folder / "compare_data.py").read_text()
    assert f"pkl_path = {str(folder / stem) + '.pkl'!r}" in text
    assert f"dump_data_dir = {str(folder / stem)!r}" in text
    for field in ("npu_pkl_path", "bench_pkl_path", "npu_dump_data_dir", "bench_dump_data_dir"):
        assert f'"{field}": ,' in text
    assert '"is_print_compare_log": True' in text
    assert f'compare(dump_path_param, output_path="", stack_mode={stacks})' in text
    with pytest.raises(SyntaxError):
        compile(text, "compare_data.py", "exec")
    filled = text.replace('_pkl_path": ,', '_pkl_path": pkl_path,').replace('_dump_data_dir": ,', '_dump_data_dir": dump_data_dir,')
    compile(filled, "compare_data.py", "exec")


def test_no_template_where_there_are_no_tensors_to_compare(tmp_path: Path) -> None:
    assert files(dump(tmp_path, mode="stack")) == ["stack_dump.pkl"]


@pytest.mark.promise("P074", "P121")
def test_the_environment_names_the_folder_where_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ptdbg_ascend.CompareException, match="ASCEND_WORK_PATH"):
        ptdbg_ascend.set_dump_path()
    monkeypatch.setenv("ASCEND_WORK_PATH", str(tmp_path))
    ptdbg_ascend.register_hook(None, ptdbg_ascend.acc_cmp_dump)
    ptdbg_ascend.set_dump_switch("ON")
    step()
    ptdbg_ascend.set_dump_switch("OFF")
    assert (rank_folder(tmp_path / "dump_data") / "dump.pkl").stat().st_size
    kept = dump(tmp_path / "given")
    assert (kept / "dump.pkl").stat().st_size


@pytest.mark.parametrize("tag", ["../x", "a/b", "", "..", 3])
def test_a_tag_is_a_plain_name(tmp_path: Path, tag: Any) -> None:
    with pytest.raises(ptdbg_ascend.CompareException, match="dump_tag") as caught:
        ptdbg_ascend.set_dump_path(str(tmp_path), dump_tag=tag)
    assert caught.value.code == 11


def test_a_file_is_no_folder_to_dump_into(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ptdbg_ascend.CompareException, match="is a file") as caught:
        ptdbg_ascend.set_dump_path(str(tmp_path / "file" / "below"))
    assert caught.value.code == 1


def test_the_lines_are_json_that_reads_back(tmp_path: Path) -> None:
    text = (dump(tmp_path, mode="api_stack") / "api_stack_dump.pkl").read_text()
    assert text.endswith("\n")
    for line in text.splitlines():
        assert json.loads(json.dumps(json.loads(line))) == json.loads(line)
