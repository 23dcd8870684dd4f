# SPDX-License-Identifier: Apache-2.0
"""Run implementations and measure them: one row for each result.

In float32 an alternative computes in float32 throughout. In bfloat16 and float16 it computes in float32 and rounds its result, as kernels
do; run op by op in the narrow dtype it is a program of many kernels (kind "program"), which is shown and sets no limit.
On an accelerator the operation itself, with every backend that offers it, comes first and the alternatives run there too.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from bench.zoo.inputs import CALIBRATION, HELD, Sampler, Source
from bench.zoo.operations import OPERATIONS, Implementation, Operation
from bench.zoo.programs import Backward, Forward, backward, forward
from torch.nn.attention import SDPBackend, sdpa_kernel

from ulpscope.model import OperandFormat, Slot, SlotReplay
from ulpscope.replay.yardstick.yardstick import Yardstick

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCTS = frozenset({"linear", "bmm", "conv2d", "conv1d", "sdpa", "sdpa causal", "lstm_cell"})
CALLS = {"sdpa": "scaled_dot_product_attention", "sdpa causal": "scaled_dot_product_attention", "adamw step": "optimizer.AdamW"}
"""What a run records an operation as, where that is not its name here; what has a leeway is known by it."""
UNSUPPORTED_LOW = frozenset({"inverse"})


@dataclass(frozen=True)
class Row:
    """One implementation's result on one input. `half` is calibration or held; `kind` kernel or program."""

    half: str
    kind: str
    op: str
    implementation: str
    dtype: str
    distribution: str
    size: str
    phase: str
    slot: str
    numel: int = 0
    max_ratio: float = 0.0
    rms_ratio: float = 0.0
    bias: float | None = None
    scale: float | None = None
    native_ratio: float | None = None
    num_nonfinite: int = 0
    num_flipped: int = 0
    leeway: float = 1.0
    raised: str = ""


@dataclass(frozen=True)
class Case:
    """One computation: the operation, its dtype and its inputs."""

    half: str
    operation: Operation
    dtype: str
    distribution: str
    size: Any
    phase: str
    program: Forward | Backward


@dataclass(frozen=True)
class Way:
    """One way to compute it: a function, a device, and the settings."""

    name: str
    function: Callable[..., Any]
    kind: str = "kernel"
    device: str = "cpu"
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext
    operands: OperandFormat | None = None
    autocast: str | None = None


@dataclass(frozen=True)
class Task:
    """One operation in one dtype and half: what one process does at a time."""

    half: str
    op: str
    dtype: str
    device: str


def tasks(device: str, dtypes: list[str], ops: list[str]) -> list[Task]:
    return [Task(half, op, dtype, device) for half in ("calibration", "held") for op in ops for dtype in dtypes]


def rows_of(task: Task) -> list[Row]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with full_precision():
        return list(_operation_rows(task.half, OPERATIONS[task.op], task.dtype, task.device))


def _operation_rows(half: str, operation: Operation, dtype: str, device: str) -> Iterator[Row]:
    if dtype != "float32" and operation.name in UNSUPPORTED_LOW:
        return
    distributions = CALIBRATION if half == "calibration" else HELD
    sizes = operation.sizes if half == "calibration" else operation.held_sizes
    for number, (distribution, sampler) in enumerate(distributions.items()):
        for size in sizes if distribution not in operation.excluded else ():
            seed = 1000 * number + (0 if half == "calibration" else 500)
            for case in cases(half, operation, dtype, distribution, sampler, size, seed):
                yield from _case_rows(case, device)


