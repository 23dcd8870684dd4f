# SPDX-License-Identifier: Apache-2.0
"""Define the measured model: a GPT of 4 layers, width 256, 8 heads, vocabulary 1000, batch 8 x 128, float32, AdamW.

It is written with plain calls, so that every recorder sees the same ones. It runs in the environment of the peer too and therefore imports
nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 4, 256, 8, 1000, 8, 128


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def training(*, perturb: float = 0.0) -> tuple[GPT, torch.optim.Optimizer, Callable[..., None]]:
    """Return the model, its optimizer and a function that trains one step. `perturb` scales every weight by 1 + perturb.

    The function calls its argument between the backward and the update of the weights.
    """
    torch.manual_seed(0)
    model = GPT()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + perturb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))

    def step(before_update: Callable[[], None] = lambda: None) -> None:
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1)).backward()
        before_update()
        optimizer.step()

    return model, optimizer, step
