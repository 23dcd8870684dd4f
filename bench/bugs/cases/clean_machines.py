# SPDX-License-Identifier: Apache-2.0
"""Clean pairs: one program on two backends that both compute right. Every difference is rounding, and nothing may be blamed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bench.bugs.case import Case, Program, Side, minimised
from bench.bugs.cases.models_transformer import Decoder, trained
from bench.bugs.machines import (
    Kernel,
    Kernels,
    accelerator,
    machine_of,
    other_functions,
    other_order,
    own_norms,
    rounded_operands,
    split_k,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        return self.head(F.silu(self.norm2(self.conv2(x))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def narrow_backend() -> Kernels:
    """Compute float16 and bfloat16 as another backend: every kernel computes in float32 and rounds its result once."""
    return {**own_norms(), **{op: _in_float32(kernel) for op, kernel in {**split_k(4), **other_functions()}.items()}}


def _in_float32(kernel: Kernel) -> Kernel:
    def compute(*args: Any, **kwargs: Any) -> Any:
        narrow = next((one.dtype for one in args if _is_narrow(one)), None)
        if narrow is None:
            return kernel(*args, **kwargs)
        found = kernel(*(one.float() if _is_narrow(one) else one for one in args), **kwargs)
        return tree_map(lambda one: one.to(narrow) if isinstance(one, Tensor) and one.is_floating_point() else one, found)

    return compute


def _is_narrow(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def classified(
    model: nn.Module, inputs: Tensor, *, steps: int, lr: float, machine: Callable[..., object] = contextlib.nullcontext
) -> Program:
    """Train a classifier on one batch for each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    labels = torch.randint(0, 5, inputs.shape[:2])

    return minimised(
        model,
        optimizer,
        lambda index: F.cross_entropy(model(inputs[index % len(inputs)]), labels[index % len(inputs)]),
        steps=steps,
        machine=machine,
    )


def decoders(name: str, what: str, machine: str, kernels: Kernels | None, *, steps: int = 2) -> Case:
    def program(side: Side) -> Program:
        return trained(Decoder(), steps=steps, machine=machine_of(side, kernels))

    return Case(name=name, source="synthetic", what=what, program=program, machine=machine)


def images(name: str, what: str, machine: str, kernels: Kernels, *, steps: int = 2) -> Case:
    def program(side: Side) -> Program:
        return classified(Convolutions(), torch.randn(2, 8, 3, 10, 10), steps=steps, lr=1e-3, machine=machine_of(side, kernels))

    return Case(name=name, source="synthetic", what=what, program=program, machine=machine)


def _far_from_zero(side: Side) -> Program:
    """Batch norm where the mean is ten thousand times the deviation."""
    model = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    return classified(model, 100 + 0.01 * torch.randn(2, 32, 12), steps=2, lr=1e-3, machine=machine_of(side, own_norms()))


