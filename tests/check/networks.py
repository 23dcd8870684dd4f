# SPDX-License-Identifier: Apache-2.0
"""Define small real networks, each with one training step, for the checks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ulpscope import Capture


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.pool = nn.MaxPool2d(2)
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.layers(self.pool(F.relu(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 40)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(torch.tanh(self.lstm(self.words(tokens))[0]))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Any:
        first = F.silu(self.norm1(self.down1(x)))
        second = F.silu(self.norm2(self.down2(first)))
        up = F.interpolate(self.up(second), scale_factor=1.0) if second.shape[-1] < 2 else self.up(second)
        up = up + F.interpolate(F.avg_pool2d(first, 2), scale_factor=2, mode="bilinear", align_corners=False)
        return self.last(torch.cat([first, up], 1))


class Experts(nn.Module):
    """Two of four experts for every token, chosen by the largest gates."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.gate = nn.Linear(width, 4, bias=False)
        self.first = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.second = nn.Parameter(torch.randn(4, 2 * width, width) / (2 * width) ** 0.5)
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        weights, chosen = torch.topk(F.softmax(self.gate(x), -1), 2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for expert in range(4):
            rows, place = torch.where(chosen == expert)
            inner = F.silu(x[rows] @ self.first[expert]) @ self.second[expert]
            total.index_add_(0, rows, (inner * weights[rows, place, None]).to(total.dtype))
        return self.head(F.rms_norm(x + total, x.shape[-1:], self.scale))


def _tokens(words: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, words, (4, 13))
    return tokens[:, :-1], tokens[:, 1:].flatten()


def _per_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target)


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


NETWORKS = {
    "gpt": Network(Gpt, lambda: _tokens(50), _per_token),
    "resnet": Network(ResNet, lambda: (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))), F.cross_entropy),
    "lstm": Network(Lstm, lambda: _tokens(40), _per_token),
    "unet": Network(UNet, lambda: (torch.randn(2, 1, 16, 16), torch.randint(0, 2, (2, 16, 16))), F.cross_entropy),
    "experts": Network(Experts, lambda: (torch.randn(40, 8), torch.randn(40, 5)), F.mse_loss),
}
VARIANTS = ("float32", "amp", "half", "bfloat16")
_LOW = {"half": torch.float16, "bfloat16": torch.bfloat16}


def record(
    name: str, into: Path, *, variant: str = "float32", keep: str = "tensors", device: str = "cpu", steps: int = 1, level: str = "api"
) -> Path:
    """Record one training step of a network."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = network.build().to(device)
    low = _LOW.get(variant)
    model = model.to(low) if low else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = torch.autocast(device, torch.bfloat16) if variant == "amp" else nullcontext()
    with Capture(into, model=model, optimizer=optimizer, keep=keep, level=level) as capture:  # type: ignore[arg-type]
        for _ in range(steps):
            given, target = (one.to(device) for one in network.batch())
            given = given.to(low) if low and given.is_floating_point() else given
            with amp:
                loss = network.loss(model(given).float(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            capture.step()
    return into
