# SPDX-License-Identifier: Apache-2.0
"""Dumps of msprobe: real ones in our words, and the errors for broken ones."""

from __future__ import annotations

import json
import math
import operator
import shutil
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.model import DTYPES, CallName, CallRecord, Frame, Slot
from ulpscope.store.foreign.msprobe import open_dump, recognize
from ulpscope.store.foreign.reader import ForeignRun, Numbering, fingerprint, number_ranks, operation, summary
from ulpscope.store.foreign.torch_archive import open_plain_tensor

GOLDEN = Path(__file__).parent.parent / "golden"
TENSORS_26 = GOLDEN / "msprobe-26" / "tensor-mix"


def calls_of(run: ForeignRun, rank: int = 0, step: int = 0) -> dict[tuple[str, str], CallRecord]:
    return {(str(record.call), record.phase): record for record in run.records(rank, step)}


def write_dump(folder: Path, data: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dump.json").write_text(
        json.dumps({"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None, "data": data})
    )
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def leaf(shape: tuple[int, ...] = (2,), **more: Any) -> dict[str, Any]:
    return {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": list(shape),
        "Max": 1.0,
        "Min": -1.0,
        "Mean": 0.0,
        "Norm": 1.0,
        **more,
    }


def call(*args: Any, output: list[Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    return {"input_args": list(args), "input_kwargs": kwargs, "output": output or [leaf()]}


# --- real dumps


@pytest.mark.parametrize("dump", sorted(GOLDEN.glob("msprobe-*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_real_dump_reads_whole(dump: Path) -> None:
    assert recognize(dump)
    run = open_dump(dump)
    assert (run.ranks(), run.steps(0), run.is_complete(0, 0), run.ledger(0)) == ((0,), (0,), True, ())
    records = list(run.records(0, 0))
    assert [record.order for record in records] == list(range(len(records)))
    assert len({(record.call, record.phase) for record in records}) == len(records) == len(_entries(dump))
    assert all(record.slots for record in records if record.call.op != "module.LayerNorm")


def _entries(dump: Path) -> dict[str, Any]:
    (file,) = dump.glob("*/*/dump.json")
    return json.loads(file.read_text())["data"]


@pytest.mark.parametrize(
    "dump", ["msprobe-26/statistics-L1", "msprobe-1.0/statistics-L1", "msprobe-26/tensor-mix", "msprobe-1.3/tensor-mix"]
)
def test_real_dumps_name_the_calls_of_the_program(dump: str) -> None:
    forward = [str(record.call) for record in open_dump(GOLDEN / dump).records(0, 0) if record.phase == "forward" and record.level == "api"]
    program = [name for name in forward if not name.startswith(("Tensor.view_as", "torch.ones_like"))]  # these two are the tool's own
    assert program[:8] == [
        "functional.layer_norm.0",
        "functional.linear.0",
        "functional.gelu.0",
        "functional.linear.1",
        "Tensor.add.0",  # x + y
        "Tensor.add.1",  # 1.0 + ..., a call of its own name there
        "Tensor.add_.0",  # y += 0.5
        "functional.cross_entropy.0",
    ]
    assert program[8:] == [f"Tensor.add_.{n}" for n in range(1, 7)]  # the optimizer


def test_modules_parents_stacks_and_arguments() -> None:
    calls = calls_of(open_dump(TENSORS_26))
    gelu = calls["functional.gelu.0", "forward"]
    assert gelu.arguments is not None
    assert (gelu.arguments.args, gelu.arguments.kwargs) == (({"$tensor": "input.0"},), {"approximate": "tanh"})
    assert gelu.source == Frame("/project/train.py", 19, "forward", 'y = self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh"))')
    linear = calls["functional.linear.0", "forward"]
    assert (linear.module, linear.parent) == ("fc1", "module.Linear.0")
    fc2 = calls["module.Linear.1", "forward"]
    assert (fc2.level, fc2.module) == ("module", "fc2")
    assert [str(slot.slot) for slot in fc2.slots] == ["input.0", "parameter.weight", "parameter.bias", "output.0"]
    assert calls["Tensor.add_.1", "forward"].parent == "optimizer"


def test_backward_stands_where_its_forward_stood() -> None:
    calls = calls_of(open_dump(TENSORS_26))
    backward = calls["functional.linear.1", "backward"]
    assert (backward.module, backward.source) == ("fc2", calls["functional.linear.1", "forward"].source)
    assert backward.arguments is None


def test_gradients_are_attributed_only_where_that_is_certain() -> None:
    calls = calls_of(open_dump(TENSORS_26))
    norm = calls["functional.layer_norm.0", "backward"]
    assert [str(slot.slot) for slot in norm.slots] == ["input.0", "output.2", "output.3"]  # x is data, so weight and bias
    linear = calls["functional.linear.0", "backward"]  # the node is addmm: bias, input, transposed weight
    assert [str(slot.slot) for slot in linear.slots] == ["input.0", "output.0.node", "output.1.node", "output.2.node"]
    assert [slot.shape for slot in linear.slots][1:] == [(4,), (2, 3), (3, 4)]


@pytest.mark.parametrize("version", ["26", "1.3"])
def test_parameter_gradients_come_after_the_backward(version: str) -> None:
    records = list(open_dump(GOLDEN / f"msprobe-{version}" / "tensor-mix").records(0, 0))
    orders = {str(record.call): record.order for record in records}
    gradient = next(record for record in records if str(record.call) == "module.Linear.parameters_grad.0")
    assert (gradient.phase, gradient.level, gradient.module) == ("backward", "module", "fc1")
    assert {str(slot.slot) for slot in gradient.slots} == {"gradient.weight", "gradient.bias"}
    first_backward = min(record.order for record in records if record.phase == "backward" and record.level == "api")
    assert first_backward < orders["module.Linear.parameters_grad.1"] < gradient.order < orders["Tensor.add_.1"]


def test_statistics_are_those_of_the_values() -> None:
    run = open_dump(TENSORS_26)
    checked = 0
    for record in run.records(0, 0):
        for slot in record.slots:
            if slot.content is None:
                assert slot.note.endswith("is not in the dump")
                continue
            data = run.tensor(0, 0, slot.content)
            assert (data.dtype, data.shape) == ("float32", slot.shape)
            values = np.frombuffer(data.buffer, "<f4").astype("f8")
            stats = slot.summary
            assert stats is not None
            assert (stats.min, stats.max) == (values.min(), values.max())
            assert stats.mean == pytest.approx(values.mean(), abs=1e-7)
            assert stats.rms == pytest.approx(math.sqrt(np.square(values).mean()), rel=1e-6)
            assert stats.num_nonfinite == 0
            checked += 1
    assert checked == 7


def test_checksums_are_crc32() -> None:
    weight = open_dump(TENSORS_26).tensor(0, 0, "Functional.linear.0.forward.input.1.pt")
    linear = calls_of(open_dump(GOLDEN / "msprobe-26" / "md5-L1"))["functional.linear.0", "forward"]
    assert linear.slots[1].fingerprint == f"crc32:{zlib.crc32(weight.buffer):08x}"


def test_versions_agree_on_the_same_program() -> None:
    old, new = (calls_of(open_dump(GOLDEN / name / "statistics-L1")) for name in ("msprobe-1.0", "msprobe-26"))
    common = [key for key in new if key in old and not key[0].startswith("Tensor.add_")]
    assert len(common) > 12
    for key in common:
        for ours, theirs in zip(new[key].slots, old[key].slots, strict=True):
            assert (ours.slot, ours.shape, ours.summary and ours.summary.max) == (
                theirs.slot,
                theirs.shape,
                theirs.summary and theirs.summary.max,
            )


def test_inputs_that_were_recorded_after_an_in_place_call_are_not_called_inputs() -> None:
    old, new = (calls_of(open_dump(GOLDEN / name / "statistics-L1"))["Tensor.add_.0", "forward"] for name in ("msprobe-1.0", "msprobe-26"))
    assert [(str(slot.slot), slot.note) for slot in old.slots] == [("mutated.0", "recorded after the call"), ("output.0", "")]
    assert [str(slot.slot) for slot in new.slots] == ["input.0", "output.0"]
    assert old.slots[0].summary == old.slots[1].summary


def test_one_in_place_call_that_changes_nothing_proves_nothing(tmp_path: Path) -> None:
    data = {"Tensor.relu_.0.forward": call(leaf()), "Tensor.add_.0.forward": call(leaf(), output=[leaf(Max=7.0)])}
    slots = [str(record.slots[0].slot) for record in open_dump(write_dump(tmp_path, data)).records(0, 0)]
    assert slots == ["input.0", "input.0"]


@pytest.mark.parametrize("below", [".", "step0", "step0/proc4711", "step0/proc4711/dump.json"])
def test_any_level_of_the_tree_opens(below: str) -> None:
    path = TENSORS_26 / below
    assert recognize(path)
    run = open_dump(path)
    assert len(list(run.records(0, 0))) == len(_entries(TENSORS_26))
    assert run.info.options == {"task": "tensor", "level": "mix", "framework": "pytorch"}


# --- trees, names and values


def test_steps_and_ranks(tmp_path: Path) -> None:
    for step, rank in [(0, 0), (0, 3), (12, 3)]:
        write_dump(tmp_path / f"step{step}" / f"rank{rank}", {"Torch.relu.0.forward": call(leaf())})
    (tmp_path / "step5").mkdir()
    run = open_dump(tmp_path)
    assert (run.ranks(), run.steps(0), run.steps(3), run.info.world_size) == ((0, 3), (0,), (0, 12), 2)
    assert [record.step for record in run.records(3, 12)] == [12]
    with pytest.raises(NotARunError, match="no step 1 of rank 0; it holds step 0 of rank 0, step 0 of rank 3, step 12 of rank 3"):
        next(run.records(0, 1))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["rank"], {0: "rank"}),
        (["proc4711"], {0: "proc4711"}),
        (["rank1", "proc99", "proc7"], {0: "proc7", 1: "rank1", 2: "proc99"}),
        (["rank10", "rank2"], {2: "rank2", 10: "rank10"}),
    ],
)
def test_processes_without_a_rank_take_the_free_ones(names: list[str], expected: dict[int, str]) -> None:
    assert {rank: path.name for rank, path in number_ranks(map(Path, names)).items()} == expected


def test_operators_have_the_names_of_our_own_capture() -> None:
    torch = pytest.importorskip("torch")
    from ulpscope.capture.intercept.naming import op_name

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(op_name(func))
            return func(*args, **(kwargs or {}))

    x, flags = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
    matrix = torch.eye(2)
    binary = ["add", "sub", "mul", "truediv", "mod", "pow", "floordiv", "ge", "gt", "le", "lt", "ne", "eq"]
    operands: list[tuple[str, Any, Any]] = [(f"__{name}__", getattr(operator, name), (x, 2.0)) for name in binary]
    operands += [(f"__r{name}__", getattr(operator, name), (2.0, x)) for name in ("add", "sub", "mul", "truediv", "mod", "pow", "floordiv")]
    operands += [
        (f"__i{name}__", getattr(operator, f"i{name}"), (x, 2.0)) for name in ("add", "sub", "mul", "truediv", "mod", "pow", "floordiv")
    ]
    operands += [(f"__{name}__", getattr(operator, f"{name}_"), (flags, flags)) for name in ("and", "or")] + [
        ("__xor__", operator.xor, (flags, flags))
    ]
    operands += [
        ("__rand__", operator.and_, (True, flags)),
        ("__ror__", operator.or_, (True, flags)),
        ("__rxor__", operator.xor, (True, flags)),
    ]
    operands += [
        ("__neg__", operator.neg, (x,)),
        ("__pos__", operator.pos, (x,)),
        ("__abs__", abs, (x,)),
        ("__invert__", operator.invert, (flags,)),
    ]
    operands += [("__matmul__", operator.matmul, (matrix, matrix)), ("__getitem__", operator.getitem, (x, 0))]
    for name, function, values in operands:
        seen: list[str | None] = []
        with Names():
            function(*values)
        assert operation("Tensor", name) == seen[0], name


def test_folded_operators_are_counted_in_order_of_appearance(tmp_path: Path) -> None:
    keys = [
        "Tensor.__radd__.0.forward",
        "Tensor.__add__.0.forward",
        "Tensor.add.4.forward",
        "Tensor.__radd__.1.forward",
        "Torch.relu.7.forward",
    ]
    data = {key: call(leaf()) for key in keys} | {"Tensor.__add__.0.backward": {"input": [leaf()], "output": [leaf()]}}
    calls = [(str(record.call), record.phase) for record in open_dump(write_dump(tmp_path, data)).records(0, 0)]
    assert calls == [
        ("Tensor.add.0", "forward"),
        ("Tensor.add.1", "forward"),
        ("Tensor.add.2", "forward"),
        ("Tensor.add.3", "forward"),
        ("torch.relu.7", "forward"),  # nothing folded: a partial dump keeps its numbers
        ("Tensor.add.1", "backward"),
    ]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["x", "y", "z"]), st.integers(0, 5))))
