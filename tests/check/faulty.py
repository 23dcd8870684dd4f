# SPDX-License-Identifier: Apache-2.0
"""Faults of known size in many operations of the emulated device, forward and backward; run in a process of its own.

    python -m tests.check.faulty FOLDER SIZES OPERATIONS [DTYPE]

A fault adds noise to what one aten operation gives: `size` times the error that an honest kernel makes in that result of that call on
those inputs. Every call of the run is then checked on the device. The calls in which the fault struck have to fail, and no other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ulpscope import Capture, open_run
from ulpscope.judge.checks import settle
from ulpscope.replay import Yardstick
from ulpscope.replay.calls.devices import run_on_device
from ulpscope.testing import npu
from ulpscope.workflows.check.one_call import CallChecker
from ulpscope.workflows.check.rules import CheckOptions

GROSS = 1e6


@dataclass(frozen=True)
class Case:
    """The function to call, and the aten operations that break in its two phases."""

    call: Callable[..., Any]
    forward: str
    backward: str


X, Y = (8, 24), (8, 24)
IMAGE = (2, 4, 8, 8)


def _leaf(*shape: int, positive: bool = False) -> Tensor:
    values = torch.randn(*shape, dtype=torch.get_default_dtype())
    return (values.abs() + 0.5 if positive else values).requires_grad_()


CASES: dict[str, Case] = {
    "gelu": Case(lambda: F.gelu(_leaf(*X)), "gelu", "gelu_backward"),
    "silu": Case(lambda: F.silu(_leaf(*X)), "silu", "mul.Tensor"),
    "tanh": Case(lambda: torch.tanh(_leaf(*X)), "tanh", "tanh_backward"),
    "sigmoid": Case(lambda: torch.sigmoid(_leaf(*X)), "sigmoid", "sigmoid_backward"),
    "exp": Case(lambda: torch.exp(_leaf(*X)), "exp", "mul.Tensor"),
    "log": Case(lambda: torch.log(_leaf(*X, positive=True)), "log", "div.Tensor"),
    "softplus": Case(lambda: F.softplus(_leaf(*X)), "softplus", "softplus_backward"),
    "elu": Case(lambda: F.elu(_leaf(*X)), "elu", "elu_backward"),
    "leaky_relu": Case(lambda: F.leaky_relu(_leaf(*X), 0.2), "leaky_relu", "leaky_relu_backward"),
    "hardswish": Case(lambda: F.hardswish(_leaf(*X)), "hardswish", "hardswish_backward"),
    "softmax": Case(lambda: F.softmax(_leaf(*X), -1), "_softmax", "_softmax_backward_data"),
    "log_softmax": Case(lambda: F.log_softmax(_leaf(*X), -1), "_log_softmax", "_log_softmax_backward_data"),
    "layer_norm": Case(lambda: F.layer_norm(_leaf(*X), (24,)), "native_layer_norm", "native_layer_norm_backward"),
    "group_norm": Case(lambda: F.group_norm(_leaf(*IMAGE), 2), "native_group_norm", "native_group_norm_backward"),
    "batch_norm": Case(
        lambda: F.batch_norm(_leaf(*IMAGE), None, None, training=True), "_native_batch_norm_legit.no_stats", "native_batch_norm_backward"
    ),
    "linear": Case(lambda: F.linear(_leaf(*X), _leaf(72, 24), _leaf(72)), "addmm", "mm"),
    "matmul": Case(lambda: torch.matmul(_leaf(*X), _leaf(24, 12)), "mm", "mm"),
    "bmm": Case(lambda: torch.bmm(_leaf(3, 8, 9), _leaf(3, 9, 7)), "bmm", "bmm"),
    "conv2d": Case(lambda: F.conv2d(_leaf(*IMAGE), _leaf(5, 4, 3, 3)), "convolution", "convolution_backward"),
    "attention": Case(
        lambda: F.scaled_dot_product_attention(_leaf(2, 2, 8, 8), _leaf(2, 2, 8, 8), _leaf(2, 2, 8, 8)),
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "embedding": Case(lambda: F.embedding(torch.randint(0, 9, (8, 10)), _leaf(9, 24)), "embedding", "embedding_dense_backward"),
    "add": Case(lambda: _leaf(8, 72) + _leaf(72), "add.Tensor", "sum.dim_IntList"),
    "mul": Case(lambda: torch.mul(_leaf(*X), _leaf(*X)), "mul.Tensor", "mul.Tensor"),
    "div": Case(lambda: torch.div(_leaf(*X), _leaf(*X, positive=True)), "div.Tensor", "div.Tensor"),
    "sum": Case(lambda: torch.sum(_leaf(96, 16), 1), "sum.dim_IntList", "expand"),
    "cumsum": Case(lambda: torch.cumsum(_leaf(*X), 1), "cumsum", "cumsum"),
    "pow": Case(lambda: torch.pow(_leaf(*X, positive=True), 3), "pow.Tensor_Scalar", "pow.Tensor_Scalar"),
    "sqrt": Case(lambda: torch.sqrt(_leaf(*X, positive=True)), "sqrt", "div.Tensor"),
    "avg_pool2d": Case(lambda: F.avg_pool2d(_leaf(*IMAGE), 2), "avg_pool2d", "avg_pool2d_backward"),
    "upsample": Case(
        lambda: F.interpolate(_leaf(*IMAGE), scale_factor=2, mode="bilinear"), "upsample_bilinear2d", "upsample_bilinear2d_backward"
    ),
}


def record(into: Path, dtype: torch.dtype, names: list[str]) -> Path:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with Capture(into, keep="tensors") as capture:
        for name in names:
            result = CASES[name].call()
            torch.autograd.backward(result, torch.randn_like(result))
        capture.step()
    torch.set_default_dtype(torch.float32)
    return into


class Laboratory:
    """One run, the device, and the honest error of each result of each call."""

    def __init__(self, path: Path) -> None:
        self.run = open_run(path)
        self.checker = CallChecker(self.run, CheckOptions(device="npu"))
        records = list(self.run.records(0, 0))
        self.calls = [index for index, one in enumerate(records) if one.level == "api" and one.phase in ("forward", "backward")]
        self.names = {index: f"{records[index].call}.{records[index].phase}" for index in self.calls}
        self.honest = {index: self._honest(records[index]) for index in self.calls}

    def _honest(self, record: Any) -> dict[int, float]:
        prepared = self.checker._prepare(record, 0, 0)
        made = run_on_device(prepared.program, "npu")
        return {one.numel: one.honest_error or 0.0 for one in Yardstick(prepared.program).measure(made)}

    def strike(self, op: str, phase: str, size: float) -> dict[str, list[str]]:
        """Return the calls that the fault struck, and the calls that failed."""
        struck, checked = [], []
        known: dict[int, float] = {}
        generator = torch.Generator().manual_seed(1)

        def broken(compute: Any, args: Any, kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            single = isinstance(result, Tensor)
            values = [result] if single else list(result)
            values = [_disturbed(one, known, size, generator) for one in values]
            return values[0] if single else tuple(values)

        with npu.inject(f"aten.{op}" if "." in op else f"aten.{op}.default", broken, phase=phase) as injection:  # type: ignore[arg-type]
            for index in self.calls:
                known = self.honest[index]
                before = injection.num_hits
                checked.append(self.checker.check(0, 0, index))
                if injection.num_hits > before and self.names[index].endswith(phase):
                    struck.append(self.names[index])
        failed = [f"{call.call}.{call.phase}" for call in settle(checked) if call.status == "failed"]
        return {"struck": struck, "failed": failed}


def _disturbed(value: Any, known: dict[int, float], size: float, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() not in known:
        return value
    rms = float(value.double().square().mean().sqrt())
    noise = torch.empty_like(value, dtype=torch.float64).normal_(generator=generator) * (size * known[value.numel()] * rms)
    return (value.double() + noise).to(value.dtype)


def main() -> None:
    folder, sizes, names = Path(sys.argv[1]), [float(one) for one in sys.argv[2].split(",")], sys.argv[3]
    chosen = list(CASES) if names == "all" else names.split(",")
    torch.set_num_threads(1)
    npu.install()
    dtype: torch.dtype = getattr(torch, sys.argv[4] if len(sys.argv) > 4 else "float32")
    laboratory = Laboratory(record(folder / "run", dtype, chosen))
    report = []
    for name in chosen:
        for phase in ("forward", "backward"):
            for size in sizes:
                found = laboratory.strike(getattr(CASES[name], phase), phase, size)
                report.append({"case": name, "phase": phase, "size": size, **found})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
