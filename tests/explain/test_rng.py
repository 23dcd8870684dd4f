# SPDX-License-Identifier: Apache-2.0
"""Random calls: other numbers are a cause where both sides could have drawn the same, and not compared where they could not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.explain.programs import compared, views_of
from tests.match.building import Recorder
from ulpscope.capture import CaptureSession
from ulpscope.explain.programs.draws import explain_rng, remark_on_draws
from ulpscope.model import RunInfo
from ulpscope.store import MemoryRun
from ulpscope.workflows.compare.comparing import compare_runs

Program: TypeAlias = Callable[[int], None]


def draws(*findings: Any) -> list[Any]:
    return [one for one in findings if one.kind == "rng"]


# ---- where both sides could have drawn the same, other numbers are the cause


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_another_stream_is_the_cause(keep: str) -> None:
    [found] = compared({"seed": 1}, {"seed": 2}, mode="*dropout", keep=keep).faults
    assert found.kind == "rng"
    assert found.headline == "other random numbers were drawn: first.drop  dropout (call 0, forward, output 0), step 0, rank 0"
    assert "seed 1 against 2" in found.evidence
    assert "--seed 1" in found.next


@pytest.mark.parametrize("level", ["module", "both"])
def test_another_stream_inside_modules_is_the_cause_too(level: str) -> None:
    [found] = compared({"seed": 1}, {"seed": 2}, mode="*dropout", level=level).faults
    assert (found.kind, found.module) == ("rng", "first.drop")


def run_of(program: Program, *, steps: int = 1, level: Any = "api", keep: Any = "tensors", seed: int = 0) -> MemoryRun:
    """A program that is called once a step, with every generator seeded before."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    run = MemoryRun(RunInfo(versions={"torch": torch.__version__}))
    session = CaptureSession(run.sink(), keep=keep, level=level)
    session.start()
    try:
        for step in range(steps):
            program(step)
            session.step()
    finally:
        session.stop()
    return run


def multiply(step: int) -> None:
    (torch.arange(9.0).reshape(3, 3) @ torch.randn(3, 3)).sum()


@pytest.mark.parametrize("level", ["api", "op"])
def test_two_runs_without_a_seed_differ(level: Any) -> None:
    assert compare_runs(run_of(multiply, level=level), run_of(multiply, level=level)).verdict == "same"
    [found] = compare_runs(run_of(multiply, level=level, seed=1), run_of(multiply, level=level, seed=2)).faults
    assert (found.kind, found.step) == ("rng", 0)
    assert any(line.startswith("random generators differ at the start of the step: torch") for line in found.evidence)


def test_weights_that_were_drawn_otherwise_are_the_cause_and_those_that_were_loaded_are_not() -> None:
    def program(is_loaded: bool) -> Program:
        def step(number: int) -> None:
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
            if is_loaded:
                model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
            model(torch.ones(2, 4)).sum().backward()

        return step

    [found] = compare_runs(run_of(program(False), seed=1), run_of(program(False), seed=2)).faults
    assert (found.kind, found.call) == ("rng", "torch.nn.init.kaiming_uniform_.0")
    assert compare_runs(run_of(program(True), seed=1), run_of(program(True), seed=2)).faults == ()


@pytest.mark.parametrize("at", [0, 1])
def test_a_draw_that_only_one_side_makes_is_named(at: int) -> None:
    def program(is_extra: bool) -> Program:
        def step(number: int) -> None:
            torch.ones(2).exp()
            if is_extra and number == 0 and at == 0:
                torch.rand(2)
            if number == 1 or at == 0:
                multiply(number)
            if is_extra and number == 0 and at == 1:
                torch.rand(2)

        return step

    [found] = compare_runs(run_of(program(True), steps=2), run_of(program(False), steps=2)).faults
    assert (found.kind, found.call, found.step) == ("rng", "torch.rand.0", 0)
    assert found.headline.startswith("random numbers were drawn by the subject only: rand")


