# SPDX-License-Identifier: Apache-2.0
"""Recordings of api_accuracy_checker: both styles of names, statistics and real data, and the errors for broken ones."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.errors import DamagedRunError, NotARunError
from ulpscope.model import CallRecord, Frame, Run, Summary
from ulpscope.store import open_run
from ulpscope.store.foreign.checker import _Entry, _Leaves, _NoSense, recognize
from ulpscope.store.foreign.reader import Place


def tensor(*shape: int, dtype: str = "float32", low: float = -1.0, high: float = 1.0, needs: bool = False) -> dict[str, Any]:
    facts = {"Max": high, "Min": low, "requires_grad": needs}
    return {"type": "torch.Tensor", "dtype": f"torch.{dtype}", "shape": list(shape), **facts}


def real(path: str | Path, needs: bool = False) -> dict[str, Any]:
    return {"type": "torch.Tensor", "datapath": str(path), "requires_grad": needs}


def plain(value: Any) -> dict[str, Any]:
    return {"type": type(value).__name__, "value": value}


def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"args": list(args), "kwargs": kwargs}


def write(folder: Path, forward: Any = None, backward: Any = None, stack: Any = None, suffix: str = "_12") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, value in (("forward", forward), ("backward", backward), ("stack", stack)):
        if value is not None:
            (folder / f"{kind}_info{suffix}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def records(run: Run, rank: int = 0, step: int = 0) -> dict[tuple[str, str], CallRecord]:
    return {(str(record.call), record.phase): record for record in run.records(rank, step)}


def only(run: Run) -> CallRecord:
    (found,) = run.records(0, 0)
    return found


def test_the_fixture_of_the_tool_itself(tmp_path: Path) -> None:
    """One silu, as the checker's own test has it."""
    silu = tensor(2, 2560, 24, 24, low=-5.125, high=5.7421875, needs=True)
    (tmp_path / "forward.json").write_text(json.dumps({"Functional*silu*0": call(silu, inplace=plain(False))}))
    run = open_run(tmp_path / "forward.json")
    found = only(run)
    assert (str(found.call), found.phase, found.level) == ("functional.silu.0", "forward", "api")
    assert found.arguments is not None
    assert (found.arguments.args, found.arguments.kwargs) == (({"$tensor": "input.0"},), {"inplace": False})
    (slot,) = found.slots
    assert (slot.dtype, slot.shape, slot.requires_grad, slot.content) == ("float32", (2, 2560, 24, 24), True, None)
    assert slot.summary == Summary(2949120, -5.125, 5.7421875, num_nan=0, num_posinf=0, num_neginf=0)
    assert run.info.format == "api_accuracy_checker"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("Functional*silu*0", "functional.silu.0"),
        ("Functional_silu_0_forward", "functional.silu.0"),
        ("Functional.silu.0", "functional.silu.0"),
        ("Functional.silu.3.forward", "functional.silu.3"),
        ("Tensor*__add__*2", "Tensor.add.2"),
        ("Tensor___add___2_forward", "Tensor.add.2"),
        ("Tensor_add__1_forward", "Tensor.add_.1"),
        ("Torch*conv_transpose2d*11", "torch.conv_transpose2d.11"),
        ("NPU*npu_swiglu*0", "npu.npu_swiglu.0"),
        ("Functional_max_pool2d_1_4_forward", "functional.max_pool2d_1.4"),
    ],
)
def test_styles_of_names(tmp_path: Path, key: str, name: str) -> None:
    assert str(only(open_run(write(tmp_path, {key: call(tensor(2))}))).call) == name


