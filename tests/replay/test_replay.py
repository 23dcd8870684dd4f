# SPDX-License-Identifier: Apache-2.0
"""Recorded calls, run again: bit for bit what was recorded in the native precision, and close to it in float64."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ulpscope
from tests.capture.recording import Recording, recording, slots_of
from tests.harmless import programs as harmless
from tests.replay.cases import CASES, leaf
from ulpscope.judge import multiple_of
from ulpscope.model import Arguments, CallRecord, Run, Slot
from ulpscope.replay import NotReplayable, Program, Reader, Yardstick, backward_program, forward_program, is_random, recorded_results

FOUND = "its result is memory as it was found"
REFUSED = {
    "written_views": {"Tensor.mul_.0 backward: it writes into a view, and the gradient is that of the whole tensor"},
    "strides_laid_over": {
        f"Tensor.as_strided.{number} forward: it looks at memory beyond its input, which was not recorded" for number in (1, 2)
    },
    "given_a_result": {f"torch.empty.{number} forward: {FOUND}" for number in range(4)},
    "random_numbers": {f"torch.empty.{number} forward: {FOUND}" for number in range(2)},
    "differentiated_twice": {
        f"{call} backward: it was differentiated twice, so that its gradient has parts of second order"
        for call in ("torch.tanh.0", "functional.linear.0")
    },
    "users_function": {
        f"Function.Twice.0 {phase}: the code of an autograd.Function is not part of its record" for phase in ("forward", "backward")
    },
    "layouts_without_strides": {
        f"torch.empty.0 forward: {FOUND}",
        f"torch.empty.1 forward: {FOUND}",
        "Tensor.to_sparse.0 forward: 'Tensor.to_sparse' is none of torch's functions on tensors",
        "Tensor.to_dense.0 forward: input.0 is sparse",
        "Tensor.add.0 forward: the values of input.0 were not kept (meta tensor: it has no values)",
    },
}
RANDOM = {
    "random_numbers": Counter(
        {
            "torch.randperm.0 forward": 1,
            "Tensor.normal_.0 forward": 1,
            "torch.nn.init.uniform_.0 forward": 1,
            "torch.rand.0 forward": 1,
            "functional.dropout.0 forward": 1,
            "functional.dropout.0 backward": 1,
            "torch.bernoulli.0 forward": 1,
            "functional.rrelu.0 forward": 1,
            "functional.rrelu.0 backward": 1,
            "Tensor.multinomial.0 forward": 1,
        }
    ),
    "another_default_dtype": Counter({"torch.rand.0 forward": 1}),
}
# The imaginary part is zero, and its sign depends on whether the conjugate was taken in memory.
SIGN_OF_ZERO = {"complex_parts"}


@dataclass(frozen=True)
class Replayed:
    """One record with its program, or the reason why it has none."""

    name: str
    record: CallRecord
    recorded: dict[Slot, torch.Tensor]
    program: Program | None = None
    reason: str = ""


def reader(run: Run, step: int) -> Reader:
    return lambda content: run.tensor(0, step, content)


def replayed(run: Run, step: int) -> list[Replayed]:
    """Return every call of a step that can be built and run, and why the others cannot."""
    read = reader(run, step)
    forwards: dict[Any, CallRecord] = {}
    passes: dict[Any, list[CallRecord]] = defaultdict(list)
    found = []
    for record in run.records(0, step):
        if record.level == "state":
            continue
        values, title = recorded_results(record, read), f"{record.call} {record.phase}"
        try:
            if record.phase == "forward" or record.level == "op":
                forwards[record.call] = record
                program = forward_program(record, read)
            else:
                program = backward_program(forwards[record.call], record, read, earlier=passes[record.call])
                passes[record.call].append(record)
            program(program.inputs)
        except NotReplayable as error:
            found.append(Replayed(title, record, values, reason=str(error)))
        else:
            found.append(Replayed(title, record, values, program))
    return found


@pytest.fixture(scope="module")
def recorded() -> Recording:
    """Record all cases in one recording, each as a step of its own."""
    torch.manual_seed(0)
    with recording() as run:
        for function in CASES.values():
            result = function()
            if result is not None and result.requires_grad:
                result.backward(torch.arange(result.numel()).reshape(result.shape).cos().to(result.dtype))
            run.session.step()
    assert run.ledger == []
    return run


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def widened(program: Program, dtype: torch.dtype = torch.float64) -> dict[Slot, torch.Tensor]:
    return {slot: _widened(tensor, dtype) for slot, tensor in program.inputs.items()}


def _widened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", CASES)
def test_a_call_gives_what_was_recorded(recorded: Recording, name: str) -> None:
    found = replayed(recorded.run, list(CASES).index(name))
    drawing = Counter(each.name for each in found if each.program is not None and is_random(each.program))
    for each in found:
        if each.program is None or each.name in drawing:
            continue
        native = each.program(each.program.inputs)
        if name in SIGN_OF_ZERO:
            native = {slot: tensor + 0.0 for slot, tensor in native.items()}
            each = replace(each, recorded={slot: tensor + 0.0 for slot, tensor in each.recorded.items()})
        assert each.recorded, each.name
        for slot, value in each.recorded.items():
            assert bits(native[slot]) == bits(value), f"{each.name} {slot}"
    assert {f"{each.name}: {each.reason}" for each in found if each.program is None} == REFUSED.get(name, set())
    drawing = Counter(title for title in drawing if "torch.randn." not in title)  # which makes the inputs of most cases
    assert drawing == RANDOM.get(name, Counter())


@pytest.mark.parametrize("name", CASES)
def test_in_float64_it_stays_the_same_call(recorded: Recording, name: str) -> None:
    for each in replayed(recorded.run, list(CASES).index(name)):
        if each.program is None or is_random(each.program):
            continue
        wide = each.program(widened(each.program))
        dtypes = {tensor.dtype for tensor in each.program.inputs.values()}
        is_widened = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes) and torch.float64 not in dtypes
        coarse = {slot.dtype for slot in each.record.slots} | {each.record.modes.autocast if each.record.modes else None}
        share = 0.03 if coarse & {"bfloat16", "float16"} else 1e-5
        for slot, value in each.recorded.items():
            found = wide[slot]
            if is_widened and (found.is_floating_point() or found.is_complex()):
                assert found.dtype in (torch.float64, torch.complex128), f"{each.name} {slot}"
            expected = value.to(torch.complex128)
            size = max(0.01, float(expected.abs().nan_to_num().max())) if value.numel() else 0.0
            assert found.shape == value.shape, f"{each.name} {slot}"
            assert torch.allclose(found.to(torch.complex128), expected, rtol=share, atol=share * size, equal_nan=True), (
                f"{each.name} {slot}"
            )


def test_low_precision_is_replayed_in_float32(recorded: Recording) -> None:
    found = [each for each in replayed(recorded.run, list(CASES).index("low_precision")) if each.program is not None]
    assert len(found) > 10
    for each in found:
        if each.program is None or all(tensor.dtype is not torch.bfloat16 for tensor in each.program.inputs.values()):
            continue
        wide = each.program(widened(each.program, torch.float32))
        assert {wide[slot].dtype for slot in each.recorded} == {torch.float32}, each.name


def test_nothing_is_left_behind(recorded: Recording) -> None:
    """Inputs, generators, default dtype, grad mode and autocast are as before, also where a call writes or draws or fails."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for name in ("in_place", "written_items", "random_numbers", "autocast", "many_tensors", "another_default_dtype", "convolutions"):
        for each in replayed(recorded.run, list(CASES).index(name)):
            if each.program is not None:
                kept = {slot: bits(tensor) for slot, tensor in each.program.inputs.items()}
                each.program(each.program.inputs)
                each.program(widened(each.program))
                assert {slot: bits(tensor) for slot, tensor in each.program.inputs.items()} == kept, each.name
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_tensor_keeps_its_strides_where_that_is_cheap() -> None:
    with recording() as run:
        wide = torch.randn(4, 6)
        wide.t().abs()
        wide[:, ::2].abs()
        torch.randn(4, 1).expand(4, 6).abs()
        torch.randn(4, 100)[:, ::50].abs()
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).abs()
    strides = [forward_program(record, reader(run.run, 0)).inputs[Slot.parse("input.0")].stride() for record in run.calls("Tensor.abs")]
    assert strides == [(1, 6), (6, 2), (6, 1), (2, 1), (48, 1, 12, 3)]