def test_numbering_gives_each_call_one_name(calls: list[tuple[str, str, int]]) -> None:
    numbering = Numbering(calls)
    names = {one: numbering.name(*one) for one in calls}
    assert len(set(names.values())) == len(names)
    assert all(numbering.knows(*one) for one in calls)


def test_other_values_become_arguments(tmp_path: Path) -> None:
    values = [
        [{"type": "slice", "value": [0, None, 2]}, {"type": "ellipsis", "value": "..."}],
        {"type": "torch.Size", "value": [2, 3]},
        {"type": "torch.dtype", "value": "torch.bfloat16"},
        {"type": "torch.device", "value": "cuda:0"},
        {"type": "torch.memory_format", "format": "channels_last"},
        {"type": "int", "value": 2**70},
        {"type": "ProcessGroup", "group_ranks": [0, 1], "group_id": "1a2b"},
        {},
        None,
        {"mask": leaf(), "scale": {"type": "float", "value": 0.5}},
    ]
    record = next(open_dump(write_dump(tmp_path, {"NPU.npu_fusion_attention.0.forward": call(*values, bias=leaf())})).records(0, 0))
    assert str(record.call) == "npu.npu_fusion_attention.0"
    assert record.arguments is not None
    assert record.arguments.args == (
        [{"$slice": [0, None, 2]}, {"$ellipsis": True}],
        {"$size": [2, 3]},
        {"$dtype": "bfloat16"},
        {"$device": "cuda:0"},
        {"$memory_format": "channels_last"},
        {"$int": str(2**70)},
        {"$object": "ProcessGroup", "repr": '{"group_ranks": [0, 1], "group_id": "1a2b"}'},
        {"$object": "unknown", "repr": "not recorded by the tool"},
        None,
        {"mask": {"$tensor": "input.9.mask"}, "scale": 0.5},
    )
    assert record.arguments.kwargs == {"bias": {"$tensor": "input.bias"}}
    assert [slot.slot for slot in record.slots] == [Slot("input", (9, "mask")), Slot("input", ("bias",)), Slot("output", (0,))]


