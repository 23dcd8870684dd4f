# SPDX-License-Identifier: Apache-2.0
"""Define the model that is measured on an accelerator, a GPT in bfloat16 with fused AdamW.

It has 24 layers, width 1024, 16 heads, vocabulary 32 000, batch 8 x 1024. It is written with plain calls, so that every recorder sees the
same ones. It runs in the environment of the peer too and therefore imports nothing but torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FULL", "QUICK", "Sizes", "training"]


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int


FULL = Sizes(layers=24, width=1024, heads=16, vocabulary=32_000, batch=8, length=1024)
QUICK = Sizes(layers=4, width=256, heads=8, vocabulary=1000, batch=2, length=128)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.norm1, self.attention = nn.LayerNorm(width), Attention(sizes)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(sizes.vocabulary, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def training(sizes: Sizes, device: str) -> tuple[nn.Module, Any, Callable[[], Tensor]]:
    """Return the model, its optimizer and a function that trains one step on the same batch and returns the loss."""
    torch.manual_seed(0)
    model = GPT(sizes).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.length + 1)).to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, sizes.vocabulary), batch[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step
