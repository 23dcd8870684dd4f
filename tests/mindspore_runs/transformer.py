# SPDX-License-Identifier: Apache-2.0
"""The transformer of `tests/mindspore_live/transformer.py` in torch, with the same weights and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["made", "train"]


class Block(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
        weights = F.softmax(torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5), dim=-1)
        x = x + self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def weight(number: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return (((np.arange(int(np.prod(shape))) + 1) * (2 * number + 7) % 41 - 20) / 64).astype(np.float32).reshape(shape)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = np.arange(6) + step
    return torch.from_numpy((numbers * 5 % 7).astype(np.int32).reshape(2, 3)), torch.from_numpy((numbers * 3 % 7).reshape(2, 3))


def made() -> Net:
    net = Net()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(net.named_parameters()):
            if "norm" not in name:
                parameter.copy_(torch.from_numpy(weight(number, tuple(parameter.shape))))
    return net


def train(net: Net, after: Callable[[], None], steps: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        tokens, labels = batch(step)
        loss = F.cross_entropy(net(tokens).reshape(-1, 7), labels.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
