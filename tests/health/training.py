# SPDX-License-Identifier: Apache-2.0
"""Run small trainings under a health recording, with faults from a chosen step on."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ulpscope.workflows.health_recording import watch

FAULTS = ("learning rate", "frozen", "corrupted", "flipped", "stale", "stuck bucket")


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, *, width: int = 24, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Fault:
    """Breaks `layers.1.up` from a step on."""

    def __init__(self, name: str | None, step: int) -> None:
        self.name, self.step = name, step
        self._kept: dict[str, torch.Tensor] = {}

    def apply(self, number: int, net: Net, optimizer: torch.optim.Optimizer) -> None:
        layer, is_on = net.layers[1].up, number >= self.step
        if self.name == "learning rate" and number == self.step:
            optimizer.param_groups[0]["lr"] *= 10
        if self.name == "frozen" and is_on:
            layer.weight.grad = layer.bias.grad = None
        if self.name == "corrupted" and is_on:
            layer.weight.grad.mul_(10)
        if self.name == "flipped" and is_on:
            layer.weight.grad.neg_()
        if self.name in ("stale", "stuck bucket"):
            self._make_stale(layer, is_on)

    def _make_stale(self, layer: nn.Linear, is_on: bool) -> None:
        """Replace gradients by those of the step before, or for ever by those of one step, as a stale bucket does."""
        for name, parameter in layer.named_parameters():
            fresh = parameter.grad.clone()
            if is_on:
                parameter.grad.copy_(self._kept[name])
            if self.name == "stale" or not is_on:
                self._kept[name] = fresh


def train(
    into: Path,
    *,
    seed: int = 1,
    fault: str | None = None,
    at: int = 20,
    steps: int = 30,
    optimizer: str = "adamw",
    device: str = "cpu",
    weights: int = 0,
    data: int = 7,
) -> Path:
    """Train and record; `seed` is that of dropout alone, `weights` and `data` those of the weights and the batches."""
    torch.manual_seed(weights)
    net = Net().to(device)
    made = (
        torch.optim.AdamW(net.parameters(), lr=1e-3) if optimizer == "adamw" else torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    )
    torch.manual_seed(seed)
    batches, broken = torch.Generator().manual_seed(data), Fault(fault, at)
    with watch(net, made, into=into, quiet=True) as health:
        for number in range(steps):
            tokens = torch.randint(0, 40, (8, 10), generator=batches).to(device)
            made.zero_grad()
            loss = F.cross_entropy(net(tokens).flatten(0, 1), (tokens * 3 % 40).flatten())
            loss.backward()
            broken.apply(number, net, made)
            made.step()
            health.log(loss=loss)
    return into
