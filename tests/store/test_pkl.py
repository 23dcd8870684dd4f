# SPDX-License-Identifier: Apache-2.0
"""Dumps of ptdbg. They are synthetic, written here from the documented format: no version of the tool can be installed."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.model import CallRecord, Frame
from ulpscope.store.foreign.ptdbg import open_dump, recognize
from ulpscope.store.foreign.reader import ForeignRun

FLOAT = "torch.float32"


def tensor_line(name: str, array: np.ndarray[Any, Any], *, md5: Any = (), norm: bool = True, kind: str = FLOAT) -> list[Any]:
    stats = [float(array.max()), float(array.min()), float(array.mean())] + ([float(np.linalg.norm(array))] if norm else [])
    return [name, 0, list(md5) if not isinstance(md5, str) else md5, kind, list(array.shape), stats]


def scalar_line(name: str, value: float) -> list[Any]:
    return [name, 0, [], f"<class '{type(value).__name__}'>", "[]", [value] * 3]


def write_dump(
    folder: Path, lines: list[Any], arrays: dict[str, np.ndarray[Any, Any]] | None = None, *, stem: str = "api_stack_dump"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.pkl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if arrays is not None:
        (folder / stem).mkdir()
        for name, array in arrays.items():
            np.save(folder / stem / f"{name}.npy", array)
    return folder


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Write a dump of linear, x + 1 and its mirror, split and softmax with a keyword, forward and partly backward."""
    x = np.arange(6, dtype="f4").reshape(3, 2)
    arrays = {
        "Functional_linear_0_forward_input.0": x,
        "Functional_linear_0_forward_input.1": x + 1,
        "Functional_linear_0_forward_output": np.ones((3, 3), "f4"),
        "Functional_linear_0_backward_input.0": np.ones((3, 3), "f4"),
        "Functional_linear_0_backward_output.1": x,
    }
    lines: list[Any] = [tensor_line(name, array) for name, array in arrays.items() if "forward" in name]
    frames = [
        ["/env/site-packages/torch/nn/modules/linear.py", "125", "forward", "return F.linear(input, self.weight, self.bias)"],
        ["/project/train.py", "12", "forward", "y = self.fc(x)"],
        ["/project/train.py", "30", "<module>", None],
    ]
    lines += [
        ["Functional_linear_0_forward_stack_info", frames],
        tensor_line("Tensor___add___0_forward_input.0", x),
        scalar_line("Tensor___add___0_forward_input.1", 1),
        tensor_line("Tensor___add___0_forward_output", x + 1),
        tensor_line("Tensor___radd___0_forward_output", x + 1, norm=False),
        tensor_line("Tensor_add__0_forward_output", x + 1),
        tensor_line("Torch_split_0_forward_input.0", x),
        scalar_line("Torch_split_0_forward_input.2", 0.5),
        tensor_line("Torch_split_0_forward_output.0", x[:1]),
        tensor_line("Torch_split_0_forward_output.1", x[1:]),
        tensor_line("Functional_softmax_0_forward_input.0", x),
        tensor_line("Functional_softmax_0_forward_output", x),
        tensor_line("Functional_softmax_0_backward_input.0", x),
        tensor_line("Functional_softmax_0_backward_output.0", x),
        *(tensor_line(name, array) for name, array in arrays.items() if "backward" in name),
        tensor_line("Module_Linear_0_forward_input.0", x),
        tensor_line("Aten_convolution.default_1_forward_output", x),
    ]
    write_dump(tmp_path / "ptdbg_dump_v4.0" / "step2" / "rank0", lines, arrays)
    return tmp_path


def calls_of(run: ForeignRun, step: int = 0) -> dict[tuple[str, str], CallRecord]:
    return {(str(record.call), record.phase): record for record in run.records(0, step)}


