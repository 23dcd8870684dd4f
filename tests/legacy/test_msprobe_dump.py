# SPDX-License-Identifier: Apache-2.0
"""Test dumps of msprobe through its old name: the tree, the names, the chosen calls and the written files."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ulpscope
from msprobe.pytorch import PrecisionDebugger, module_dump, module_dump_end, register_custom_api, restore_custom_api
from tests.legacy.msprobe_programs import Net, X, dump, entries, load, read, same, tensor_files, training_step, write_config
from ulpscope.errors import InputError

API_NAMES = [
    "Functional.linear.0.forward", "Torch.relu.0.forward", "Functional.linear.1.forward", "Tensor.__add__.0.forward",
    "Functional.linear.2.forward", "Functional.cross_entropy.0.forward", "Functional.cross_entropy.0.backward",
    "Functional.linear.2.backward", "Tensor.__add__.0.backward", "Functional.linear.1.backward", "Torch.relu.0.backward",
    "Functional.linear.0.backward",
]  # fmt: skip


@pytest.mark.promise("E01", "E16", "E17")
def test_a_tensor_dump_has_the_tree_of_the_guide(tmp_path: Path) -> None:
    folder = dump(tmp_path, "tensor")
    rank = folder / "step0" / "rank"
    assert sorted(path.name for path in rank.iterdir()) == ["construct.json", "dump.json", "dump_tensor_data", "stack.json"]
    header = read(folder)
    assert (header["task"], header["level"], header["dump_data_dir"]) == ("tensor", "L1", str(rank / "dump_tensor_data"))
    assert list(header["data"]) == API_NAMES
    assert list(read(folder, "stack")) == [name for name in API_NAMES if name.endswith("forward")]
    linear = header["data"]["Functional.linear.0.forward"]
    assert [part["data_name"] for part in linear["input_args"]] == [f"Functional.linear.0.forward.input.{at}.pt" for at in range(3)]
    x = load(folder, "Functional.linear.0.forward.input.0.pt")
    torch.manual_seed(0)
    model = Net()
    assert torch.equal(x, X)
    assert torch.equal(load(folder, linear["input_args"][1]["data_name"]), model.block.fc1.weight)
    assert linear["input_args"][0] == {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4], "Max": 1.0, "Min": -1.0, "Mean": pytest.approx(0, abs=1e-7),
        "Norm": pytest.approx(float(x.norm())), "requires_grad": False, "data_name": "Functional.linear.0.forward.input.0.pt",
    }  # fmt: skip


def test_the_gradients_of_a_call_are_its_own(tmp_path: Path) -> None:
    folder = dump(tmp_path, "tensor")
    torch.manual_seed(0)
    model = Net()
    training_step(model)
    backward = entries(folder)["Functional.linear.2.backward"]
    assert [part["shape"] for part in backward["output"]] == [[2, 4], [3, 4], [3]]
    assert torch.equal(load(folder, "Functional.linear.2.backward.output.1.pt"), model.head.weight.grad)


@pytest.mark.promise("E01")
def test_a_statistics_dump_has_no_tensors(tmp_path: Path) -> None:
    folder = dump(tmp_path, "statistics", {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"})
    assert list(entries(folder)) == API_NAMES
    assert not (folder / "step0" / "rank" / "dump_tensor_data").exists()
    assert read(folder)["dump_data_dir"] is None
    assert read(folder, "construct") == {}


@pytest.mark.promise("E03")
def test_levels(tmp_path: Path) -> None:
    found = {}
    for level in ("L0", "L1", "mix"):
        (tmp_path / level).mkdir()
        found[level] = dump(tmp_path / level, level=level)
    modules = [name for name in entries(found["L0"]) if "forward" in name]
    assert modules == [
        "Module.block.fc1.Linear.forward.0", "Module.block.fc2.Linear.forward.0", "Module.block.Block.forward.0",
        "Module.head.Linear.forward.0",
    ]  # fmt: skip
    assert set(entries(found["L0"])) | set(API_NAMES) == set(entries(found["mix"]))
    head = entries(found["L0"])["Module.head.Linear.forward.0"]
    assert {name: leaf["shape"] for name, leaf in head["parameters"].items()} == {"weight": [3, 4], "bias": [3]}
    construct = read(found["mix"], "construct")
    assert construct["Torch.relu.0.forward"] == "Module.block.Block.forward.0"
    assert construct["Functional.linear.0.backward"] == "Module.block.fc1.Linear.backward.0"
    assert construct["Module.block.fc1.Linear.forward.0"] == "Module.block.Block.forward.0"
    assert construct["Module.head.Linear.forward.0"] is None


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_levels_with_modules_want_the_model(tmp_path: Path, level: str) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, level=level))
    with pytest.raises(InputError, match=r"wants the model: write debugger.start\(model\)"):
        debugger.start()


@pytest.mark.promise("E02", "E39")
@pytest.mark.parametrize(("steps", "expected"), [([1], [1]), (["0-1", 3], [0, 1, 3]), (["2"], [2]), ([], [0, 1, 2, 3])])
def test_steps_are_chosen(tmp_path: Path, steps: list[Any], expected: list[int]) -> None:
    folder = dump(tmp_path, steps=4, step=steps)
    assert sorted(path.name for path in folder.iterdir()) == [f"step{step}" for step in expected]
    assert list(entries(folder, step=expected[-1])) == API_NAMES


@pytest.mark.promise("E02")
@pytest.mark.parametrize(("ranks", "is_written"), [([0], True), ([1, "3-5"], False)])
def test_ranks_are_chosen(tmp_path: Path, ranks: list[Any], is_written: bool) -> None:
    assert dump(tmp_path, rank=ranks).exists() == is_written


@pytest.mark.promise("E08")
@pytest.mark.parametrize(
    ("level", "block", "expected"),
    [
        ("L1", {"list": ["relu"]}, ["Torch.relu.0.forward", "Torch.relu.0.backward"]),
        ("L1", {"list": ["linear.2.forward", "relu.0.backward"]}, ["Functional.linear.2.forward", "Torch.relu.0.backward"]),
        ("L1", {"scope": ["Torch.relu.0.forward", "Tensor.__add__.0.forward"]}, API_NAMES[1:4]),
        ("L1", {"scope": ["Functional.linear.2.forward", "Tensor.__add__.0.backward"]}, API_NAMES[4:9]),
        ("L1", {"scope": ["Torch.relu.0.forward", "Tensor.__add__.0.forward"], "list": ["linear"]}, ["Functional.linear.1.forward"]),
        ("L1", {"scope": ["Tensor.__add__.0.backward", "Torch.relu.0.backward"]}, API_NAMES[8:11]),
        (
            "L0",
            {"scope": ["Module.block.fc2.Linear.forward.0", "Module.head.Linear.forward.0"]},
            ["Module.block.fc2.Linear.forward.0", "Module.head.Linear.forward.0"],
        ),
        (
            "mix",
            {"list": ["Module.block.fc1.Linear.forward"]},
            ["Functional.linear.0.forward", "Module.block.fc1.Linear.forward.0"],
        ),
        (
            "mix",
            {"list": ["block.Block"]},
            [
                "Functional.linear.0.forward", "Module.block.fc1.Linear.forward.0", "Torch.relu.0.forward", "Functional.linear.1.forward",
                "Module.block.fc2.Linear.forward.0", "Module.block.Block.forward.0", "Functional.linear.1.backward",
                "Module.block.fc2.Linear.parameters_grad", "Module.block.fc2.Linear.backward.0", "Torch.relu.0.backward",
                "Functional.linear.0.backward", "Module.block.fc1.Linear.parameters_grad", "Module.block.fc1.Linear.backward.0",
                "Module.block.Block.backward.0",
            ],
        ),
        (
            "mix",
            {"scope": ["Module.block.fc1.Linear.forward.0", "Module.block.fc1.Linear.forward.0"]},
            ["Functional.linear.0.forward", "Module.block.fc1.Linear.forward.0"],
        ),
    ],
)  # fmt: skip
def test_scope_and_list(tmp_path: Path, level: str, block: dict[str, Any], expected: list[str]) -> None:
    found = list(entries(dump(tmp_path, "statistics", block, level=level)))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    ("level", "name"),
    [("L1", "relu"), ("L1", "Module.block.Block.forward.0"), ("L0", "Torch.relu.0.forward"), ("mix", "Torch.relu.forward")],
)
def test_a_scope_holds_full_names_of_its_level(tmp_path: Path, level: str, name: str) -> None:
    debugger = PrecisionDebugger(config_path=write_config(tmp_path, block={"scope": [name, name]}, level=level))
    with pytest.raises(InputError, match=f"scope holds '{name}', no full name of level {level}"):
        debugger.start(Net())


@pytest.mark.promise("E09")
@pytest.mark.parametrize(
    ("data_mode", "expected"),
    [
        (["all"], {"forward": ["input_args", "input_kwargs", "output"], "backward": ["input", "output"]}),
        (["forward"], {"forward": ["input_args", "input_kwargs", "output"]}),
        (["backward"], {"backward": ["input", "output"]}),
        (["input"], {"forward": ["input_args", "input_kwargs"], "backward": ["input"]}),
        (["forward", "output"], {"forward": ["output"]}),
    ],
)
def test_data_mode(tmp_path: Path, data_mode: list[str], expected: dict[str, list[str]]) -> None:
    found = entries(dump(tmp_path, "statistics", {"data_mode": data_mode}))
    assert {name.rpartition(".")[2] for name in found} == set(expected)
    assert all(list(entry) == expected[name.rpartition(".")[2]] for name, entry in found.items())


@pytest.mark.promise("E10")
def test_md5_is_the_checksum_of_the_old_tool(tmp_path: Path) -> None:
    found = entries(dump(tmp_path, "statistics", {"summary_mode": "md5"}))
    assert found["Functional.linear.0.forward"]["input_args"][0]["md5"] == f"{zlib.crc32(X.numpy().tobytes()):08x}"
    assert "data_name" not in found["Functional.linear.0.forward"]["input_args"][0]
    plain = entries(dump(_made(tmp_path / "plain"), "statistics", {"summary_mode": "statistics"}))
    assert "md5" not in plain["Functional.linear.0.forward"]["input_args"][0]


@pytest.mark.promise("E39")
def test_xor_folds_the_bytes(tmp_path: Path) -> None:
    found = entries(dump(tmp_path, "tensor", {"summary_mode": "xor"}))
    words = X.flatten().numpy().view(np.uint64)
    leaf = found["Functional.linear.0.forward"]["input_args"][0]
    assert leaf["md5"] == f"0x{int(np.bitwise_xor.reduce(words)):016x}"
    assert leaf["data_name"] in tensor_files(tmp_path / "dump")


@pytest.mark.promise("E39")
def test_tensor_list_keeps_the_values_of_some_calls(tmp_path: Path) -> None:
    folder = dump(tmp_path, "statistics", {"tensor_list": ["relu"]}, async_dump=True)
    assert list(entries(folder)) == API_NAMES
    assert tensor_files(folder) == [
        f"Torch.relu.0.{part}.pt" for part in ("backward.input.0", "backward.output.0", "forward.input.0", "forward.output.0")
    ]


@pytest.mark.promise("E13")
@pytest.mark.parametrize(
    ("task", "block", "expected"),
    [
        ("run_ut", {}, {"linear", "relu", "__add__", "cross_entropy"}),
        ("run_ut", {"white_list": ["relu", "linear"], "black_list": []}, {"relu", "linear"}),
        ("acc_check", {"white_list": [], "black_list": ["linear"]}, {"relu", "__add__", "cross_entropy"}),
        ("acc_check", {"white_list": ["relu", "linear"], "black_list": ["linear"]}, {"relu"}),
    ],
)
def test_the_dump_for_the_pre_check(tmp_path: Path, task: str, block: dict[str, Any], expected: set[str]) -> None:
    folder = dump(tmp_path, task, block)
    assert {name.split(".")[1] for name in entries(folder)} == expected
    assert read(folder)["task"] == task


@pytest.mark.promise("E34")
def test_structure_has_names_alone(tmp_path: Path) -> None:
    folder = dump(tmp_path, "structure")
    assert entries(folder) == {}
    assert read(folder, "construct")["Torch.relu.0.forward"] == "Module.block.Block.forward.0"
    stack = read(folder, "stack")["Torch.relu.0.forward"]
    assert "in forward" in stack[0].replace("Block.", "")
    assert "self.fc2(torch.relu(self.fc1(x)))" in stack[0]


@pytest.mark.promise("E36")
def test_the_tree_of_26(tmp_path: Path) -> None:
    folder = dump(tmp_path, "tensor", layout="26.x", level="mix")
    rank = f"proc{os.getpid()}"
    assert [path.name for path in (folder / "step0").iterdir()] == [rank]
    stacks = read(folder, "stack", rank=rank)
    assert [names for names, _ in stacks.values() if "Functional.linear.1.forward" in names]
    assert len(stacks) < sum(len(names) for names, _ in stacks.values())
    frame = next(frames[0] for names, frames in stacks.values() if "Torch.relu.0.forward" in names)
    assert frame.startswith("File ")
    gradients = entries(folder, rank=rank)["Module.head.Linear.parameters_grad.0"]
    assert gradients["weight"][0]["data_name"] == "Module.head.Linear.parameters_grad.0.weight.pt"
    assert (folder / "step0" / rank / "dump_tensor_data" / "Module.head.Linear.parameters_grad.0.weight.pt").exists()


@pytest.mark.promise("E36")
def test_the_layout_is_chosen_by_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULPSCOPE_MSPROBE_LAYOUT", "1.x")
    folder = dump(tmp_path, layout=None)  # type: ignore[arg-type]
    assert [path.name for path in (folder / "step0").iterdir()] == ["rank"]
    with pytest.raises(InputError, match=r"layout is '2\.x'; it may be '1\.x' or '26\.x'"):
        PrecisionDebugger(config_path=write_config(tmp_path), layout="2.x")


@pytest.mark.promise("E37")
@pytest.mark.parametrize("layout", ["1.x", "26.x"])
def test_a_module_as_one_unit(tmp_path: Path, layout: str) -> None:
    def program(model: torch.nn.Module) -> None:
        X.abs()
        module_dump(model.block, "MyBlock")
        training_step(model)
        module_dump_end()
        X.neg()

    folder = dump(tmp_path, "tensor", program=program, layout=layout)
    rank = next((folder / "step0").iterdir()).name
    found = [name for name in entries(folder, rank=rank) if "parameters_grad" not in name]
    assert found == ["Tensor.abs.0.forward", "Module.MyBlock.Block.forward.0", "Module.MyBlock.Block.backward.0", "Tensor.neg.0.forward"]


def test_module_dump_refuses_what_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no PrecisionDebugger was made yet"):
        module_dump(Net(), "Net")
    PrecisionDebugger(config_path=write_config(tmp_path))
    with pytest.raises(InputError, match=r"takes an instance of torch\.nn\.Module"):
        module_dump(Net, "Net")
    with pytest.raises(InputError, match="becomes part of file names"):
        module_dump(Net(), "../net")
    with pytest.raises(InputError, match=r"comes after debugger.start\(\)"):
        module_dump(Net(), "Net")


class Ops:
    """Functions of the script's own."""

    @staticmethod
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.add(x).mul(1.0)


