# SPDX-License-Identifier: Apache-2.0
"""Faults of torch 2.13 itself, on the CPU: nothing is injected on the subject's side."""

from __future__ import annotations

import torch
from bench.bugs.case import Case, Expected, Program, Side
from bench.bugs.machines import Machine, honest_kernels, own_norms
from bench.bugs.networks import program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ISSUES = "https://github.com/pytorch/pytorch/issues"


class Randomized(nn.Module):
    """A stack of layers with randomized leaky relu, checkpointed or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.activation = nn.RReLU()
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointed else self.block(layer, x)
        return self.head(x)  # type: ignore[no-any-return]

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.activation(layer(x))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(19, 24), torch.randn(19, 3)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


def rrelu(machine: str) -> Case:
    def build(side: Side) -> Program:
        honest = Machine(honest_kernels(machine)) if side == "subject" else None
        return program(Randomized(checkpointed=side == "subject"), honest)

    return Case(
        name=f"rrelu_checkpoint@{machine}",
        source=f"{ISSUES}/193671",
        what="RReLU under non-reentrant checkpointing saves its noise before it is drawn: forward equal, gradient wrong",
        program=build,
        expected=Expected(call="*rrelu*", module="activation", phase="backward"),
        machine="" if machine == "cpu" else machine,
    )


class Gated(nn.Module):
    """One number for each row, normalised: a layer norm over a single element, where the weight has no effect at all."""

    def __init__(self) -> None:
        super().__init__()
        self.entering, self.gate, self.norm, self.head = nn.Linear(18, 30), nn.Linear(30, 1), nn.LayerNorm(1), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.silu(self.entering(x))
        return self.head(rows * self.norm(self.gate(rows) * 100).sigmoid())  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(64, 18) * 3, torch.randn(64, 3)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


def layer_norm_of_one(side: Side) -> Program:
    return program(Gated(), None if side == "subject" else Machine(own_norms()))


CASES = [
    rrelu("cpu"),
    rrelu("fp16"),
    Case(
        name="layer_norm_of_one",
        source=f"{ISSUES}/188375",
        what="LayerNorm over one element gives its weight a gradient although the output does not depend on it",
        program=layer_norm_of_one,
        expected=Expected(call="*.layer_norm", module="norm", phase="backward", slot="output.weight"),
        machine="the reference writes its norms out",
    ),
]