@pytest.mark.parametrize("at", [0, 1])
def test_seeding_again_in_the_middle_is_a_cause(at: int) -> None:
    def program(is_seeding: bool) -> Program:
        def step(number: int) -> None:
            if is_seeding and number == 1 and at == 0:
                torch.manual_seed(9)
            multiply(number)
            if is_seeding and number == 0 and at == 1:
                torch.manual_seed(9)

        return step

    [found] = compare_runs(run_of(program(True), steps=2), run_of(program(False), steps=2)).faults
    assert (found.kind, found.call, found.step) == ("rng", "torch.randn.0", 1)
    assert any("re-seeded" in line for line in found.evidence)


class OtherNumbers(TorchDispatchMode):
    """A generator that draws other numbers from the same state."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.flip(0) if func is torch.ops.aten.randn.default else result


def test_a_broken_generator_is_blamed_at_its_draw() -> None:
    def program(step: int) -> None:
        with OtherNumbers():
            multiply(step)

    [found] = compare_runs(run_of(program), run_of(multiply)).faults
    assert (found.kind, found.call) == ("rng", "torch.randn.0")
    assert any("the generator itself draws otherwise" in line for line in found.evidence)


def test_a_generator_of_ones_own_is_told() -> None:
    def program(seed: int) -> Program:
        def step(number: int) -> None:
            torch.rand(4, generator=torch.Generator().manual_seed(seed)).exp()

        return step

    [found] = compare_runs(run_of(program(1)), run_of(program(2))).faults
    assert (found.kind, found.call) == ("rng", "torch.rand.0")
    assert any("a generator of its own" in line for line in found.evidence)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        lambda x: F.rrelu(-x, training=True),
        lambda x: F.gumbel_softmax(x),
        lambda x: torch.lstm(
            x[0], [torch.zeros(2, 8, 8)] * 2, [torch.full((32, 8), 0.1)] * 4, False, 2, 0.5, True, False, True
        )[0],
        lambda x: F.multi_head_attention_forward(
            x[0], x[0], x[0], 8, 2, torch.ones(24, 8), None, None, None, False, 0.5, torch.ones(8, 8), None, True
        )[0],
    ],
    ids=["attention", "rrelu", "gumbel", "lstm", "heads"],
)  # fmt: skip
def test_what_draws_by_an_argument_is_no_wrong_kernel(operation: Any) -> None:
    x = torch.linspace(-1, 1, 8 * 8 * 8).reshape(8, 8, 8)[None]

    def program(step: int) -> None:
        operation(x).square().sum()

    assert compare_runs(run_of(program), run_of(program)).verdict == "same"
    [found] = compare_runs(run_of(program, seed=1), run_of(program, seed=2)).faults
    assert found.kind == "rng"


def test_a_batch_of_other_random_numbers_is_the_cause() -> None:
    model = nn.Linear(4, 2)

    def program(step: int) -> None:
        model(torch.tensor(np.random.rand(3, 4), dtype=torch.float32)).sum().backward()

    assert compare_runs(run_of(program), run_of(program)).verdict == "same"
    [found] = compare_runs(run_of(program, seed=1), run_of(program, seed=2)).faults
    assert found.kind == "batch"
    assert any("random generators differ" in line and "numpy" in line for line in found.evidence)


def test_generators_that_differ_and_are_not_used_are_a_note() -> None:
    def program(step: int) -> None:
        F.dropout(torch.ones(3, 3), 0.5, training=False).exp()

    comparison = compare_runs(run_of(program, seed=1), run_of(program, seed=2))
    assert comparison.faults == ()
    assert [one.level for one in draws(*comparison.findings)] == ["note"]


# ---- where they could not, what is made of other numbers is not compared


def on_npu(run: MemoryRun) -> MemoryRun:
    """The same records as of a device of another kind."""
    made = MemoryRun(run.info)
    sink = made.sink()
    for step in run.steps(0):
        sink.begin_step(step)
        for record in run.records(0, step):
            sink.write(replace(record, slots=tuple(replace(slot, device="npu:0", content=None) for slot in record.slots)))
        sink.end_step()
    sink.close()
    return made


def noisy(step: int) -> None:
    x = torch.linspace(-1, 1, 4096).reshape(64, 64)
    (F.dropout(x, 0.3) @ x).relu()


@pytest.mark.parametrize("keep", ["tensors", "statistics"])
def test_devices_of_two_kinds_cannot_draw_alike(keep: Any) -> None:
    comparison = compare_runs(on_npu(run_of(noisy, keep=keep, seed=1)), run_of(noisy, keep=keep, seed=2))
    assert comparison.faults == ()
    [note] = draws(*comparison.findings)
    assert "the numbers were drawn on npu and cpu" in note.evidence
    assert "dropout 0" in note.next
    assert "draw on the CPU" in note.next
    assert any("draw on the CPU" in line for line in note.evidence)


def test_a_wrong_share_is_a_fault_on_any_device() -> None:
    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args = (args[0], 0.4, *args[2:]) if func is torch.ops.aten.bernoulli_.float else args
            return func(*args, **(kwargs or {}))

    def program(step: int) -> None:
        with Wrong():
            noisy(step)

    [found] = compare_runs(on_npu(run_of(program, seed=1)), run_of(noisy, seed=2)).faults
    assert found.headline.startswith("random numbers are not of one distribution")


def test_dropout_that_is_switched_off_on_one_side_is_a_fault() -> None:
    [found] = compared("*dropout evaluating", "*dropout").faults
    assert (found.level, found.kind, found.call) == ("fault", "arguments", "functional.dropout.0")
    assert "training: False against True" in found.evidence


@pytest.mark.parametrize("share", [0.3, 0.33, 0.6])
def test_numbers_of_another_distribution_are_a_fault(share: float) -> None:
    """The arguments agree; what the kernel does with them does not."""
    views = views_of(compare_runs(dropped(share, seed=1), dropped(0.3, seed=2), replay="none"))
    found = explain_rng(views[0])
    if share < 0.4:
        assert (found, len(remark_on_draws(views))) == (None, 1)
    else:
        assert found is not None
        assert (found.level, found.kind, found.call) == ("fault", "rng", "functional.dropout.0")
        assert any(line.startswith("zeros: ") for line in found.evidence)


def dropped(share: float, seed: int) -> MemoryRun:
    run = MemoryRun()
    recorder = Recorder(run, 0, "tensors", lambda where, value: value)
    recorder.begin(0)
    x = np.linspace(1, 2, 1000, dtype="f4")
    mask = np.random.default_rng(seed).random(x.shape) >= share
    recorder.write("forward", "drop", "functional.dropout", {"input.0": x, "output.0": (x * mask / np.float32(1 - share)).astype("f4")})
    recorder.sink.close()
    return run


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"autocast": True}])
def test_a_dropout_of_nothing_in_another_precision_draws_nothing(options: dict[str, Any]) -> None:
    subject = {name: getattr(torch, value) if name == "dtype" else value for name, value in options.items()}
    views = views_of(compared(subject, {}))
    assert [explain_rng(view) for view in views] == [None] * 3
    assert remark_on_draws(views) == []


def test_what_is_written_into_a_part_of_some_memory_is_found_again_in_the_whole() -> None:
    """Records do not tell which tensors share memory: a whole of which a part was drawn is not a value that changes between calls."""

    def program(step: int) -> None:
        x = torch.linspace(-1, 1, 1024).reshape(64, 16)
        weight = torch.linspace(-1, 1, 256).reshape(16, 16).requires_grad_()
        both = torch.empty(64, 32)
        both[:, :16].copy_(F.dropout(x, 0.2) @ weight)
        both[:, 16:].copy_(x)
        both.softmax(-1).square().sum().backward()

    comparison = compare_runs(on_npu(run_of(program, seed=1)), run_of(program, seed=2))
    assert (comparison.faults, comparison.verdict) == ((), "unknown")


def test_what_follows_from_draws_of_another_device_is_unknown() -> None:
    assert compare_runs(on_npu(run_of(noisy, seed=1)), run_of(noisy, seed=2)).verdict == "unknown"
    assert compare_runs(on_npu(run_of(noisy, seed=1)), run_of(noisy, seed=1)).verdict == "same"
