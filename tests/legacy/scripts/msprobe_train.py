# SPDX-License-Identifier: Apache-2.0
"""A small training under msprobe: python msprobe_train.py CONFIG. Runs under the real tool and under the door alike."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from msprobe.pytorch import PrecisionDebugger
from torch import nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, dim=-1)
        return self.out(torch.matmul(weights, v))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attention, self.conv, self.head = Attention(), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        x = torch.cat([x, F.relu(self.conv(x.transpose(1, 2)).transpose(1, 2))], dim=-1)
        x = x.view(*tokens.shape, 2, 8).mean(dim=2)
        x *= 2.0
        return self.head(F.gelu(x, approximate="tanh"))


def main() -> None:
    debugger = PrecisionDebugger(config_path=sys.argv[1])
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        tokens = torch.randint(0, 11, (2, 6))
        debugger.start(model)
        loss = F.cross_entropy(model(tokens[:, :-1]).reshape(-1, 11), tokens[:, 1:].reshape(-1))
        loss.backward()
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()


if __name__ == "__main__":
    main()