def test_gradients_of_a_tensor_that_is_passed_twice() -> None:
    """They are summed under its first slot; where equal values leave open whose second slot it is, nothing is said."""
    with recording() as run:
        x, y = leaf(3), leaf(3)
        torch.stack([x, y, x]).cumsum(0).sum().backward()
        torch.stack([x, x * 1, x, y]).cumsum(0).sum().backward()
    clear, open_ = zip(run.calls("torch.stack"), run.calls("torch.stack", "backward"), strict=True)
    assert slots_of(clear[1]) == ["input.0", "output.0.0", "output.0.1"]
    program = backward_program(*clear, reader(run.run, 0))
    assert {str(slot): tensor.tolist() for slot, tensor in program(program.inputs).items()} == {
        "output.0.0": [4.0] * 3,
        "output.0.1": [2.0] * 3,
    }
    program = backward_program(*open_, reader(run.run, 0))
    assert {str(slot): tensor.tolist() for slot, tensor in program(program.inputs).items()} == {"output.0.3": [1.0] * 3}


def test_another_side_s_arguments() -> None:
    with recording() as run:
        x = leaf(4, 6)
        F.gelu(x, approximate="tanh").sum().backward()
        F.gelu(input=x).sum().backward()
        F.layer_norm(x, (6,), torch.ones(6), eps=1e-5)
        F.layer_norm(x, (6,), eps=0.5)
    read = reader(run.run, 0)
    (tanh, exact), (first, second) = run.calls("functional.gelu"), run.calls("functional.layer_norm")
    swapped = forward_program(tanh, read, arguments=exact.arguments)
    assert torch.equal(swapped(swapped.inputs)[Slot.parse("output.0")], F.gelu(x.detach()))
    backward = backward_program(tanh, run.calls("functional.gelu", "backward")[0], read, arguments=exact.arguments)
    (expected,) = torch.autograd.grad(F.gelu(x).sum(), x)
    assert torch.equal(backward(backward.inputs)[Slot.parse("output.0")], expected)
    without_weight = forward_program(first, read, arguments=second.arguments)
    assert torch.equal(without_weight(without_weight.inputs)[Slot.parse("output.0")], F.layer_norm(x.detach(), (6,), eps=0.5))
    with pytest.raises(NotReplayable, match="2 tensors cannot take the places of 1"):
        forward_program(second, read, arguments=first.arguments)
    with pytest.raises(NotReplayable, match=r"an argument of type os\.Path"):
        forward_program(second, read, arguments=Arguments(args=({"$tensor": "input.0"}, {"$object": "os.Path", "repr": ""})))


