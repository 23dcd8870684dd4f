# SPDX-License-Identifier: Apache-2.0
"""The program whose dumps lie beside it: a small network, one training step. See README.md here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.fc1 = nn.Linear(3, 4)
        self.fc2 = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh"))
        y = 1.0 + (x + y)
        y += 0.5
        return y


def train(debugger) -> None:
    torch.manual_seed(7)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = torch.randn(2, 3), torch.tensor([0, 2])
    debugger.start(model)
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    debugger.stop()
    debugger.step()