@pytest.mark.promise("E38")
def test_a_function_of_ones_own(tmp_path: Path) -> None:
    original, leaf = Ops.__dict__["twice"], torch.ones(2, requires_grad=True)
    register_custom_api(Ops, "twice", "MyOps")
    folder = dump(tmp_path, "tensor", program=lambda model: Ops.twice(leaf).sum().backward())
    assert list(entries(folder)) == [
        "MyOps.twice.0.forward", "Tensor.sum.0.forward", "Tensor.sum.0.backward", "MyOps.twice.0.backward"
    ]  # fmt: skip
    assert torch.equal(load(folder, "MyOps.twice.0.forward.output.0.pt"), torch.full((2,), 2.0))
    assert Ops.__dict__["twice"] is original
    register_custom_api(Ops, "twice", "MyOps")
    restore_custom_api(Ops, "twice")
    plain = dump(_made(tmp_path / "plain"), program=lambda model: Ops.twice(X))
    assert list(entries(plain)) == ["Tensor.add.0.forward", "Tensor.mul.0.forward"]
    with pytest.raises(InputError, match="has no function 'thrice'"):
        register_custom_api(Ops, "thrice")


def test_values_that_are_no_plain_tensors(tmp_path: Path) -> None:
    def program(model: torch.nn.Module) -> None:
        x = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])
        x.to(torch.float16)
        x[0, ..., None]
        torch.zeros(0).abs()
        torch.tensor([True, False]).logical_not()
        torch.arange(3).sum()
        torch.split(torch.ones(4), [1, 3])

        torch.ones(2, dtype=torch.complex64).conj()

    folder = dump(tmp_path, program=program, layout="26.x")
    found = entries(folder, rank=f"proc{os.getpid()}")
    to = found["Tensor.to.0.forward"]["input_args"]
    assert to[0]["Max"] != to[0]["Max"]  # NaN
    assert to[1] == {"type": "torch.dtype", "value": "torch.float16"}
    assert found["Tensor.__getitem__.0.forward"]["input_args"][1] == [
        {"type": "int", "value": 0}, {"type": "ellipsis", "value": "..."}, None
    ]  # fmt: skip
    assert found["Tensor.abs.0.forward"]["output"][0]["Max"] is None
    boolean = found["Tensor.logical_not.0.forward"]["input_args"][0]
    assert (boolean["Max"], boolean["Min"], boolean["Mean"]) == (True, False, None)
    assert found["Tensor.sum.0.forward"]["input_args"][0] == {
        "type": "torch.Tensor", "dtype": "torch.int64", "shape": [3], "Max": 2, "Min": 0, "Mean": None, "Norm": None, "requires_grad": False
    }  # fmt: skip
    assert found["Tensor.conj.0.forward"]["input_args"][0]["Max"] is None
    assert [leaf["shape"] for leaf in found["Torch.split.0.forward"]["output"]] == [[1], [3]]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_nothing_changes(tmp_path: Path, level: str) -> None:
    def train(model: torch.nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        loss = training_step(model, torch.randn(2, 4))
        optimizer.step()
        return [loss.detach(), *(parameter.detach().clone() for parameter in model.parameters()), torch.get_rng_state()]

    torch.manual_seed(0)
    plain = train(Net())
    found: list[torch.Tensor] = []
    originals = (torch.Tensor.__add__, torch.nn.Module.__call__, F.linear)
    dump(tmp_path, "tensor", level=level, program=lambda model: found.extend(train(model)))
    assert same(plain, found)
    assert originals == (torch.Tensor.__add__, torch.nn.Module.__call__, F.linear)


@pytest.mark.parametrize("layout", ["1.x", "26.x"])
def test_our_own_readers_open_it(tmp_path: Path, layout: str) -> None:
    folder = dump(tmp_path, "tensor", layout=layout, level="mix", steps=2)
    run = ulpscope.open_run(folder)
    assert (run.ranks(), run.steps(0)) == ((0,), (0, 1))
    records = list(run.records(0, 0))
    assert {str(record.call) for record in records} >= {"functional.linear.0", "torch.relu.0", "Tensor.add.0"}
    linear = next(record for record in records if str(record.call) == "functional.linear.0" and record.phase == "forward")
    content = next(slot.content for slot in linear.slots if str(slot.slot) == "input.0")
    assert run.tensor(0, 0, content).shape == (2, 4)
    assert ulpscope.compare_runs(folder, folder).verdict == "same"


def test_dump_json_is_whole_at_every_moment(tmp_path: Path) -> None:
    seen: list[int] = []

    def program(model: torch.nn.Module) -> None:
        X.abs()
        seen.append(len(entries(tmp_path / "dump")))
        X.neg()
        seen.append(len(json.loads((tmp_path / "dump/step0/rank/stack.json").read_text())))

    dump(tmp_path, program=program)
    assert seen[0] == 1
    assert seen[1] == 2


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