@pytest.mark.parametrize(
    ("kind", "shape", "low", "high", "norm", "expected"),
    [
        ("float32", (4,), -1.0, 1.0, 2.0, {"min": -1.0, "max": 1.0, "rms": 1.0, "num_nan": 0, "num_posinf": 0, "num_neginf": 0}),
        ("float32", (4,), math.nan, math.nan, math.nan, {"min": None, "max": None, "rms": None, "num_nan": 1, "num_posinf": None}),
        ("float32", (4,), -1.0, math.inf, math.inf, {"max": math.inf, "rms": None, "num_nan": 0, "num_posinf": 1, "num_neginf": 0}),
        ("float16", (4,), -9e4, 9e4, math.inf, {"rms": None, "num_nonfinite": 0}),
        ("float32", (), -3.0, -3.0, -3.0, {"rms": 3.0}),
        ("complex64", (2,), 1.0, 3.0, 4.0, {"min": None, "rms": 2.0, "num_nan": None}),
        ("bool", (2,), False, True, None, {"min": 0.0, "max": 1.0, "rms": None}),
        ("int64", (2,), 1, 10**400, None, {"min": None, "num_nan": None}),
        ("float32", (0, 3), None, None, None, {"numel": 0, "min": None, "num_nan": None}),
        ("float32", (2,), "N/A", [], "Nan", {"min": None, "rms": None}),
        ("hifloat8", (2,), 1.0, 1.0, 1.0, {"numel": 2, "max": None}),
    ],
)
def test_summary_claims_what_the_extremes_prove(
    kind: str, shape: tuple[int, ...], low: Any, high: Any, norm: Any, expected: dict[str, Any]
) -> None:
    taken = summary(kind, shape, low=low, high=high, mean=0.0, norm=norm)
    assert {name: getattr(taken, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0a1b2c3d", "crc32:0a1b2c3d"),
        ("0x3d081350be615796", "xor64:3d081350be615796"),
        ("d41d8cd98f00b204e9800998ecf8427e", "md5:d41d8cd98f00b204e9800998ecf8427e"),
        ("", None),
        ("zz", None),
        (None, None),
        (12345678, None),
    ],
)
def test_checksum_schemes(text: object, expected: str | None) -> None:
    assert fingerprint(text) == expected