@pytest.mark.parametrize(
    "below",
    [".", "ptdbg_dump_v4.0", "ptdbg_dump_v4.0/step2", "ptdbg_dump_v4.0/step2/rank0", "ptdbg_dump_v4.0/step2/rank0/api_stack_dump.pkl"],
)
def test_any_level_of_the_tree_opens(dump: Path, below: str) -> None:
    assert recognize(dump / below)
    run = open_dump(dump / below)
    assert (run.ranks(), run.steps(0), run.ledger(0), run.is_complete(0, 2)) == ((0,), (2,), (), True)
    assert len(calls_of(run, 2)) == 10


def test_names_become_ours(dump: Path) -> None:
    records = list(open_dump(dump).records(0, 2))
    assert [(str(record.call), record.phase, record.order) for record in records] == [
        ("functional.linear.0", "forward", 0),
        ("Tensor.add.0", "forward", 1),
        ("Tensor.add.1", "forward", 2),
        ("Tensor.add_.0", "forward", 3),
        ("torch.split.0", "forward", 4),
        ("functional.softmax.0", "forward", 5),
        ("functional.softmax.0", "backward", 6),
        ("functional.linear.0", "backward", 7),
        ("module.Linear.0", "forward", 8),
        ("aten.convolution.default.1", "forward", 9),
    ]
    assert records[8].level == "module"


def test_slots_arguments_and_stacks(dump: Path) -> None:
    calls = calls_of(open_dump(dump), 2)
    linear = calls["functional.linear.0", "forward"]
    assert [str(slot.slot) for slot in linear.slots] == ["input.0", "input.1", "output.0"]
    assert linear.stack == (Frame("/project/train.py", 12, "forward", "y = self.fc(x)"), Frame("/project/train.py", 30, "<module>", ""))
    assert [str(slot.slot) for slot in calls["torch.split.0", "forward"].slots] == ["input.0", "output.0", "output.1"]
    split = calls["torch.split.0", "forward"].arguments
    assert split is not None
    assert split.args == ({"$tensor": "input.0"}, {"$object": "unknown", "repr": "not recorded by the tool"}, 0.5)
    added = calls["Tensor.add.0", "forward"].arguments
    assert added is not None
    assert added.args == ({"$tensor": "input.0"}, 1)


def test_backward_gradients(dump: Path) -> None:
    calls = calls_of(open_dump(dump), 2)
    assert [str(slot.slot) for slot in calls["functional.softmax.0", "backward"].slots] == ["input.0", "output.0"]
    linear = calls["functional.linear.0", "backward"]
    assert [str(slot.slot) for slot in linear.slots] == ["input.0", "output.1.node"]
    assert linear.source == Frame("/project/train.py", 12, "forward", "y = self.fc(x)")
    assert linear.arguments is None


def test_statistics_and_tensors(dump: Path) -> None:
    run = open_dump(dump)
    slot = calls_of(run, 2)["functional.linear.0", "forward"].slots[0]
    assert slot.summary is not None
    assert (slot.summary.min, slot.summary.max, slot.summary.mean) == (0.0, 5.0, 2.5)
    assert slot.summary.rms == pytest.approx(math.sqrt(55 / 6))
    assert slot.content == "Functional_linear_0_forward_input.0.npy"
    data = run.tensor(0, 2, slot.content)
    assert (data.dtype, data.shape) == ("float32", (3, 2))
    assert bytes(data.buffer) == np.arange(6, dtype="<f4").tobytes()
    short = calls_of(run, 2)["Tensor.add.1", "forward"].slots[0]
    assert short.summary is not None
    assert (short.summary.max, short.summary.rms, short.content) == (6.0, None, None)


