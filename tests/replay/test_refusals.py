# SPDX-License-Identifier: Apache-2.0
"""Refuse records that lie: a name is called only where it is arithmetic, and a result is made only where it fits into memory."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ulpscope
from ulpscope.model import Arguments, CallName, CallRecord, Level, Phase, Slot, TensorData, TensorRecord
from ulpscope.replay import NotReplayable, backward_program, forward_program, is_random, recorded_results
from ulpscope.replay.calls import memory_need as sizes
from ulpscope.replay.calls.rebuild import function_of

X = {"$tensor": "input.0"}
CONTENT = {
    "x": TensorData("float32", (2, 2), struct.pack("<4f", 1, 2, 3, 4)),
    "counts": TensorData("int64", (2,), struct.pack("<2q", 1, 2**40)),
    "images": TensorData("float32", (3, 2, 8, 8), bytes(4 * 3 * 2 * 8 * 8)),
    "kernels": TensorData("float32", (5, 2, 3, 3), bytes(4 * 5 * 2 * 3 * 3)),
}


def record(
    op: str, *args: Any, level: Level = "api", phase: Phase = "forward", slots: dict[str, str] | None = None, **kwargs: Any
) -> CallRecord:
    """Make a call with the tensors `slots` (slot: content), or with one 2 by 2 tensor wherever its arguments name it."""
    if slots is None:
        slots = {"input.0": "x"} if X in args else {}
    tensors = tuple(
        TensorRecord(slot=Slot.parse(slot), dtype=CONTENT[name].dtype, shape=CONTENT[name].shape, content=name)
        for slot, name in slots.items()
    )
    return CallRecord(
        rank=0,
        step=0,
        order=0,
        call=CallName(op, 0),
        phase=phase,
        level=level,
        arguments=Arguments(args=args, kwargs=kwargs),
        slots=tensors,
    )


def run(call: CallRecord) -> dict[Slot, torch.Tensor]:
    program = forward_program(call, CONTENT.__getitem__)
    return program(program.inputs)


def test_a_record_made_by_hand_runs() -> None:
    """Run one, so that the refusals below test their own reason."""
    assert run(record("Tensor.add", X, X))[Slot.parse("output.0")].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert run(record("aten.mul.Tensor", X, X, level="op"))[Slot.parse("output.0")].tolist() == [[1.0, 4.0], [9.0, 16.0]]


@pytest.mark.parametrize(
    "op",
    """
    torch.save torch.load torch.hub.load torch.compile torch.from_file torch.frombuffer torch.set_num_threads torch.manual_seed
    torch.set_default_dtype torch._import_dotted_name torch.ops.load_library torch.classes.load_library torch.jit.load torch.vmap
    torch.utils.cpp_extension.load torch.__builtins__ torch.os.system torch.sys.exit torch.nn.functional.warnings.warn torch._from_blob
    functional.handle_torch_function functional.boolean_dispatch functional.importlib.import_module functional.__builtins__ functional.torch
    functional.warnings functional.Tensor functional._add_docstr Tensor.share_memory_ Tensor.backward Tensor.register_hook Tensor.data_ptr
    Tensor.set_ Tensor.numpy Tensor.item Tensor.tolist Tensor.storage Tensor.apply_ Tensor.map_ Tensor.__reduce_ex__ Tensor.__class__
    Tensor.__init__ Tensor.__setstate__ Tensor.__getattribute__ Tensor.__init_subclass__ Tensor.grad Tensor.data Tensor.module_load
    Tensor.record_stream Tensor.pin_memory Tensor.requires_grad_ Tensor.new Tensor._make_subclass os.system builtins.eval subprocess.run
    operator.attrgetter numpy.load unknown.thing nothing  ..  torch. .torch Tensor ops ops.x ops.aten ops.load_library.default aten
    aten.from_file aten.save.default aten._print aten.set_.source_Tensor aten.add.NoSuchOverload aten.no_such_operation aten.__class__
    aten.add.__call__ aten.add._schema aten._index_put_impl_.default aten._unsafe_index.Tensor ops.aten.from_file ops.prim.device.default
    ops.c10d.allreduce_.default ops._c10d_functional.all_reduce.default ops.profiler._record_function_enter.default
    ops.ulpscope_replay.writes_file ops.inductor.accumulate_grad_.default ops.no_such_library.operation torch.linalg.torch
    torch.nn.init.warnings torch.fft.sys torch.special.os torch._C._nn.__loader__ torch.__builtins__.eval torch.__builtins__.exec
    functional.__dict__ functional.__loader__.load_module Tensor.tofile Tensor.__torch_function__ Tensor.__dir__ torch.serialization.load
    torch.serialization.add_safe_globals torch.package.PackageImporter torch.hub.load_state_dict_from_url torch.library.custom_op
    torch.overrides.handle_torch_function torch._dynamo.optimize torch.utils.cpp_extension.load_inline torch._C._nn.__class__
    torch.result_type VF.save VF.load VF.__builtins__ torch.fft.torch.load ops.quantized.linear_prepack.default quantized.linear.default
    ops.mkldnn._linear_pointwise.default ops.aten.set.source_Storage aten.set.source_Storage ops.aten._nnpack_available
    ops.torch.load ops.__class__.__init__ ops._dir.append ops.loaded_libraries.add ops.import_module.x ops.higher_order.cond
    """.split(),
)
def test_only_arithmetic_is_called(op: str) -> None:
    for level in ("api", "op"):
        with pytest.raises(NotReplayable):
            run(record(op, X, level=level))


@torch.library.custom_op("ulpscope_replay::writes_file", mutates_args=())
def writes_file(x: torch.Tensor, path: str) -> torch.Tensor:
    Path(path).write_text("harm")
    return x.clone()


@pytest.mark.parametrize("op", ["torch.save", "torch.from_file", "aten.from_file.default", "ops.aten.save", "Tensor.tofile", "VF.save"])
def test_no_name_of_a_dump_writes_a_file(op: str, tmp_path: Path) -> None:
    for arguments in ((X, str(tmp_path / "harm")), (str(tmp_path / "harm"), True, 4)):
        with pytest.raises(NotReplayable):
            run(record(op, *arguments, slots={"input.0": "x"}))
    assert not list(tmp_path.iterdir())


def test_what_can_be_named_takes_tensors_and_numbers() -> None:
    """Of all operations that torch registers and a dump may name, none takes text but a choice among words."""
    texts = set()
    for name in torch._C._dispatch_get_all_op_names():
        op = name.replace("::", ".") if "." in name else f"{name.replace('::', '.')}.default"
        try:
            function = function_of(op, "op")
        except NotReplayable:
            continue
        if isinstance(function, torch._ops.OpOverload) and not re.search("dimname|names|named", function._overloadname, re.IGNORECASE):
            texts |= {argument.name for argument in function._schema.arguments if "str" in str(argument.type)}
            assert not any("Storage" in str(argument.type) for argument in function._schema.arguments), op
    assert texts <= set(
        """
        UPLO activation approximate driver equation indexing interpolation mode norm ord p pad_mode padding padding_side reduce
        rounding_mode side
        """.split()
    )


def test_asking_for_a_name_makes_nothing() -> None:
    """`torch.ops` makes a namespace for any name that it is asked for."""
    with pytest.raises(NotReplayable):
        function_of("ops.ulpscope_never_heard_of.x")
    assert "ulpscope_never_heard_of" not in vars(torch.ops)


def test_a_registered_operation_that_takes_text_is_not_called(tmp_path: Path) -> None:
    target = tmp_path / "harm"
    with pytest.raises(NotReplayable, match="more than tensors and numbers"):
        run(record("ops.ulpscope_replay.writes_file", X, str(target)))
    assert not target.exists()


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("module.Linear", "the code of a module"),
        ("Function.Cube", "the code of an autograd.Function"),
        ("distributed.all_reduce", "a collective needs its other ranks"),
        ("optimizer.SGD", "parameters and state"),
        ("state.batch", "not a call"),
        ("torch.empty_like", "memory as it was found"),
        ("aten.empty_like.default", "memory as it was found"),
    ],
)
def test_what_cannot_be_replayed_says_why(op: str, reason: str) -> None:
    with pytest.raises(NotReplayable, match=reason):
        forward_program(record(op, X), CONTENT.__getitem__)


@pytest.mark.parametrize(
    "call",
    [
        record("torch.zeros", 10**12),
        record("torch.zeros", {"$size": [10**6, 10**6]}),
        record("torch.ones", {"$tuple": [2**40]}, device={"$device": "npu:0"}),
        record("torch.full", [2**20, 2**20], 1.0),
        record("torch.arange", 1e13),
        record("torch.linspace", 0.0, 1.0, steps=10**12),
        record("torch.eye", 10**7),
        record("torch.randperm", 10**12),
        record("Tensor.repeat", X, 10**6, 10**6),
        record("Tensor.expand", X, 10**10, 2, 2),
        record("Tensor.new_zeros", X, [10**13]),
        record("functional.pad", X, [0, 10**12]),
        record("functional.interpolate", X, slots={"input.0": "x"}, size=[10**12]),
        record("functional.conv2d", X, {"$tensor": "input.1"}, padding=10**6, slots={"input.0": "images", "input.1": "kernels"}),
        record("torch.conv2d", X, {"$tensor": "input.1"}, None, 1, [1, 10**12], slots={"input.0": "images", "input.1": "kernels"}),
        record("Tensor.repeat_interleave", X, 10**12),
        record("torch.repeat_interleave", X, slots={"input.0": "counts"}),
        record("functional.one_hot", X, slots={"input.0": "counts"}),
        record("torch.bincount", X, slots={"input.0": "counts"}),
        record("torch.bincount", {"$tensor": "input.0"}, slots={"input.0": "counts"}, minlength=10**12),
        record("torch.bincount", X, None, 3, slots={"input.0": "counts"}),
        record("aten.zeros.default", [10**13], level="op"),
        record("aten.repeat.default", X, [10**12, 1], level="op"),
        record("torch.tril_indices", 10**7, 10**7),
        record("torch.meshgrid", *[{"$tensor": "input.0"}] * 40, slots={"input.0": "counts"}),
    ],
    ids=lambda call: str(call.call),
)
def test_nothing_huge_is_made(call: CallRecord) -> None:
    with pytest.raises(NotReplayable, match="elements"):
        run(call)


def test_a_convolution_that_fits_is_run_and_needs_no_look_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_on_meta", lambda record: pytest.fail("a meta run"))
    call = record("functional.conv2d", X, {"$tensor": "input.1"}, padding=100, slots={"input.0": "images", "input.1": "kernels"})
    assert run(call)[Slot.parse("output.0")].shape == (3, 5, 206, 206)


def test_a_record_that_says_its_result_is_huge_is_not_run() -> None:
    call = record("torch.zeros", 1)
    huge = TensorRecord(slot=Slot.parse("output.0"), dtype="float32", shape=(2**20, 2**20))
    with pytest.raises(NotReplayable, match="1,099,511,627,776 elements"):
        forward_program(CallRecord(**{**_fields(call), "slots": (huge,)}), CONTENT.__getitem__)


def _fields(call: CallRecord) -> dict[str, Any]:
    return {name: getattr(call, name) for name in CallRecord.__dataclass_fields__}


@pytest.mark.parametrize(
    "arguments",
    [
        (X, {"$tensor": "input.1"}),
        (X, {"$tensor": "nothing"}),
        (X, {"$tensor": 3}),
        (X, {"$tensor": None}),
        (X, {"$object": "os.PathLike", "repr": "x"}),
        (X, {"$dtype": "qint8"}),
        (X, {"$dtype": ["float32"]}),
        (X, {"$slice": [1]}),
        (X, {"$slice": 5}),
        (X, {"$size": ["a"]}),
        (X, {"$int": "9" * 5000}),
        (X, {"$int": "x"}),
        (X, {"$complex": 1}),
        (X, {"$layout": "sparse_coo"}),
        (X, {"$memory_format": "no such"}),
        (X, {"$device": "meta"}),
        (X, {"$call": "os.system"}),
        (X, "cut off…"),
        (X, b"bytes"),
        (X, list(range(5000))),
        (X, X, X, X, X),
        (X, "text"),
        (),
    ],
    ids=repr,
)
def test_arguments_that_make_no_sense_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(NotReplayable):
        run(record("Tensor.add", *arguments, slots={"input.0": "x"}))


def test_deep_nesting_is_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(NotReplayable, match="nested too deeply"):
        run(record("torch.tensor", deep))


@pytest.mark.parametrize("change", [{"content": None}, {"dtype": "no such"}, {"shape": (3, 3)}, {"dtype": "float64"}])
def test_a_tensor_that_is_not_what_the_record_says(change: dict[str, Any]) -> None:
    call = record("Tensor.neg", X)
    slot = {name: getattr(call.slots[0], name) for name in TensorRecord.__dataclass_fields__} | change
    program_of = CallRecord(**{**_fields(call), "slots": (TensorRecord(**slot),)})
    if change == {"dtype": "float64"}:
        assert run(program_of)[Slot.parse("output.0")].dtype is torch.float32
    else:
        with pytest.raises(NotReplayable):
            run(program_of)


@given(st.text(max_size=40) | st.from_regex(r"(torch|Tensor|functional|aten|ops|torch\.linalg)(\.[a-z_]{1,12}){1,3}", fullmatch=True))
def test_any_name_gives_a_function_or_a_reason(op: str) -> None:
    try:
        function = function_of(op)
    except NotReplayable:
        return
    assert callable(function)


def test_strides_that_overlap_or_spread_are_not_taken_at_their_word() -> None:
    for strides in ((0, 0), (1, 1), (2**40, 1), (-1, 1), (1,), (2, 1, 1)):
        call = record("Tensor.neg", X)
        slot = {name: getattr(call.slots[0], name) for name in TensorRecord.__dataclass_fields__} | {"strides": strides}
        program = forward_program(CallRecord(**{**_fields(call), "slots": (TensorRecord(**slot),)}), CONTENT.__getitem__)
        assert program.inputs[Slot.parse("input.0")].stride() == (2, 1)


def test_backward_records_need_what_they_are_made_of() -> None:
    forward = record("Tensor.square", X)
    gradient = TensorRecord(slot=Slot.parse("input.0"), dtype="float32", shape=(2, 2), content="x")
    result = TensorRecord(slot=Slot.parse("output.0"), dtype="float32", shape=(2, 2), content="x")

    def backward(*slots: TensorRecord) -> CallRecord:
        return CallRecord(**{**_fields(forward), "phase": "backward", "arguments": None, "slots": slots})

    program = backward_program(forward, backward(gradient, result), CONTENT.__getitem__)
    assert program(program.inputs)[result.slot].tolist() == [[2.0, 8.0], [18.0, 32.0]]
    elsewhere = TensorRecord(slot=Slot.parse("output.0.node"), dtype="float32", shape=(2, 2), content="x")
    for slots, reason in (
        ((result,), "the gradient of its results was not recorded"),
        ((gradient,), "no gradient of its inputs was kept"),
        ((gradient, elsewhere), "belongs to no recorded input"),
        ((TensorRecord(slot=gradient.slot, dtype="float32", shape=(2, 2)), result), "was not kept"),
    ):
        with pytest.raises(NotReplayable, match=reason):
            backward_program(forward, backward(*slots), CONTENT.__getitem__)
    with pytest.raises(NotReplayable, match="together with its forward"):
        forward_program(backward(gradient, result), CONTENT.__getitem__)


def test_a_dump_of_msprobe_is_replayed(tmp_path: Path) -> None:
    """Names, arguments and tensors as that tool writes them; no strides, and lists where there were tuples."""
    folder = tmp_path / "step0" / "rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    x = torch.arange(12.0).reshape(3, 4)
    weight = torch.ones(2, 4) * 0.5
    values = {"x": x, "w": weight, "linear": torch.nn.functional.linear(x, weight), "part": x[1:, 0], "softmax": x.softmax(-1)}
    for name, tensor in values.items():
        torch.save(tensor, folder / "dump_tensor_data" / f"{name}.pt")

    def leaf(name: str) -> dict[str, Any]:
        return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": list(values[name].shape), "data_name": f"{name}.pt"}

    def entry(inputs: list[Any], output: str, **kwargs: Any) -> dict[str, Any]:
        return {"input_args": inputs, "input_kwargs": kwargs, "output": [leaf(output)]}

    index = [{"type": "slice", "value": [1, None, None]}, {"type": "int", "value": 0}]
    data = {
        "Functional.linear.0.forward": entry([leaf("x"), leaf("w")], "linear"),
        "Tensor.__getitem__.0.forward": entry([leaf("x"), index], "part"),
        "Torch.softmax.0.forward": entry(
            [leaf("x"), {"type": "int", "value": -1}], "softmax", dtype={"type": "torch.dtype", "value": "torch.float32"}
        ),
        "NPU.npu_swiglu.0.forward": entry([leaf("x")], "x"),
    }
    (folder / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L1", "dump_data_dir": "x", "data": data}))
    dump = ulpscope.open_run(tmp_path)
    found = {}
    for call in dump.records(0, 0):
        program = forward_program(call, lambda content: dump.tensor(0, 0, content))
        recorded = recorded_results(call, lambda content: dump.tensor(0, 0, content))
        found[str(call.call)] = torch.equal(program(program.inputs)[Slot.parse("output.0")], recorded[Slot.parse("output.0")])
        assert not is_random(program)
    assert found == {"functional.linear.0": True, "Tensor.__getitem__.0": True, "torch.softmax.0": True, "npu.npu_swiglu.0": False}
