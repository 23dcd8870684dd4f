# SPDX-License-Identifier: Apache-2.0
"""Define small models of several families, and one training step for each: the cases are made of them.

Nothing is special about their sizes; they are small enough that a case takes a fraction of a second, and large enough that sums have
hundreds of terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from bench.bugs.case import Program, minimised
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Attention",
    "Block",
    "ConvNet",
    "Decoder",
    "Experts",
    "Gpt",
    "LinearAttention",
    "Mlp",
    "Recurrent",
    "RmsNorm",
    "Scan",
    "Segmenter",
    "Vit",
    "program",
]


class Attention(nn.Module):
    """Causal or full self-attention, written out or through the fused function."""

    def __init__(self, width: int, heads: int, *, causal: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal) if self.fused else self._written_out(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return F.softmax(scores, dim=-1) @ v


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool, fused: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, fused=fused)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Tokens to logits."""

    def __init__(
        self,
        *,
        width: int = 48,
        heads: int = 4,
        layers: int = 2,
        vocabulary: int = 61,
        length: int = 24,
        fused: bool = True,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=padding)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True, fused=fused, activation=activation) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(1, self.vocabulary, (5, self.length + 1))
        return drawn[:, :-1], drawn[:, 1:]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Vit(nn.Module):
    """Images to classes, through patches."""

    def __init__(self, *, width: int = 40, heads: int = 5, layers: int = 2, fused: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, fused=fused, activation=F.gelu) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(6, 3, 20, 20), torch.randint(0, 11, (6,))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class ConvNet(nn.Module):
    """Convolutions, a norm of choice, relu, pooling."""

    def __init__(self, *, widths: tuple[int, ...] = (10, 18, 24), norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.convs = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in pairs)
        self.norms = nn.ModuleList(norm(width) for width in widths)
        self.head = nn.Linear(widths[-1], 9)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(6, 3, 16, 16) * 2 + 0.5, torch.randint(0, 9, (6,))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class Mlp(nn.Module):
    """Regression through a stack of layers, each followed by a function of choice."""

    def __init__(self, *, widths: tuple[int, ...] = (20, 56, 56, 28), between: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.between = nn.ModuleList((between or (lambda _: nn.SiLU()))(after) for _, after in pairs)
        self.head = nn.Linear(widths[-1], 3)
        self.entering = widths[0]

    def forward(self, x: Tensor) -> Tensor:
        for layer, between in zip(self.layers, self.between, strict=True):
            x = between(layer(x))
        return self.head(x)  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(33, self.entering), torch.randn(33, 3)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


class Recurrent(nn.Module):
    """A gated recurrence, written out."""

    def __init__(self, *, width: int = 30, length: int = 9) -> None:
        super().__init__()
        self.width, self.length = width, length
        self.entering = nn.Linear(12, 2 * width)
        self.carried = nn.Linear(width, 2 * width, bias=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.width)
        for step in x.unbind(1):
            gate, value = (self.entering(step) + self.carried(state)).chunk(2, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(value)
        return self.head(state)  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(14, self.length, 12), torch.randint(0, 5, (14,))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class Scan(nn.Module):
    """A selective scan: decay from a running sum, standardised rows, counts through a logarithm."""

    def __init__(self, *, width: int = 26, length: int = 40, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.width, self.length, self.dtype = width, length, dtype
        self.rate, self.value, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)
        rate = F.softplus(self.rate(rows)) * 0.05
        decay = torch.exp(-self.running_sum(rate))
        mixed = self.running_sum(self.value(rows) * decay) / self.length
        return self.head(torch.log1p(mixed.square() * 1e-3) * 1e3).mean(1)  # type: ignore[no-any-return]

    def running_sum(self, x: Tensor) -> Tensor:
        return x.cumsum(1) if self.dtype is None else x.to(self.dtype).cumsum(1).float()

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(7, self.length, self.width) + 0.3, torch.randn(7, 4)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


class LinearAttention(nn.Module):
    """Attention of linear cost: keys are normalised over positions, which is a softmax over a transposed tensor."""

    def __init__(self, *, width: int = 36, length: int = 22) -> None:
        super().__init__()
        self.width, self.length = width, length
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        keys = F.softmax(self.k(rows).transpose(1, 2), dim=-1)
        context = keys @ self.v(rows)
        return self.head((F.softmax(self.q(rows), dim=-1) @ context).mean(1))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(6, self.length, self.width) * 2, torch.randint(0, 8, (6,))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class Experts(nn.Module):
    """A mixture of experts: every token goes to two of them, and what they say is added up by index."""

    def __init__(self, *, width: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.width = width
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.router(x), dim=-1).topk(2, dim=-1)
        rows, tokens = [], []
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            rows.append(F.silu(expert(x[token])) * weights[token, place].unsqueeze(-1))
            tokens.append(token)
        mixed = torch.zeros_like(x).index_add(0, torch.cat(tokens), torch.cat(rows))
        return self.head(mixed + x)  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(31, self.width), torch.randint(0, 5, (31,))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class Decoder(nn.Module):
    """Queries that are fewer than the keys: the newest tokens against everything seen so far."""

    def __init__(self, *, width: int = 32, heads: int = 4, seen: int = 20, new: int = 6) -> None:
        super().__init__()
        self.width, self.heads, self.seen, self.new = width, heads, seen, new
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(part)) for layer, part in ((self.q, x[:, -self.new :]), (self.k, x), (self.v, x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(5, self.seen, self.width), torch.randn(5, self.new, self.width)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


class Segmenter(nn.Module):
    """Down by pooling with overlap, up by interpolation."""

    def __init__(self, *, width: int = 12, pooled: int | None = None) -> None:
        super().__init__()
        self.pooled = pooled
        self.down, self.middle, self.up = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.down(images)), 3, stride=2, padding=1)
        if self.pooled is not None:
            x = F.adaptive_max_pool2d(x, self.pooled)
        x = F.interpolate(F.silu(self.middle(x)), size=images.shape[-2:], mode="bilinear", align_corners=False)
        return self.up(x)  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(4, 3, 15, 15), torch.randint(0, 4, (4, 15, 15))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def program(
    model: Any,
    machine: Callable[[], Any] | None = None,
    *,
    steps: int = 2,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    lr: float = 1e-3,
    loss: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
) -> Program:
    """Train `model` on batches that it draws itself, all drawn before the first step."""
    batches = [model.batch() for _ in range(steps)]

    def value(index: int) -> Tensor:
        entering, wanted = batches[index]
        return model.loss(model(entering), wanted) if loss is None else loss(model, entering, wanted)  # type: ignore[no-any-return]

    machines = {"machine": machine} if machine else {}
    return minimised(model, optimizer(model.parameters(), lr=lr), value, steps=steps, **machines)