def test_published_record_of_one_forward(tmp_path: Path) -> None:
    """The shape of a record that exists in public: inner calls before outer ones, step flag 1, three statistics."""
    stats = [0.8278868794441223, -0.8729169964790344, 0.0]
    names = [
        "Functional_linear_0_forward_input.0",
        "Functional_linear_0_forward_output",
        "Torch_relu_0_forward_output",
        "Functional_relu_0_forward_output",
    ]
    lines = [[name, 1, [], FLOAT, [3, 3], stats] for name in names]
    records = list(open_dump(write_dump(tmp_path, lines, stem="dump")).records(0, 0))
    assert [str(record.call) for record in records] == ["functional.linear.0", "torch.relu.0", "functional.relu.0"]
    assert records[0].slots[1].summary is not None
    assert records[0].slots[1].summary.max == 0.8278868794441223


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([math.nan, math.nan, math.nan, math.nan], FLOAT, {"num_nan": 1, "max": None}),
        ([math.inf, 0.0, math.inf, math.inf], FLOAT, {"num_posinf": 1, "max": math.inf, "rms": None}),
        ([[], [], [], "Nan"], "torch.bool", {"max": None, "rms": None}),
        ([3.0, 1.0, 2.0, "Nan"], "torch.int64", {"max": 3.0, "rms": None}),
        ([], FLOAT, {"max": None}),
        (None, FLOAT, {"max": None}),
    ],
)
def test_odd_statistics(tmp_path: Path, values: Any, kind: str, expected: dict[str, Any]) -> None:
    run = open_dump(write_dump(tmp_path, [["Torch_relu_0_forward_output", 0, [], kind, [3], values]], stem="dump"))
    taken = next(run.records(0, 0)).slots[0].summary
    assert {name: getattr(taken, name) for name in expected} == expected


def test_checksums(tmp_path: Path) -> None:
    run = open_dump(write_dump(tmp_path, [["Torch_relu_0_forward_output", 0, "0a1b2c3d", FLOAT, [3], []]]))
    assert next(run.records(0, 0)).slots[0].fingerprint == "crc32:0a1b2c3d"


def test_nested_inputs_keep_their_place(tmp_path: Path) -> None:
    x = np.ones(2, "f4")
    lines = [
        tensor_line("Torch_cat_0_forward_input.0.1", x),
        tensor_line("Torch_cat_0_forward_input.0.0", x),
        scalar_line("Torch_cat_0_forward_input.1", True),
    ]
    record = next(open_dump(write_dump(tmp_path, lines)).records(0, 0))
    assert record.arguments is not None
    assert record.arguments.args == ([{"$tensor": "input.0.0"}, {"$tensor": "input.0.1"}], True)


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["rank0", "rank1"], {0: (0,), 1: (0,)}),
        (["rank16342"], {0: (0,)}),  # a process id
        (["step0/rank3", "step1/rank3"], {3: (0, 1)}),
        (["step4/ptdbg_dump_v2.0/rank0"], {0: (4,)}),
        (["mytag_v3.2/rank0"], {0: (0,)}),
    ],
)
def test_trees(tmp_path: Path, folders: list[str], expected: dict[int, tuple[int, ...]]) -> None:
    for folder in folders:
        write_dump(tmp_path / folder, [["Torch_relu_0_forward_output", 0, [], FLOAT, [3], []]], stem="dump")
    run = open_dump(tmp_path)
    assert {rank: run.steps(rank) for rank in run.ranks()} == expected


@pytest.mark.parametrize("folders", [["rank0/a", "rank0/b"], ["ptdbg_dump_v1/rank0/a", "ptdbg_dump_v2/rank0/a"]])
def test_several_dumps_in_one_place_are_not_guessed_at(tmp_path: Path, folders: list[str]) -> None:
    for place in folders:
        folder, _, mode = place.rpartition("/")
        write_dump(tmp_path / folder, [["Torch_relu_0_forward_output", 0, [], FLOAT, [3], []]], stem=f"{mode}_dump")
    with pytest.raises(InputError, match="holds several dumps of one rank and step"):
        open_dump(tmp_path)


# --- what goes wrong