def _chaotic(side: Side) -> Program:
    """Train at so high a learning rate that rounding grows into differences of the first digit within eight steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))
    machine = machine_of(side, rounded_operands("float16"), split_k(2))
    return classified(model, torch.randn(2, 16, 12) * 3, steps=8, lr=0.3, machine=machine)


def _chaotic_decoder(side: Side) -> Program:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
    batches = torch.randint(0, 48, (8, 4, 13))

    return minimised(
        model,
        optimizer,
        lambda index: F.cross_entropy(model(batches[index, :, :-1]).flatten(0, 1), batches[index, :, 1:].flatten()),
        steps=8,
        machine=machine_of(side, accelerator("tf32")),
    )


def _recurrent(side: Side) -> Program:
    return classified(Recurrent(), torch.randn(2, 8, 6, 8), steps=2, lr=1e-2, machine=machine_of(side, split_k(2)))


def _bfloat16(side: Side) -> Program:
    """Weights and activations in bfloat16 on two machines."""
    return trained(Decoder().to(torch.bfloat16), machine=machine_of(side, narrow_backend()))


def _float16(side: Side) -> Program:
    """Float16 weights with a loss scale on two machines."""
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(2, 16, 12).half(), torch.randint(0, 5, (2, 16))

    def step(index: int) -> None:
        optimizer.zero_grad()
        (F.cross_entropy(model(inputs[index]).float(), labels[index]) * 128.0).backward()
        for parameter in model.parameters():
            parameter.grad.div_(128.0)
        optimizer.step()

    return Program(step=step, model=model, machine=machine_of(side, narrow_backend()))


def _scaled(side: Side) -> Program:
    """Autocast to float16 with a scaler on both sides."""
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    inputs, labels = torch.randn(3, 16, 12), torch.randint(0, 5, (3, 16))

    def step(index: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(inputs[index]).float(), labels[index])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Program(step=step, model=model, steps=3, machine=machine_of(side, narrow_backend()))


def _master_weights(side: Side) -> Program:
    """Weights in bfloat16, stepped in float32 and rounded back."""
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 5)).to(torch.bfloat16)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    inputs, labels = torch.randn(3, 16, 12).to(torch.bfloat16), torch.randint(0, 5, (3, 16))

    def step(index: int) -> None:
        model.zero_grad()
        F.cross_entropy(model(inputs[index]).float(), labels[index]).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return Program(step=step, model=model, steps=3, machine=machine_of(side, narrow_backend()))


def _case(name: str, what: str, program: Callable[[Side], Program], machine: str) -> Case:
    return Case(name=name, source="synthetic", what=what, program=program, machine=machine)


CASES = [
    decoders("clean_same_program", "the same program twice", "", None),
    decoders("clean_float16_operands", "matrix products of float16 operands", "operands in float16", rounded_operands("float16"), steps=3),
    decoders("clean_tf32_operands", "matrix products of tf32 operands", "operands in tf32", rounded_operands("tf32"), steps=3),
    decoders(
        "clean_bfloat16_operands", "matrix products of bfloat16 operands", "operands in bfloat16", rounded_operands("bfloat16"), steps=3
    ),
    decoders("clean_other_order", "sums and products from the last term to the first", "another order", other_order()),
    decoders("clean_split_k", "products added up from four parts", "split-K products", split_k(4)),
    decoders(
        "clean_accelerator",
        "everything of a backend at once",
        "operands in float16, other norms and functions",
        accelerator("float16"),
        steps=3,
    ),
    decoders(
        "clean_accelerator_bfloat16",
        "everything of a coarser backend at once",
        "operands in bfloat16, other norms and functions",
        accelerator("bfloat16"),
        steps=3,
    ),
    images("clean_images_float16_operands", "convolutions of float16 operands", "operands in float16", rounded_operands("float16")),
    images(
        "clean_images_accelerator",
        "a convolutional network on another backend",
        "operands in tf32, other norms and functions",
        accelerator("tf32"),
        steps=3,
    ),
    _case(
        "clean_batch_norm_far_from_zero", "batch norm on data with mean 100 and deviation 0.01", _far_from_zero, "batch norm written out"
    ),
    _case("clean_chaos", "eight steps at a high learning rate", _chaotic, "operands in float16 against split-K products"),
    _case(
        "clean_chaos_decoder",
        "eight steps of a decoder at a high learning rate",
        _chaotic_decoder,
        "operands in tf32, other norms and functions",
    ),
    _case("clean_recurrent", "an LSTM", _recurrent, "split-K products"),
    _case("clean_bfloat16", "weights and activations in bfloat16 on both sides", _bfloat16, "split-K products, other norms and functions"),
    _case("clean_float16", "float16 weights and a fixed loss scale on both sides", _float16, "split-K products, other norms and functions"),
    _case("clean_scaler", "autocast to float16 with a scaler on both sides", _scaled, "split-K products, other functions"),
    _case(
        "clean_master_weights",
        "bfloat16 weights with float32 master weights on both sides",
        _master_weights,
        "split-K products, other functions",
    ),
]