@pytest.mark.parametrize(
    ("call", "share"),
    [
        (lambda x: F.rms_norm(x * 1e-4, (8,)), 1e-5),
        (lambda x: torch.nan_to_num(x / 0), 0.0),
        (lambda x: F.rms_norm((x * 1e-4).bfloat16(), (8,)), 0.02),
    ],
    ids=["epsilon of a norm", "largest number", "epsilon in low precision"],
)
def test_defaults_that_torch_takes_from_the_dtype_stay(call: Any, share: float) -> None:
    with recording() as run:
        call(torch.randn(4, 8))
    record = next(record for record in run.records if record.call.short in ("rms_norm", "nan_to_num"))
    program = forward_program(record, reader(run.run, 0))
    (native,), (wide,) = program(program.inputs).values(), program(widened(program)).values()
    assert torch.allclose(native.double(), wide, rtol=share, atol=0.0)


def test_autocast_of_another_device() -> None:
    """Its lists are not those of the CPU: there softmax gives float32, and here low precision."""
    with recording() as run:
        x, weight = leaf(4, 6), leaf(6, 6)
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(x, weight).float().softmax(-1).sum().backward()
        y = F.linear(x.detach(), weight.detach()).bfloat16()
        F.softmax(y.float(), -1)
    read = reader(run.run, 0)
    first, second = run.calls("functional.linear")[0], run.calls("functional.softmax")[0]
    assert first.modes is not None
    there = replace(first, slots=tuple(replace(slot, device="cuda:0") for slot in first.slots))
    program = forward_program(there, read)
    assert bits(program(program.inputs)[Slot.parse("output.0")]) == bits(recorded_results(first, read)[Slot.parse("output.0")])
    wide = program(widened(program))[Slot.parse("output.0")]
    assert torch.equal(wide, F.linear(x.detach().bfloat16().double(), weight.detach().bfloat16().double()))
    backward = run.calls("functional.linear", "backward")[0]
    gradients = backward_program(there, backward, read)
    for slot, value in recorded_results(backward, read).items():
        assert bits(gradients(gradients.inputs)[slot]) == bits(value)
    content = run.calls("Tensor.float")[-1].slots[0]
    low = replace(
        second,
        modes=replace(first.modes, grad=False),
        slots=(replace(content, device="npu:0"), *(slot for slot in second.slots if slot.slot.role == "output")),
    )
    program = forward_program(low, read)
    assert {tensor.dtype for tensor in program.inputs.values()} == {torch.bfloat16}
    assert bits(program(program.inputs)[Slot.parse("output.0")]) == bits(recorded_results(second, read)[Slot.parse("output.0")])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_autocast_rounds_away_is_no_error_of_the_call(dtype: torch.dtype) -> None:
    """Attention on inputs far from zero: rounded to 16 bits they are other inputs, and every kernel is given those."""
    with recording() as run:
        q, k, v = (leaf(1, 2, 12, 8).detach().mul(3).add(100).requires_grad_() for _ in range(3))
        with torch.autocast("cpu", dtype):
            made = F.scaled_dot_product_attention(q, k, v)
        made.float().square().sum().backward()
    forward, backward = (run.calls("functional.scaled_dot_product_attention", phase)[0] for phase in ("forward", "backward"))
    assert forward.slots[-1].dtype == str(dtype).removeprefix("torch.")
    read = reader(run.run, 0)
    for program, record in ((forward_program(forward, read), forward), (backward_program(forward, backward, read), backward)):
        assert all(torch.equal(one, one.to(dtype).to(one.dtype)) for one in program.inputs.values())
        assert not torch.equal(program.inputs[Slot.parse("input.0")], q.detach())
        recorded = recorded_results(record, read)
        for slot, native in program(program.inputs).items():
            assert bits(native) == bits(recorded[slot])
        assert all(multiple_of(one) <= 1 for one in Yardstick(program).measure(recorded))
    off = {slot: value * 1.2 for slot, value in recorded_results(forward, read).items()}
    assert all(multiple_of(one) > 1 for one in Yardstick(forward_program(forward, read)).measure(off))