def test_megatron_construct_and_recompute(tmp_path: Path) -> None:
    data = {"Torch.relu.0.forward": call(leaf()) | {"is_recompute": True}}
    construct = {"Torch.relu.0.forward": ["Module.0.decoder.Layer.forward.3", 1], "megatron_micro_step_number": 1, "optimizer": None}
    record = next(open_dump(write_dump(tmp_path, data, construct=construct)).records(0, 0))
    assert (record.recompute, record.module, record.parent) == (True, "0.decoder", "Module.0.decoder.Layer.forward.3")


# --- what goes wrong


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "ends in the middle, after 0 bytes: its writer was killed or is still at work"),
        ('{"data": {"Torch.relu.0.forw', "ends in the middle"),
        ('{"data": {"Torch.relu.0.forward": {}', "ends in the middle"),
        ('{"data": {,}}', "is not JSON at line 1, column 11"),
        ("[1, 2]", "holds a list where a dump has an object"),
        ('{"other": 1}', "has no object named 'data'"),
        ('{"data": []}', "has no object named 'data'"),
        ('{"data": {"Torch.relu.0.forward": ' + "[" * 100_000 + "]" * 100_000 + "}}", "nests its values too deeply"),
        ('{"data": {"n": ' + "9" * 5000 + "}}", "is not JSON"),
        (b'{"data": "\xff\xfe"}', "is not JSON"),
    ],
)
def test_a_broken_dump_json_is_one_sentence(tmp_path: Path, text: str | bytes, sentence: str) -> None:
    if "9" * 100 in str(text) and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python reads integers of any length")
    (tmp_path / "dump.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert recognize(tmp_path)
    with pytest.raises(DamagedRunError) as caught:
        list(open_dump(tmp_path).records(0, 0))
    assert sentence in str(caught.value)
    assert str(tmp_path / "dump.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_json_too_large_to_hold_is_refused_by_its_size(tmp_path: Path) -> None:
    with (tmp_path / "dump.json").open("wb") as stream:
        stream.truncate(3 << 30)
    with pytest.raises(DamagedRunError, match=r"is 3\.2 GB, at most 2 GiB can be read"):
        list(open_dump(tmp_path).records(0, 0))


@pytest.mark.parametrize(("depth", "is_read"), [(60, True), (70, False), (400, False)])
def test_deep_but_parsable_values_are_no_crash(tmp_path: Path, depth: int, is_read: bool) -> None:
    data = '{"data": {"Torch.relu.0.forward": {"input_args": ' + "[" * depth + "]" * depth + "}}}"
    (tmp_path / "dump.json").write_text(data)
    if is_read:
        assert len(list(open_dump(tmp_path).records(0, 0))) == 1
        return
    with pytest.raises(DamagedRunError, match="nests its values too deeply"):
        list(open_dump(tmp_path).records(0, 0))


def test_a_dump_that_vanishes_is_one_sentence(tmp_path: Path) -> None:
    run = open_dump(write_dump(tmp_path, {}))
    (tmp_path / "dump.json").unlink()
    with pytest.raises(DamagedRunError, match=r"cannot be opened \(No such file or directory\)"):
        list(run.records(0, 0))


@pytest.mark.parametrize("shape", [[-1, 2], [1.5], "abc", None, [True], {"a": 1}, [[2]], [2**63], [2**40, 2**40]])
def test_a_shape_that_is_none_is_one_sentence(tmp_path: Path, shape: Any) -> None:
    run = open_dump(write_dump(tmp_path, {"Torch.relu.0.forward": call(leaf() | {"shape": shape})}))
    with pytest.raises(DamagedRunError, match=r"gives input\.0 of 'Torch\.relu\.0\.forward' the shape"):
        list(run.records(0, 0))


def test_unknown_entries_go_to_the_ledger(tmp_path: Path) -> None:
    data = {"optimizer": None, "Torch.relu.0.forward": call(leaf()), "what.is.this": {}, "Torch.relu.1.forward": 3}
    run = open_dump(write_dump(tmp_path, data))
    assert [str(record.call) for record in run.records(0, 0)] == ["torch.relu.0"]
    (entry,) = run.ledger(0)
    assert (entry.what, entry.why, entry.count) == ("reading dump.json", "entries such as 'optimizer' are no calls", 3)


@pytest.mark.parametrize(
    "body", [{}, {"input_args": 3, "output": "x"}, {"input_args": None, "input_kwargs": [1]}, {"output": {"a": leaf()}}, {"output": leaf()}]
)
def test_odd_bodies_do_not_stop_the_reader(tmp_path: Path, body: dict[str, Any]) -> None:
    run = open_dump(write_dump(tmp_path, {"Torch.relu.0.forward": body, "Torch.relu.0.backward": body, "Module.a.B.parameters_grad": body}))
    assert len(list(run.records(0, 0))) == 3


@pytest.mark.parametrize("name", ["stack", "construct"])
def test_a_damaged_side_file_costs_only_what_it_held(tmp_path: Path, name: str) -> None:
    run = open_dump(write_dump(tmp_path, {"Torch.relu.0.forward": call(leaf())}, **{name: '{"0": [['}))
    assert [str(record.call) for record in run.records(0, 0)] == ["torch.relu.0"]
    assert [(entry.what, "ends in the middle" in entry.why) for entry in run.ledger(0)] == [(f"reading {name}.json", True)]


@pytest.mark.parametrize(
    "stack", [{"0": 1}, {"0": [[1], ["x"]]}, {"Torch.relu.0.forward": ["File", 3, "File a, line x, in f, \n y"]}, {"0": []}]
)
def test_odd_stacks_are_left_out(tmp_path: Path, stack: dict[str, Any]) -> None:
    run = open_dump(write_dump(tmp_path, {"Torch.relu.0.forward": call(leaf())}, stack=stack, construct={"a": 3, "b": []}))
    assert next(run.records(0, 0)).stack == ()


def test_nan_literals_survive(tmp_path: Path) -> None:
    bad = leaf() | {"Max": math.nan, "Min": math.nan, "Mean": math.nan, "Norm": math.nan}
    record = next(
        open_dump(write_dump(tmp_path, {"Torch.log.0.forward": call(leaf(), {"type": "float", "value": math.inf}, output=[bad])})).records(
            0, 0
        )
    )
    assert record.arguments is not None
    assert record.arguments.args[1] == math.inf
    assert record.slots[1].summary is not None
    assert record.slots[1].summary.num_nan == 1


@pytest.mark.parametrize("path", ["nothing", "empty", "notes.txt", "other.json"])
def test_what_is_no_dump(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert not recognize(tmp_path / path)


def test_a_folder_without_dumps_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match=r"holds no dump\.json, neither itself nor in step\*/rank\* below"):
        open_dump(tmp_path)


# --- tensor files


def tensor_dump(folder: Path, name: str, shape: tuple[int, ...] = (2, 3), dtype: str = "torch.float32") -> ForeignRun:
    write_dump(folder, {"Torch.relu.0.forward": call(leaf(shape, data_name=name) | {"dtype": dtype})})
    (folder / "dump_tensor_data").mkdir(exist_ok=True)
    return open_dump(folder)


@pytest.mark.parametrize("name", ["../secret.npy", "/etc/secret.npy", "a/../../secret.npy", "..", "sub/x.npy"])
def test_names_that_climb_out_are_not_opened(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "secret.npy", np.zeros((2, 3), "f4"))
    run = tensor_dump(tmp_path / "rank0", name)
    assert next(run.records(0, 0)).slots[0].content is None
    with pytest.raises(DamagedRunError, match="keeps no tensor named"):
        run.tensor(0, 0, name)


def test_links_that_lead_out_are_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "secret.npy", np.zeros((2, 3), "f4"))
    run = tensor_dump(tmp_path / "rank0", "x.npy")
    (tmp_path / "rank0" / "dump_tensor_data" / "x.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(DamagedRunError, match="is a link that leads out of the dump"):
        run.tensor(0, 0, "x.npy")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype="f8").reshape(2, 3)),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(2.5, dtype="f2"),
        np.zeros((0, 3), dtype="f4"),
        np.array([True, False]),
        np.array([1 + 2j], dtype="c8"),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_npy_files_come_back_bit_for_bit(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    run = tensor_dump(tmp_path, "x.npy", array.shape)
    np.save(tmp_path / "dump_tensor_data" / "x.npy", array)
    data = run.tensor(0, 0, "x.npy")
    assert (data.dtype, data.shape) == (array.dtype.newbyteorder("=").name, array.shape)
    assert bytes(data.buffer) == array.astype(array.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_pt_files_come_back_bit_for_bit(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([[0.0, 1.0, -2.0], [3.5, 4.0, 0.5]]).to(getattr(torch, kind))
    run = tensor_dump(tmp_path, "x.pt")
    torch.save(tensor.t().contiguous().t(), tmp_path / "dump_tensor_data" / "x.pt")
    data = run.tensor(0, 0, "x.pt")
    assert (data.dtype, data.shape) == (kind, (2, 3))
    assert bytes(data.buffer) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _write_pickle(file: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (file.parent / "exploded",))

    import pickle

    file.write_bytes(pickle.dumps(Bomb()))


def _write_pt_with_code(file: Path) -> None:
    import torch

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (file.parent / "exploded",))

    torch.save(Bomb(), file)


def _write_object_array(file: Path) -> None:
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _write_lying_header(file: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"
    file.write_bytes(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n" + b"\0" * 24)


@pytest.mark.parametrize(
    ("name", "write", "sentence"),
    [
        ("x.pt", _write_pickle, "cannot be read as a tensor"),
        ("x.pt", _write_pt_with_code, "cannot be read as a tensor"),
        ("x.pt", lambda file: file.write_bytes(b"PK\x03\x04 cut off"), "cannot be read as a tensor"),
        ("x.pt", lambda file: file.write_bytes(b""), "cannot be read as a tensor"),
        ("x.npy", _write_object_array, "cannot be read as a tensor"),
        ("x.npy", _write_lying_header, "cannot be read as a tensor"),
        ("x.npy", lambda file: file.write_bytes(b"\x93NUMPY"), "cannot be read as a tensor"),
        ("x.npy", lambda file: np.save(file, np.zeros(3, "U4")), "which is no tensor's"),
        ("x.npy", lambda file: np.save(file, np.zeros((3, 2), "f4")), r"shape \[3, 2\], but its dump says \[2, 3\]"),
    ],
)
def test_a_bad_tensor_file_is_one_sentence(tmp_path: Path, name: str, write: Any, sentence: str) -> None:
    if name.endswith(".pt"):
        pytest.importorskip("torch")
    run = tensor_dump(tmp_path, name)
    write(tmp_path / "dump_tensor_data" / name)
    with pytest.raises(DamagedRunError, match=sentence) as caught:
        run.tensor(0, 0, name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "dump_tensor_data" / "exploded").exists()


def test_a_pt_file_that_holds_no_tensor_is_one_sentence(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    run = tensor_dump(tmp_path, "x.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "dump_tensor_data" / "x.pt")
    with pytest.raises(DamagedRunError, match="holds a dict, not a dense tensor"):
        run.tensor(0, 0, "x.pt")


def test_without_torch_the_tensors_of_real_dumps_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    run = open_dump(TENSORS_26)
    slots = [slot for record in run.records(0, 0) for slot in record.slots if slot.content]
    values = {slot.content: np.frombuffer(run.tensor(0, 0, slot.content or "").buffer, "<f4") for slot in slots}
    assert len(values) == 7
    assert all(slot.summary and slot.summary.max == values[slot.content].max() for slot in slots)


def _attributed(tensor: Any) -> Any:
    tensor.tag = {"a": 1.5, "b": [None]}
    return tensor


@pytest.mark.parametrize(
    "options", [{}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 5}], ids=["zip", "old", "new_pickle"]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda torch: torch.arange(6.0).reshape(2, 3).to(torch.float8_e4m3fn),
        lambda torch: torch.arange(6).reshape(3, 2).t().to(torch.uint16),
        lambda torch: torch.arange(12.0).reshape(2, 2, 3)[1],
        lambda torch: (torch.arange(6).reshape(2, 3) * (1 + 2j)).conj(),
        lambda torch: (torch.arange(6).reshape(2, 3) * (1 + 2j)).conj().imag,
        lambda torch: _attributed(torch.ones(2, 3)),
        lambda torch: _attributed(torch.nn.Parameter(torch.ones(2, 3))),
        lambda torch: torch.nn.Buffer(torch.ones(2, 3)),
    ],
)
def test_unusual_files_read_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, options: Any) -> None:
    torch = pytest.importorskip("torch")
    run, tensor = tensor_dump(tmp_path, "x.pt"), make(torch)
    torch.save(tensor, tmp_path / "dump_tensor_data" / "x.pt", **options)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        data = run.tensor(0, 0, "x.pt")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    assert data.dtype == str(tensor.dtype).removeprefix("torch.")
    assert bytes(data.buffer) == plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_file_of_a_big_endian_machine_reads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    run = tensor_dump(tmp_path, "x.pt")
    torch.save(torch.arange(6.0).reshape(2, 3), tmp_path / "dump_tensor_data" / "x.pt")
    turned = np.arange(6, dtype=">f4").tobytes()
    change = {"byteorder": b"big", "data/0": turned}
    _rewritten(tmp_path / "dump_tensor_data" / "x.pt", lambda name, content: change.get(name.partition("/")[2], content))
    assert bytes(run.tensor(0, 0, "x.pt").buffer) == np.arange(6, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: torch.arange(6.0).reshape(2, 3),
        lambda torch: torch.arange(6.0).reshape(3, 2).t(),
        lambda torch: torch.arange(40).reshape(4, 10)[1:3, 2:8:2],
        lambda torch: torch.arange(3.0).expand(2, 3),
        lambda torch: torch.nn.Parameter(torch.ones(2, 3)),
        lambda torch: torch.tensor(2.5, dtype=torch.float64),
        lambda torch: torch.zeros(0, 3),
        lambda torch: torch.tensor([1 + 2j]),
        lambda torch: torch.arange(6).to(torch.bfloat16),
        lambda torch: torch.tensor([True, False]),
        lambda torch: torch.zeros(1, 2, 3, 1, 1),
    ],
)
def test_plain_tensors_are_found_without_torch(tmp_path: Path, make: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = make(torch)
    torch.save(tensor, tmp_path / "x.pt")
    data = open_plain_tensor(tmp_path / "x.pt")
    assert data is not None
    assert (data.dtype, data.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert bytes(data.buffer) == tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _rewritten(file: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, change(name, content))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: _rewritten(file, lambda name, content: content[:8] if name.endswith("data/0") else content),
        lambda file: _rewritten(file, lambda name, content: b"big" if name.endswith("byteorder") else content),
        lambda file: _rewritten(
            file, lambda name, content: b"cbuiltins\nexec\n(Vraise SystemExit\ntR." if name.endswith(".pkl") else content
        ),
        lambda file: _rewritten(file, lambda name, content: b"." * (1 << 17) if name.endswith(".pkl") else content),
        lambda file: _rewritten(file, lambda name, content: content[:30] if name.endswith(".pkl") else content),
        lambda file: _rewritten(
            file, lambda name, content: content.replace(b"FloatStorage", b"BloatStorage") if name.endswith(".pkl") else content
        ),
        lambda file: _rewritten(file, lambda name, content: content, zipfile.ZIP_DEFLATED),
        lambda file: file.write_bytes(file.read_bytes()[:-50]),
        lambda file: file.write_bytes(b""),
    ],
)
def test_what_is_not_plain_is_left_alone(tmp_path: Path, spoil: Any) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.arange(6.0), tmp_path / "x.pt")
    spoil(tmp_path / "x.pt")
    assert open_plain_tensor(tmp_path / "x.pt") is None


def test_a_small_file_that_claims_a_huge_tensor_is_one_sentence(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    run = tensor_dump(tmp_path, "x.pt", (1 << 40, 4))
    torch.save(torch.zeros(1, 1).expand(1 << 40, 4), tmp_path / "dump_tensor_data" / "x.pt")
    with pytest.raises(DamagedRunError, match=r"is a small file that claims a tensor of shape \[1099511627776, 4\]"):
        run.tensor(0, 0, "x.pt")


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_pickle_is_read_or_left_alone(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    whole = (GOLDEN / "msprobe-26/tensor-mix/step0/proc4711/dump_tensor_data/Functional.gelu.0.forward.input.0.pt").read_bytes()
    file = tmp_path_factory.mktemp("any") / "x.pt"
    file.write_bytes(whole)
    _rewritten(file, lambda name, content: content[:at] + noise + content[at + len(noise) :] if name.endswith(".pkl") else content)
    data = open_plain_tensor(file)
    assert data is None or len(bytes(data.buffer)) == math.prod(data.shape) * DTYPES[data.dtype].size_bytes


def test_a_file_that_vanishes_is_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(TENSORS_26, tmp_path / "dump")
    run = open_dump(tmp_path / "dump")
    content = next(slot.content for record in run.records(0, 0) for slot in record.slots if slot.content)
    shutil.rmtree(tmp_path / "dump" / "step0" / "proc4711" / "dump_tensor_data")
    with pytest.raises(InputError, match="keeps no tensor named"):
        run.tensor(0, 0, content)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["type", "value", "dtype", "shape", "Max", "data_name", "md5", "a.b"]), inner, max_size=4)
        ),
    )
)
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = write_dump(
        tmp_path_factory.mktemp("any"), {"Torch.relu.0.forward": call(value, output=[value]), "Torch.relu.0.backward": {"input": value}}
    )
    try:
        records = list(open_dump(folder).records(0, 0))
    except DamagedRunError:
        return
    assert [record.call for record in records] == [CallName("torch.relu", 0)] * 2