class Bomb:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_true_pickle_is_refused(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps(Bomb(), protocol))
    assert recognize(tmp_path / "dump.pkl")
    with pytest.raises(DamagedRunError, match="if it is a true pickle, it is not loaded, since that would run the code inside"):
        list(open_dump(tmp_path).records(0, 0))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not the text that ptdbg writes"),
        ('["Torch_relu_0_forward_output", 0, [], "torch.float32", [3], []]\nnonsense\n["a", 1]\n', "is not a JSON array in line 2"),
        ('[1]\n{"a": 1}\n', "is not a JSON array in line 2"),
        ("[" * 100_000 + "\n", "is not a JSON array in line 1"),
        ('["Torch_relu_0_forward_output", 0]\n', "has 2 values for 'Torch_relu_0_forward_output', six are needed"),
        ('["Torch_relu_0_forward_output", 0, [], "torch.float32", [-3], []]\n', r"the shape \[-3\], which is none"),
        ('["Torch_relu_0_forward_output", 0, [], "torch.float32", "[]", []]\n', r"the shape \[\], which is none"),
    ],
)
def test_broken_text_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "dump.pkl").write_text(text)
    with pytest.raises(DamagedRunError, match=sentence) as caught:
        list(open_dump(tmp_path).records(0, 0))
    assert str(tmp_path / "dump.pkl") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_cut_short_costs_only_itself(dump: Path) -> None:
    (file,) = dump.rglob("*.pkl")
    whole = len(calls_of(open_dump(dump), 2))
    file.write_bytes(file.read_bytes()[:-40])
    run = open_dump(dump)
    assert len(calls_of(run, 2)) == whole - 1
    assert not run.is_complete(0, 2)
    assert [entry.why for entry in run.ledger(0)] == ["it was not written to its end"]


@pytest.mark.parametrize(
    "name", ["no_name_at_all", "Torch_relu_forward_output", "Torch_relu_0_forward_input.99999999999", "Torch_relu_0_sideways_input.0", 7]
)
def test_lines_that_name_nothing_go_to_the_ledger(tmp_path: Path, name: Any) -> None:
    run = open_dump(write_dump(tmp_path, [[name, 0, [], FLOAT, [3], []], ["Torch_relu_0_forward_output", 0, [], FLOAT, [3], []]]))
    assert [str(record.call) for record in run.records(0, 0)] == ["torch.relu.0"]
    assert [entry.what for entry in run.ledger(0)] == ["reading line 1 of api_stack_dump.pkl"]


@pytest.mark.parametrize("stack", [3, ["x"], [["file", "line", "f", None]], [[1, 2]]])
def test_odd_stacks_are_left_out(tmp_path: Path, stack: Any) -> None:
    lines = [["Torch_relu_0_forward_output", 0, [], FLOAT, [3], []], ["Torch_relu_0_forward_stack_info", stack]]
    assert next(open_dump(write_dump(tmp_path, lines)).records(0, 0)).stack == ()


@pytest.mark.parametrize("name", ["../secret", "Torch_relu_0_forward_output/../../secret"])
def test_names_that_climb_out_are_not_opened(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "secret.npy", np.zeros(3, "f4"))
    run = open_dump(write_dump(tmp_path / "rank0", [["Torch_relu_0_forward_output", 0, [], FLOAT, [3], []]], {}))
    assert [slot.content for record in run.records(0, 0) for slot in record.slots] == [None]
    with pytest.raises(DamagedRunError, match="keeps no tensor named"):
        run.tensor(0, 0, f"{name}.npy")


def test_a_tensor_of_another_shape_is_one_sentence(dump: Path) -> None:
    file = dump / "ptdbg_dump_v4.0" / "step2" / "rank0" / "api_stack_dump" / "Functional_linear_0_forward_output.npy"
    np.save(file, np.zeros((2, 2), "f4"))
    with pytest.raises(DamagedRunError, match=r"shape \[2, 2\], but its dump says \[3, 3\]"):
        open_dump(dump).tensor(0, 2, file.name)


def test_what_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "weights.pkl").write_bytes(pickle.dumps({"a": 1}))
    assert not recognize(tmp_path / "weights.pkl")
    assert not recognize(tmp_path)
    assert not recognize(tmp_path / "missing")
    with pytest.raises(NotARunError, match=r"holds no \*dump\.pkl"):
        open_dump(tmp_path)