def test_forward_and_backward_belong_together(tmp_path: Path) -> None:
    forward = {
        "Functional*linear*0": call(tensor(4, 8, needs=True), tensor(3, 8, needs=True), plain(None)),
        "Functional*relu*0": call(tensor(4, 3, needs=True)),
    }
    backward = {"Functional*relu*0": [tensor(4, 3)], "Functional*linear*0": [tensor(4, 3, low=-2.0, high=2.0)]}
    stack = {"Functional*linear*0": ["File /home/u/net.py, line 7, in forward, \n y = F.linear(x, w)"]}
    found = records(open_run(write(tmp_path, forward, backward, stack)))
    assert list(found) == [
        ("functional.linear.0", "forward"),
        ("functional.relu.0", "forward"),
        ("functional.relu.0", "backward"),
        ("functional.linear.0", "backward"),
    ]
    linear = found["functional.linear.0", "backward"]
    assert [(str(slot.slot), slot.shape) for slot in linear.slots] == [("input.0", (4, 3)), ("output.0", (4, 8)), ("output.1", (3, 8))]
    assert linear.slots[0].summary is not None
    assert linear.slots[0].summary.max == 2.0
    assert all(slot.summary is None and slot.note for slot in linear.slots[1:]), "what the checker did not record has no values"
    assert linear.source == Frame("/home/u/net.py", 7, "forward", "y = F.linear(x, w)")
    assert found["functional.linear.0", "forward"].arguments.args[2] is None  # type: ignore[union-attr]


def test_backward_of_the_overflow_style(tmp_path: Path) -> None:
    run = open_run(write(tmp_path, {"Functional_relu_0_forward": call(tensor(2, needs=True))}, {"Functional_relu_0_backward": [tensor(2)]}))
    assert list(records(run)) == [("functional.relu.0", "forward"), ("functional.relu.0", "backward")]


def test_arguments_in_our_words(tmp_path: Path) -> None:
    given_kwargs = {
        "dtype": {"type": "torch.dtype", "value": "torch.float16"},
        "device": {"type": "torch.device", "value": "cuda:0"},
        "name": plain("x"),
        "many": {"a": tensor(1), "b": [plain(1), plain(2.5)]},
    }
    run = open_run(
        write(tmp_path, {"Torch*f*0": call([tensor(2), plain(3)], {"type": "slice", "value": [0, None, 2]}, plain(True), **given_kwargs)})
    )
    arguments = only(run).arguments
    assert arguments is not None
    assert arguments.args == ([{"$tensor": "input.0.0"}, 3], {"$slice": [0, None, 2]}, True)
    assert arguments.kwargs == {
        "dtype": {"$dtype": "float16"},
        "device": {"$device": "cuda:0"},
        "name": "x",
        "many": {"a": {"$tensor": "input.many.a"}, "b": [1, 2.5]},
    }


def test_integers_booleans_and_infinities(tmp_path: Path) -> None:
    slots = [tensor(3, dtype="int64", low=0, high=9), tensor(3, dtype="bool", low=0, high=1), tensor(3, low=-math.inf, high=math.nan)]
    found = only(open_run(write(tmp_path, {"Torch*f*0": call(*slots)})))
    assert [slot.summary and (slot.summary.min, slot.summary.max, slot.summary.num_nan) for slot in found.slots] == [
        (0.0, 9.0, 0),
        (0.0, 1.0, 0),
        (None, None, 1),
    ]


def test_steps_and_processes(tmp_path: Path) -> None:
    for step in (1, 3):
        for process, size in (("_900", 3), ("_80", 2)):
            write(tmp_path / f"step{step}", {"Torch*exp*0": call(tensor(size))}, suffix=process)
    run = open_run(tmp_path)
    assert (run.ranks(), run.steps(0), run.steps(1)) == ((0, 1), (1, 3), (1, 3))
    assert [record.slots[0].shape for rank in (0, 1) for record in run.records(rank, 3)] == [(2,), (3,)]
    assert open_run(tmp_path / "step3").steps(0) == (3,)
    assert open_run(tmp_path / "step3" / "forward_info_900.json").steps(0) == (3,)


def test_a_backward_file_leads_to_its_forward_file(tmp_path: Path) -> None:
    write(tmp_path, {"Functional*relu*0": call(tensor(2, needs=True))}, {"Functional*relu*0": [tensor(2)]})
    assert len(records(open_run(tmp_path / "backward_info_12.json"))) == 2
    (tmp_path / "forward_info_12.json").unlink()
    assert [phase for _, phase in records(open_run(tmp_path))] == ["backward"]
    assert [phase for _, phase in records(open_run(tmp_path / "backward_info_12.json"))] == ["backward"]