def test_autocast_leaves_alone_what_it_does_not_cast() -> None:
    with recording() as run:
        x = leaf(4, 6)
        with torch.autocast("cpu", torch.bfloat16):
            torch.exp(x)
    program = forward_program(run.calls("torch.exp")[0], reader(run.run, 0))
    assert torch.equal(next(iter(program.inputs.values())), x.detach())


def test_operations_below_the_functions() -> None:
    x, weight = leaf(4, 6), leaf(6, 6)
    with recording(level="op") as run:
        F.cross_entropy(F.layer_norm(F.linear(x, weight), (6,)), torch.arange(4)).backward()
    found = replayed(run.run, 0)
    assert {each.record.phase for each in found} == {"forward", "backward"}
    assert {each.reason for each in found if each.program is None} <= {FOUND}
    for each in found:
        if each.program is not None:
            native, wide = each.program(each.program.inputs), each.program(widened(each.program))
            assert each.recorded
            for slot, value in each.recorded.items():
                assert bits(native[slot]) == bits(value), f"{each.name} {slot}"
                assert torch.allclose(wide[slot].double(), value.double(), atol=1e-5), f"{each.name} {slot}"


FEW = ("gpt_dropout", "conv_batch_norm", "in_place", "views_written_to", "complex_numbers", "lstm", "autograd_function")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("names", "floor"), [(FEW, 0.93), pytest.param(tuple(harmless.PROGRAMS), 0.96, marks=pytest.mark.long)])
def test_most_calls_of_the_programs_can_be_replayed(
    names: tuple[str, ...], floor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs of tests/harmless: of all of them 96.7 % when this was written, the rest being modules, Functions and odd layouts."""
    counts: Counter[str] = Counter()
    for name in names:

        def record(model: Any = None, optimizer: Any = None, name: str = name) -> ulpscope.Capture:
            return ulpscope.Capture(tmp_path / name, model, optimizer=optimizer, level="api", keep="tensors")

        harmless.run(name, record)
        for folder in sorted(tmp_path.glob(f"{name}*")):
            run = ulpscope.open_run(folder)
            for each in (each for step in run.steps(0) for each in replayed(run, step)):
                counts["replayed" if each.program is not None else each.reason] += 1
    share = counts["replayed"] / counts.total()
    with capsys.disabled():
        print(f" {share:.1%} of {counts.total()} replayed ", end="")
    assert share >= floor
