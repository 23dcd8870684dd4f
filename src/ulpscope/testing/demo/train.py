# SPDX-License-Identifier: Apache-2.0
"""Train a tiny GPT on characters for two steps. Nothing in here knows that it is being recorded."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT = "\n".join(f"{n} bottles of beer on the wall, {n} bottles of beer; take one down, {n - 1} bottles of beer." for n in range(99, 1, -1))
CHARACTERS = sorted(set(TEXT))
CONTEXT = 32


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(CHARACTERS), bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.characters(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batches(size: int, count: int) -> list[Tensor]:
    """Draw `count` batches of consecutive characters from the text."""
    tokens = torch.tensor([CHARACTERS.index(character) for character in TEXT])
    starts = torch.randint(0, len(tokens) - CONTEXT - 1, (count, size))
    return [torch.stack([tokens[start : start + CONTEXT + 1] for start in row]) for row in starts]


def next_character_loss(model: GPT, tokens: Tensor) -> Any:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    if options.device == "npu":
        from ulpscope.testing import npu  # an emulated accelerator; with a real one this line would read: import torch_npu

        npu.install()

    with torch.device(options.device):
        model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches(8, options.steps)):
        loss = next_character_loss(model, batch.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