# --------------------------------------------------------------------------------------------------------------- real data


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Write real data beside the json: one .pt, one .npy."""
    folder = tmp_path / "dump" / "forward_real_data"
    (folder / "rank7").mkdir(parents=True)
    torch.save(torch.arange(6.0).reshape(2, 3).bfloat16(), folder / "Functional*relu*0.0.pt")
    np.save(folder / "rank7" / "Torch_exp_0_forward.0.npy", np.float16([1, 2]))
    return tmp_path / "dump"


def test_real_data(kept: Path) -> None:
    """Paths are those of the machine that wrote them."""
    forward = {
        "Functional*relu*0": call(real("/home/other/dump/forward_real_data/Functional*relu*0.0.pt", needs=True)),
        "Torch_exp_0_forward": call(real(r"C:\dump\forward_real_data\rank7\Torch_exp_0_forward.0.npy")),
    }
    run = open_run(write(kept, forward))
    found = records(run)
    relu, exp = found["functional.relu.0", "forward"].slots[0], found["torch.exp.0", "forward"].slots[0]
    assert (relu.dtype, relu.shape, relu.requires_grad, relu.summary) == ("bfloat16", (2, 3), True, None)
    assert (exp.dtype, exp.shape) == ("float16", (2,))
    assert relu.content is not None
    assert exp.content is not None
    assert bytes(run.tensor(0, 0, exp.content).buffer) == np.float16([1, 2]).tobytes()
    assert run.tensor(0, 0, relu.content).shape == (2, 3)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd.pt",
        "forward_real_data/../../secret.pt",
        "forward_real_data/../secret.pt",
        "../forward_real_data/missing.pt",
        "forward_real_data/link.pt",
        "forward_real_data/linked/secret.pt",
        "forward_real_data",
        "forward_real_data/rank7",
        "forward_real_data/x.exe",
        "forward_real_data/\0.pt",
        "forward_real_data/" + "x" * 5000 + ".pt",
        17,
        None,
    ],
)
def test_paths_that_lead_nowhere_or_out(kept: Path, path: object) -> None:
    torch.save(torch.zeros(3), kept.parent / "secret.pt")
    (kept / "forward_real_data" / "link.pt").symlink_to(kept.parent / "secret.pt")
    (kept / "forward_real_data" / "linked").symlink_to(kept.parent)
    leaf = {"type": "torch.Tensor", "datapath": path, "requires_grad": True}
    run = open_run(write(kept, {"Functional*relu*0": call(leaf)}))
    found = only(run)
    assert found.slots == ()
    assert "$object" in found.arguments.args[0]  # type: ignore[union-attr]
    (entry,) = run.ledger(0)
    assert "is not in the recording" in entry.why
    with pytest.raises(DamagedRunError):
        run.tensor(0, 0, str(path))


def test_real_data_that_is_no_tensor_costs_that_tensor_only(kept: Path) -> None:
    (kept / "forward_real_data" / "Functional*relu*0.0.pt").write_bytes(b"PK\x03\x04 no tensor")
    np.save(kept / "forward_real_data" / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    forward = {
        "Functional*relu*0": call(real("forward_real_data/Functional*relu*0.0.pt"), real("forward_real_data/objects.npy")),
        "Torch*exp*0": call(tensor(2)),
    }
    run = open_run(write(kept, forward))
    assert [len(record.slots) for record in run.records(0, 0)] == [0, 1]
    assert len(run.ledger(0)) == 2


# ------------------------------------------------------------------------------------------------------------------ hostile


@pytest.mark.parametrize("text", ["", "{", '{"Functional*relu*0": ', "[1]", "null", "\x00\x01", '{"a": ' + "[" * 100_000])
def test_broken_json_is_one_sentence(tmp_path: Path, text: str) -> None:
    run = open_run(write(tmp_path, text))
    with pytest.raises(DamagedRunError, match="forward_info_12"):
        list(run.records(0, 0))


def test_a_broken_stack_file_costs_the_stacks_only(tmp_path: Path) -> None:
    run = open_run(write(tmp_path, {"Functional*relu*0": call(tensor(2))}, stack="{"))
    assert only(run).stack == ()
    assert "stack_info" in run.ledger(0)[0].what


@pytest.mark.parametrize(
    "leaf",
    [
        tensor(-1),
        tensor(2**40, 2**40),
        {**tensor(2), "shape": "2"},
        {**tensor(2), "shape": [2.5]},
        {**tensor(2), "shape": None},
        {**tensor(2), "dtype": 5},
        {**tensor(2), "dtype": None},
    ],
)
def test_absurd_tensors_cost_their_call_only(tmp_path: Path, leaf: dict[str, Any]) -> None:
    run = open_run(write(tmp_path, {"Functional*relu*0": call(leaf), "Torch*exp*0": call(tensor(2))}))
    assert [str(record.call) for record in run.records(0, 0)] == ["torch.exp.0"]
    assert "which no tensor has" in run.ledger(0)[0].why


def test_a_huge_shape_is_only_written_down(tmp_path: Path) -> None:
    assert only(open_run(write(tmp_path, {"Functional*relu*0": call(tensor(10**6, 10**6))}))).slots[0].shape == (10**6, 10**6)


@pytest.mark.parametrize(
    "entries",
    [
        {"no call": call()},
        {"Functional*relu*": call()},
        {"Functional*relu*99999999999": call()},
        {"Functional*relu*0": []},
        {"Functional*relu*0": None},
        {"Functional*relu*0": {"args": 5}},
        {"Functional*relu*0": {"args": [], "kwargs": 5}},
    ],
)
def test_entries_that_are_no_calls_go_to_the_ledger(tmp_path: Path, entries: dict[str, Any]) -> None:
    run = open_run(write(tmp_path, {**entries, "Torch*exp*0": call(tensor(2))}))
    assert [str(record.call) for record in run.records(0, 0)] == ["torch.exp.0"]
    assert len(run.ledger(0)) == 1


def test_wrong_statistics_are_no_statistics(tmp_path: Path) -> None:
    leaf = {**tensor(2), "Max": "large", "Min": [1]}
    assert only(open_run(write(tmp_path, {"Torch*exp*0": call(leaf)}))).slots[0].summary == Summary(2)


def test_deep_nesting_costs_that_call_only(tmp_path: Path) -> None:
    deep: Any = plain(1)
    for _ in range(60):
        deep = [deep]
    run = open_run(write(tmp_path, {"Functional*relu*0": call(deep), "Torch*exp*0": call(tensor(2))}))
    assert [str(record.call) for record in run.records(0, 0)] == ["torch.exp.0"]
    assert "nested" in run.ledger(0)[0].why


def test_what_is_recognized(tmp_path: Path) -> None:
    write(tmp_path / "run", {"Functional*relu*0": call(tensor(2))})
    (tmp_path / "config.json").write_text('{"args": {}}')
    (tmp_path / "mine.json").write_text('{ "Functional*relu*0":\n {"args": []}}')
    assert recognize(tmp_path / "run")
    assert recognize(tmp_path / "mine.json")
    assert not recognize(tmp_path / "config.json")
    assert not recognize(tmp_path / "missing")
    assert not recognize(tmp_path)
    with pytest.raises(NotARunError):
        open_run(tmp_path / "config.json")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(NotARunError):
        open_run(tmp_path / "run")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.just("torch.Tensor"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "value", "dtype", "shape", "datapath", "Max", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values, json_values)
def test_any_json_is_read_or_refused(args: Any, body: Any) -> None:
    leaves = _Leaves(Place(0, 0, Path("none/forward_info_1.json"), Path("none")))
    for given_body, phase in (({"args": args, "kwargs": {"x": body}}, "forward"), ([args, body], "backward")):
        with suppress(_NoSense):
            leaves.take(_Entry("k", "torch.x", "Torch.x", 0, phase, given_body))  # type: ignore[arg-type]