def cases(half: str, operation: Operation, dtype: str, distribution: str, sampler: Sampler, size: Any, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    values = operation.shapes(size, Source(sampler, DTYPES[dtype], generator))
    name = CALLS.get(operation.name, operation.name)
    program = forward(name, operation.function, values)
    yield Case(half, operation, dtype, distribution, size, "forward", program)
    if operation.has_backward:
        result = next(iter(program(program.inputs).values()))
        gradient = torch.randn(result.shape, generator=generator).to(DTYPES[dtype])
        again = backward(name, operation.function, values, gradient, operation.num_differentiable)
        yield Case(half, operation, dtype, distribution, size, "backward", again)


def _case_rows(case: Case, device: str) -> Iterator[Row]:
    yardsticks: dict[object, Yardstick] = {}
    for way in ways(case, device):
        try:
            yield from rows_by(case, way, yardsticks)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            yield Row(*_labels(case, way, case.dtype), slot="", raised=reason)
            if isinstance(error, (AssertionError, AttributeError)):
                traceback.print_exc()


def rows_by(case: Case, way: Way, yardsticks: dict[object, Yardstick] | None = None) -> Iterator[Row]:
    """Yield the results of one way; yardsticks that other ways may share are kept in `yardsticks`."""
    known = {} if yardsticks is None else yardsticks
    yardstick = known.setdefault((way.operands, way.autocast), Yardstick(_program(case, way), operands=way.operands))
    for one in yardstick.measure(recorded(_given(case, way), way)):
        yield _row(case, way, one)


def _given(case: Case, way: Way) -> Forward | Backward:
    """Round the entering gradient under autocast to the narrow dtype of the result."""
    return _narrowed(case.program, way.autocast, lambda slot: slot.role == "gradient")


def _program(case: Case, way: Way) -> Forward | Backward:
    """Build the program as replay would: under autocast a kernel gets rounded arguments, and is judged by those."""
    return _narrowed(case.program, way.autocast, lambda slot: True)


def _narrowed(program: Forward | Backward, autocast: str | None, which: Callable[[Slot], bool]) -> Forward | Backward:
    if autocast is None:
        return program
    narrow = {slot: one.to(DTYPES[autocast]) if which(slot) and one.is_floating_point() else one for slot, one in program.inputs.items()}
    return replace(program, inputs=narrow)


def recorded(program: Forward | Backward, way: Way) -> dict[Any, torch.Tensor]:
    """Run this way, and return the results on the CPU."""
    inputs = {slot: one.to(way.device) for slot, one in program.inputs.items()}
    with way.settings():
        found = replace(program, function=way.function, inputs=inputs)(inputs)
    return {slot: one.detach().cpu() for slot, one in found.items()}


def _labels(case: Case, way: Way, dtype: str) -> tuple[str, ...]:
    return case.half, way.kind, case.operation.name, way.name, dtype, case.distribution, str(case.size), case.phase


def _row(case: Case, way: Way, one: SlotReplay) -> Row:
    return Row(
        *_labels(case, way, one.dtype),
        slot=str(one.slot),
        numel=one.numel,
        max_ratio=one.max_ratio,
        rms_ratio=one.rms_ratio,
        bias=one.bias,
        scale=one.scale,
        native_ratio=one.native_ratio,
        num_nonfinite=one.num_nonfinite,
        num_flipped=one.num_flipped,
        leeway=one.leeway,
    )


def ways(case: Case, device: str) -> Iterator[Way]:
    operation = case.operation
    yield from _native_ways(case, device)
    for one in operation.implementations:
        if not _is_due(one, case, device):
            continue
        if case.dtype == "float32":
            yield Way(one.name, one.function, device=device)
        else:
            yield Way(f"{one.name}, inside float32", _inside_float32(one, DTYPES[case.dtype]), device=device)
            if device == "cpu":
                yield Way(f"{one.name}, op by op", one.function, "program", device=device)


def _is_due(one: Implementation, case: Case, device: str) -> bool:
    """Tell whether to run it. Loops run in float32 on the CPU only: their bits are the same elsewhere, and no narrow kernel adds so."""
    is_early = one.held and case.half == "calibration"
    is_dishonest = case.distribution in one.excluded or (one.forward_only and case.phase == "backward")
    is_elsewhere = one.is_loop and (device, case.dtype) != ("cpu", "float32")
    return not (is_early or is_dishonest or is_elsewhere)


def _native_ways(case: Case, device: str) -> Iterator[Way]:
    function = case.operation.function
    yield Way("native", function, device=device)
    is_float32, is_product = case.dtype == "float32", case.operation.name in PRODUCTS
    for dtype in ("bfloat16", "float16") if is_product and is_float32 else ():
        settings = partial(torch.autocast, device.partition(":")[0], DTYPES[dtype])
        yield Way(f"native, autocast {dtype}", function, device=device, settings=settings, autocast=dtype)
    if device == "cpu":
        return
    if is_product and is_float32:
        yield Way("native, TF32", function, device=device, settings=_tf32, operands="tf32")
    if is_product and not is_float32:
        yield Way("native, no reduced reduction", function, device=device, settings=_full_reduction)
    if "conv" in case.operation.name or "norm" in case.operation.name:
        yield Way("native, without cuDNN", function, device=device, settings=partial(torch.backends.cudnn.flags, enabled=False))
    if case.operation.name.startswith("sdpa"):
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
            if not (is_float32 and backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)):
                yield Way(f"native, {backend.name.lower()}", function, device=device, settings=partial(sdpa_kernel, backend))
    if case.operation.name in ("embedding", "index_add", "cumsum"):
        yield Way("native, deterministic", function, device=device, settings=_deterministic)


def _inside_float32(one: Implementation, dtype: torch.dtype) -> Callable[..., Any]:
    def run(*values: torch.Tensor) -> Any:
        found = one.function(*[value.float() if value.is_floating_point() else value for value in values])
        return tuple(part.to(dtype) for part in found) if isinstance(found, tuple) else found.to(dtype)

    return run


class _Switched:
    """Attributes of torch's backends, set for a while."""

    def __init__(self, *changes: tuple[Any, str, Any]) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._before = [(owner, name, getattr(owner, name)) for owner, name, _ in self._changes]
        for owner, name, value in self._changes:
            setattr(owner, name, value)

    def __exit__(self, *error: object) -> None:
        for owner, name, value in self._before:
            setattr(owner, name, value)


def _tf32() -> _Switched:
    return _Switched((torch.backends.cuda.matmul, "allow_tf32", True), (torch.backends.cudnn, "allow_tf32", True))


def full_precision() -> _Switched:
    return _Switched((torch.backends.cuda.matmul, "allow_tf32", False), (torch.backends.cudnn, "allow_tf32", False))


def _full_reduction() -> _Switched:
    matmul = torch.backends.cuda.matmul
    return _Switched((matmul, "allow_bf16_reduced_precision_reduction", False), (matmul, "allow_fp16_reduced_precision_reduction", False))


class _deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(False)
