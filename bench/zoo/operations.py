# SPDX-License-Identifier: Apache-2.0
"""Define the operations, each with other ways to compute it that no engineer would call wrong.

An implementation stands in the calibration half or, with `held=True`, in the half that only checks the limits. Implementations of one
operation take the same tensors. One that is not honest everywhere says so: on `excluded` distributions (a formula with |x| has no gradient
at 0, and 1e-6 is 0 to float16), or `forward_only`, since the derivative of a sound formula, taken automatically, is not always a sound
formula: exp(x - logsumexp), for one, loses a probability next to 1 among logits of thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[..., Any]


@dataclass(frozen=True)
class Implementation:
    name: str
    function: Function
    held: bool = False
    forward_only: bool = False
    excluded: frozenset[str] = frozenset()
    is_loop: bool = False


@dataclass(frozen=True)
class Operation:
    """`shapes` gives the tensors for a size: the first follows the distribution of a row, the others are weights, targets or indices."""

    name: str
    function: Function
    shapes: Function
    sizes: tuple[Any, ...]
    held_sizes: tuple[Any, ...]
    implementations: list[Implementation] = field(default_factory=list)
    excluded: frozenset[str] = frozenset()
    has_backward: bool = True
    num_differentiable: int | None = None

    def other(self, name: str, *, excluded: Sequence[str] = (), **rest: bool) -> Callable[[Function], Function]:
        def add(function: Function) -> Function:
            self.implementations.append(Implementation(name, function, excluded=frozenset(excluded), **rest))
            return function

        return add


OPERATIONS: dict[str, Operation] = {}
_WITH_ZEROS = ("one in ten", "positive part", "few values", "1e-6")


def operation(
    name: str, function: Function, shapes: Function, sizes: tuple[Any, ...], held_sizes: tuple[Any, ...], **rest: Any
) -> Operation:
    OPERATIONS[name] = Operation(name, function, shapes, sizes, held_sizes, **rest)
    return OPERATIONS[name]


# ---------------------------------------------------------------------------------------------------------------- matrix products

linear = operation(
    "linear",
    F.linear,
    lambda size, new: (new.data(size[0], size[1]), new.weight(size[2], size[1]), new.weight(size[2])),
    ((32, 64, 48), (16, 4096, 24)),
    ((7, 333, 65), (24, 8192, 16)),
)


@linear.other("chunks of K one after the other")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    total = b.expand(x.shape[0], w.shape[0])
    for xs, ws in zip(x.split(32, -1), w.split(32, -1), strict=True):
        total = total + xs @ ws.T
    return total


@linear.other("K split in four")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    parts = [xs @ ws.T for xs, ws in zip(x.chunk(4, -1), w.chunk(4, -1), strict=True)]
    return torch.stack(parts).sum(0) + b


@linear.other("K backwards")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.flip(-1) @ w.flip(-1).T + b


@linear.other("products, then a sum")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x[:, None] * w[None]).sum(-1) + b


@linear.other("K one by one", is_loop=True)
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    total = x.new_zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        total = total + x[:, k, None] * w[None, :, k]
    return total + b


@linear.other("K strided by eight", held=True)
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    total = b
    for lane in range(8):
        total = total + x[:, lane::8] @ w[:, lane::8].T
    return total


@linear.other("transposed", held=True)
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (w @ x.T).T + b


bmm = operation(
    "bmm",
    torch.bmm,
    lambda size, new: (new.data(size[0], size[1], size[2]), new.weight(size[0], size[2], size[3])),
    ((4, 16, 64, 16), (2, 8, 2048, 8)),
    ((3, 9, 77, 33), (2, 5, 5000, 7)),
)


@bmm.other("einsum")
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bik,bkj->bij", a, b)


@bmm.other("one by one")
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)])


@bmm.other("products, then a sum")
def _(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None]).sum(2)


@bmm.other("K in chunks", held=True)
def _(a: Tensor, b: Tensor) -> Tensor:
    return sum(x @ y for x, y in zip(a.split(64, 2), b.split(64, 1), strict=True))


conv2d = operation(
    "conv2d",
    lambda x, w, b: F.conv2d(x, w, b, padding=1),
    lambda size, new: (new.data(size[0], size[1], size[2], size[2]), new.weight(size[3], size[1], 3, 3), new.weight(size[3])),
    ((2, 3, 16, 8), (2, 64, 8, 16)),
    ((1, 5, 11, 6), (2, 96, 6, 12)),
)


@conv2d.other("unfold and matmul")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    return (w.flatten(1) @ columns + b[:, None]).view(x.shape[0], w.shape[0], *x.shape[2:])


@conv2d.other("channels last")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), w.contiguous(memory_format=torch.channels_last), b, padding=1)


@conv2d.other("without oneDNN or cuDNN")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        return F.conv2d(x, w, b, padding=1)


@conv2d.other("nine shifted products", held=True)
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    padded, (high, wide) = F.pad(x, (1, 1, 1, 1)), x.shape[2:]
    total = b[None, :, None, None]
    for i in range(3):
        for j in range(3):
            total = total + torch.einsum("nchw,oc->nohw", padded[:, :, i : i + high, j : j + wide], w[:, :, i, j])
    return total


conv1d = operation(
    "conv1d",
    lambda x, w: F.conv1d(x, w, stride=2),
    lambda size, new: (new.data(size[0], size[1], size[2]), new.weight(size[3], size[1], 5)),
    ((2, 4, 64, 8), (1, 32, 200, 8)),
    ((3, 7, 50, 5), (1, 48, 150, 6)),
)


@conv1d.other("as conv2d")
def _(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x[:, :, None], w[:, :, None], stride=(1, 2)).squeeze(2)


@conv1d.other("unfold and einsum", held=True)
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("nclk,ock->nol", x.unfold(2, 5, 2), w)


# ---------------------------------------------------------------------------------------------------------------- sums

total = operation("sum", lambda x: x.sum(-1), lambda size, new: (new.data(*size),), ((16, 300), (4, 30000)), ((9, 1000), (3, 50000)))


@total.other("one after the other", is_loop=True)
def _(x: Tensor) -> Tensor:
    running = x[:, 0]
    for column in x[:, 1:].unbind(-1):
        running = running + column
    return running


@total.other("backwards")
def _(x: Tensor) -> Tensor:
    return x.flip(-1).sum(-1)


@total.other("chunks of 32", is_loop=True)
def _(x: Tensor) -> Tensor:
    running = torch.zeros_like(x[:, 0])
    for part in x.split(32, -1):
        running = running + part.sum(-1)
    return running


@total.other("matmul with ones", held=True)
def _(x: Tensor) -> Tensor:
    return x @ torch.ones_like(x[0])


mean = operation("mean", lambda x: x.mean(0), lambda size, new: (new.data(*size),), ((300, 16), (10000, 4)), ((1000, 9), (20000, 3)))


@mean.other("sum over count")
def _(x: Tensor) -> Tensor:
    return x.sum(0) / x.shape[0]


@mean.other("sum of scaled")
def _(x: Tensor) -> Tensor:
    return (x * (1 / x.shape[0])).sum(0)


@mean.other("mean of means", held=True)
def _(x: Tensor) -> Tensor:
    return x.view(-1, 10, x.shape[1]).mean(1).mean(0) if x.shape[0] % 10 == 0 else x.mean(0)


cumsum = operation("cumsum", lambda x: x.cumsum(-1), lambda size, new: (new.data(*size),), ((8, 100), (2, 4000)), ((5, 333), (2, 6000)))


@cumsum.other("one after the other", is_loop=True)
def _(x: Tensor) -> Tensor:
    sums = [x[:, 0]]
    for column in x[:, 1:].unbind(-1):
        sums.append(sums[-1] + column)
    return torch.stack(sums, -1)


@cumsum.other("doubling", held=True)
def _(x: Tensor) -> Tensor:
    shift = 1
    while shift < x.shape[-1]:
        x = x + F.pad(x[:, :-shift], (shift, 0))
        shift *= 2
    return x


var = operation("var", lambda x: x.var(-1), lambda size, new: (new.data(*size),), ((16, 64), (4, 8000)), ((9, 100), (3, 20000)))


@var.other("two passes")
def _(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).square().sum(-1) / (x.shape[-1] - 1)


@var.other("moments of chunks joined", held=True)
def _(x: Tensor) -> Tensor:
    return _joined_moments(x)[1] * (x.shape[-1] / (x.shape[-1] - 1))


def _joined_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and biased variance from those of chunks, as parallel kernels join them."""
    count, average, square = 0, x[..., 0] * 0, x[..., 0] * 0
    for part in x.split(64, -1):
        new = part.shape[-1]
        here = part.mean(-1)
        inner = (part - here[..., None]).square().sum(-1)
        delta = here - average
        square = square + inner + delta.square() * (count * new / (count + new))
        average = average + delta * (new / (count + new))
        count += new
    return average, square / count


norm = operation(
    "vector_norm",
    lambda x: torch.linalg.vector_norm(x, dim=-1),
    lambda size, new: (new.data(*size),),
    ((16, 64), (4, 8000)),
    ((9, 100), (3, 20000)),
)


@norm.other("root of the sum of squares")
def _(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


@norm.other("scaled by the largest", held=True, forward_only=True)
def _(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    return (x / largest).square().sum(-1).sqrt() * largest.squeeze(-1)


index_add = operation(
    "index_add",
    lambda x, table, index: table.index_add(0, index, x),
    lambda size, new: (new.data(size[0], size[1]), new.weight(size[2], size[1]), new.index(size[2], size[0])),
    ((64, 8, 10), (4000, 4, 3)),
    ((100, 5, 7), (6000, 3, 2)),
)


@index_add.other("scatter_add")
def _(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return table.scatter_add(0, index[:, None].expand_as(x), x)


@index_add.other("one-hot matmul")
def _(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return table + F.one_hot(index, table.shape[0]).to(x.dtype).T @ x


@index_add.other("backwards", held=True)
def _(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return table.index_add(0, index.flip(0), x.flip(0))


embedding = operation(
    "embedding",
    lambda table, index: F.embedding(index, table),
    lambda size, new: (new.data(size[0], size[1]), new.index(size[0], size[2])),
    ((10, 16, 64), (3, 8, 5000)),
    ((7, 9, 100), (2, 5, 9000)),
)


@embedding.other("indexing")
def _(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


@embedding.other("one-hot matmul", held=True)
def _(table: Tensor, index: Tensor) -> Tensor:
    return F.one_hot(index, table.shape[0]).to(table.dtype) @ table


# ---------------------------------------------------------------------------------------------------------------- softmax and its kin

softmax = operation(
    "softmax", lambda x: x.softmax(-1), lambda size, new: (new.data(*size),), ((16, 64), (3, 30000)), ((7, 150), (2, 50000))
)


@softmax.other("powers of two")
def _(x: Tensor) -> Tensor:
    powers = torch.exp2((x - x.amax(-1, keepdim=True).detach()) * math.log2(math.e))
    return powers / powers.sum(-1, keepdim=True)


@softmax.other("exp of log_softmax")
def _(x: Tensor) -> Tensor:
    return x.log_softmax(-1).exp()


@softmax.other("exp and sum")
def _(x: Tensor) -> Tensor:
    powers = (x - x.amax(-1, keepdim=True).detach()).exp()
    return powers * (1 / powers.sum(-1, keepdim=True))


@softmax.other("by blocks with a running maximum", held=True)
def _(x: Tensor) -> Tensor:
    largest, running = x[:, :1].detach() - math.inf, x[:, :1] * 0
    for part in x.split(64, -1):
        top = torch.maximum(largest, part.detach().amax(-1, keepdim=True))
        running = running * (largest - top).exp() + (part - top).exp().sum(-1, keepdim=True)
        largest = top
    return (x - largest).exp() / running


log_softmax = operation(
    "log_softmax", lambda x: x.log_softmax(-1), lambda size, new: (new.data(*size),), ((16, 64), (3, 8000)), ((7, 150), (2, 20000))
)


@log_softmax.other("shifted logsumexp")
def _(x: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True).detach()
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


@log_softmax.other("minus logsumexp", held=True)
def _(x: Tensor) -> Tensor:
    return x - x.logsumexp(-1, keepdim=True)


logsumexp = operation(
    "logsumexp", lambda x: x.logsumexp(-1), lambda size, new: (new.data(*size),), ((16, 64), (3, 8000)), ((7, 150), (2, 20000))
)


@logsumexp.other("by its definition")
def _(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True).detach()
    return (x - top).exp().sum(-1).log() + top.squeeze(-1)


@logsumexp.other("halves joined", held=True)
def _(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.logaddexp(x[:, :half].logsumexp(-1), x[:, half:].logsumexp(-1))


cross_entropy = operation(
    "cross_entropy",
    F.cross_entropy,
    lambda size, new: (new.data(*size), new.index(size[1], size[0])),
    ((32, 10), (16, 5000)),
    ((11, 37), (9, 12000)),
)


@cross_entropy.other("gathered")
def _(x: Tensor, target: Tensor) -> Tensor:
    return -x.log_softmax(-1).gather(1, target[:, None]).mean()


@cross_entropy.other("logsumexp minus the target", forward_only=True)
def _(x: Tensor, target: Tensor) -> Tensor:
    return (x.logsumexp(-1) - x.gather(1, target[:, None]).squeeze(1)).mean()


@cross_entropy.other("shifted by the largest", held=True)
def _(x: Tensor, target: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True).detach()
    return (shifted.exp().sum(-1).log() - shifted.gather(1, target[:, None]).squeeze(1)).sum() / x.shape[0]


bce = operation(
    "bce_with_logits",
    F.binary_cross_entropy_with_logits,
    lambda size, new: (new.data(*size), new.share(*size)),
    ((16, 20), (8, 1000)),
    ((9, 33), (3, 5000)),
)


@bce.other("log1p of exp", excluded=_WITH_ZEROS)
def _(x: Tensor, y: Tensor) -> Tensor:
    return (x.clamp(min=0) - x * y + torch.log1p(torch.exp(-x.abs()))).mean()


@bce.other("softplus", held=True)
def _(x: Tensor, y: Tensor) -> Tensor:
    return (F.softplus(x) - x * y).mean()


# ---------------------------------------------------------------------------------------------------------------- attention

_SENSELESS = frozenset({"1e4"})
"""Logits of 1e8: what a fused kernel keeps of the normalisation has no digit left after the point, and its gradients are noise."""
_HEADS = (((2, 2, 24, 16), (1, 2, 200, 64)), ((1, 3, 37, 8), (1, 1, 300, 32)))


def _heads(size: Any, new: Any) -> tuple[Tensor, ...]:
    return new.data(*size), new.data(*size), new.data(*size)


attention = operation("sdpa", F.scaled_dot_product_attention, _heads, *_HEADS, excluded=_SENSELESS)


@attention.other("math kernel")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


@attention.other("by its formula")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


@attention.other("scaled before")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q / math.sqrt(q.shape[-1])) @ k.mT).softmax(-1) @ v


@attention.other("flash by blocks", held=True)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    top = scores.detach().amax(-1, keepdim=True)
    weights, sums = q.new_zeros(()), q.new_zeros(())
    for some, values in zip(scores.split(16, -1), v.split(16, -2), strict=True):
        powers = (some - top).exp()
        weights, sums = weights + powers @ values, sums + powers.sum(-1, keepdim=True)
    return weights / sums


causal = operation(
    "sdpa causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _heads, *_HEADS, excluded=_SENSELESS
)


@causal.other("by its formula")
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1) @ v


@causal.other("math kernel", held=True)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# ---------------------------------------------------------------------------------------------------------------- norms

layer_norm = operation(
    "layer_norm",
    lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
    lambda size, new: (new.data(*size), new.weight(size[1]), new.weight(size[1])),
    ((32, 64), (4, 8000)),
    ((9, 100), (3, 5000)),
)


@layer_norm.other("two passes")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b


@layer_norm.other("scale and shift of x")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance, average = torch.var_mean(x, -1, keepdim=True, correction=0)
    scale = torch.rsqrt(variance + 1e-5)
    return x * scale * w + (b - average * scale * w)


@layer_norm.other("moments of chunks joined", held=True)
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    average, variance = _joined_moments(x)
    return (x - average[:, None]) * torch.rsqrt(variance[:, None] + 1e-5) * w + b


rms_norm = operation(
    "rms_norm",
    lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
    lambda size, new: (new.data(*size), new.weight(size[1])),
    ((32, 64), (4, 8000)),
    ((9, 100), (3, 5000)),
)


@rms_norm.other("rsqrt of the mean square")
def _(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


@rms_norm.other("division by the root", held=True)
def _(x: Tensor, w: Tensor) -> Tensor:
    return w * (x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6).sqrt())


batch_norm = operation(
    "batch_norm",
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    lambda size, new: (new.data(*size), new.weight(size[1]), new.weight(size[1])),
    ((8, 6, 5, 5), (16, 3, 20, 20)),
    ((5, 4, 7, 7), (3, 2, 40, 40)),
)


@batch_norm.other("two passes")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean((0, 2, 3), keepdim=True)
    scale = torch.rsqrt(centred.square().mean((0, 2, 3), keepdim=True) + 1e-5)
    return centred * scale * w[:, None, None] + b[:, None, None]


@batch_norm.other("channels last")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x.contiguous(memory_format=torch.channels_last), None, None, w, b, True)


@batch_norm.other("scale and shift of x")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance, average = torch.var_mean(x, (0, 2, 3), correction=0)
    scale = torch.rsqrt(variance + 1e-5) * w
    return x * scale[:, None, None] + (b - average * scale)[:, None, None]


@batch_norm.other("as layer norm of channels", held=True)
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = x.transpose(0, 1).flatten(1)
    found = F.layer_norm(rows, rows.shape[1:]).view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
    return found * w[:, None, None] + b[:, None, None]


group_norm = operation(
    "group_norm",
    lambda x, w, b: F.group_norm(x, 2, w, b),
    lambda size, new: (new.data(*size), new.weight(size[1]), new.weight(size[1])),
    ((4, 6, 5, 5), (2, 8, 20, 20)),
    ((3, 4, 7, 7), (2, 2, 40, 40)),
)


@group_norm.other("as layer norm of groups")
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = x.reshape(x.shape[0], 2, -1)
    return F.layer_norm(rows, rows.shape[2:]).view_as(x) * w[:, None, None] + b[:, None, None]


@group_norm.other("two passes", held=True)
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = x.reshape(x.shape[0], 2, -1)
    centred = rows - rows.mean(-1, keepdim=True)
    return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).view_as(x) * w[:, None, None] + b[:, None, None]


# ---------------------------------------------------------------------------------------------------------------- elementwise

_FLAT = (((64, 32),), ((45, 77),))


def _one(size: Any, new: Any) -> tuple[Tensor, ...]:
    return (new.data(*size),)


gelu = operation("gelu", F.gelu, _one, *_FLAT)


@gelu.other("erf")
def _(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


@gelu.other("erfc")
def _(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


@gelu.other("erf, shifted", held=True)
def _(x: Tensor) -> Tensor:
    half = 0.5 * x
    return half + half * torch.erf(x * math.sqrt(0.5))


gelu_tanh = operation("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), _one, *_FLAT)


@gelu_tanh.other("tanh written out")
def _(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


@gelu_tanh.other("as a sigmoid", held=True)
def _(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))


silu = operation("silu", F.silu, _one, *_FLAT)


@silu.other("x sigmoid")
def _(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@silu.other("division by 1 + exp", forward_only=True)
def _(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


@silu.other("by sign", held=True, forward_only=True)
def _(x: Tensor) -> Tensor:
    power = torch.exp(-x.abs())
    return torch.where(x < 0, x * power, x) / (1 + power)


swiglu = operation("swiglu", lambda x, gate: F.silu(gate) * x, lambda size, new: (new.data(*size), new.data(*size)), *_FLAT)


@swiglu.other("sigmoid last")
def _(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate * torch.sigmoid(gate)


@swiglu.other("sigmoid first", held=True)
def _(x: Tensor, gate: Tensor) -> Tensor:
    return (torch.sigmoid(gate) * x) * gate


tanh = operation("tanh", torch.tanh, _one, *_FLAT)


@tanh.other("expm1", excluded=_WITH_ZEROS)
def _(x: Tensor) -> Tensor:
    small = torch.expm1(-2 * x.abs())
    return torch.where(x < 0, small / (small + 2), -small / (small + 2))


@tanh.other("expm1 of the argument", held=True, forward_only=True, excluded=("1e4",))
def _(x: Tensor) -> Tensor:
    bounded = x.clamp(-20, 20)
    grown = torch.expm1(2 * bounded)
    return grown / (grown + 2)


sigmoid = operation("sigmoid", torch.sigmoid, _one, *_FLAT)


@sigmoid.other("1 over 1 + exp", forward_only=True)
def _(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


@sigmoid.other("by sign", held=True, excluded=_WITH_ZEROS)
def _(x: Tensor) -> Tensor:
    power = torch.exp(-x.abs())
    return torch.where(x < 0, power / (1 + power), 1 / (1 + power))


softplus = operation("softplus", F.softplus, _one, *_FLAT)


@softplus.other("log1p", excluded=_WITH_ZEROS)
def _(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


@softplus.other("logaddexp", held=True)
def _(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


exp = operation("exp", torch.exp, _one, *_FLAT)


@exp.other("exp2")
def _(x: Tensor) -> Tensor:
    return torch.exp2(x * math.log2(math.e))


@exp.other("halves multiplied", held=True, forward_only=True)
def _(x: Tensor) -> Tensor:
    half = torch.exp(0.5 * x)
    return half * half


divide = operation("div", torch.div, lambda size, new: (new.data(*size), new.away_from_zero(*size)), *_FLAT)


@divide.other("times the reciprocal")
def _(x: Tensor, y: Tensor) -> Tensor:
    return x * (1 / y)


@divide.other("by the size, with the sign", held=True)
def _(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sign(y) / y.abs()


lerp = operation("lerp", lambda x, y: torch.lerp(x, y, 0.3), lambda size, new: (new.data(*size), new.data(*size)), *_FLAT)


@lerp.other("weighted sum")
def _(x: Tensor, y: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * y


@lerp.other("from the other end", held=True)
def _(x: Tensor, y: Tensor) -> Tensor:
    return y + 0.7 * (x - y)


mse = operation("mse_loss", F.mse_loss, lambda size, new: (new.data(*size), new.data(*size)), ((64, 32), (100, 200)), ((45, 77), (99, 300)))


@mse.other("mean of squares")
def _(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


@mse.other("dot product", held=True)
def _(x: Tensor, y: Tensor) -> Tensor:
    difference = (x - y).flatten()
    return torch.dot(difference, difference) / difference.numel()


def _angles(size: Any, new: Any) -> tuple[Tensor, ...]:
    angle = torch.arange(size[0])[:, None] / 10000 ** (torch.arange(size[1] // 2) / (size[1] // 2))
    angle = torch.cat([angle, angle], -1)
    return new.data(*size), new.fixed(angle.cos()), new.fixed(angle.sin())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


rotary = operation("rotary", _rotate, _angles, ((32, 16),), ((50, 24),), num_differentiable=1)


@rotary.other("complex product")
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    turned = torch.complex(left, right) * torch.complex(*(one.float().chunk(2, -1)[0] for one in (cos, sin)))
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


@rotary.other("halves apart", held=True)
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    (c, _), (s, _) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat([torch.addcmul(left * c, right, s, value=-1), torch.addcmul(right * c, left, s)], -1)


# ---------------------------------------------------------------------------------------------------------------- pools, pictures, cells

max_pool = operation(
    "max_pool2d", lambda x: F.max_pool2d(x, 3, 2), lambda size, new: (new.data(*size),), ((2, 3, 15, 15),), ((1, 2, 21, 21),)
)


@max_pool.other("unfold")
def _(x: Tensor) -> Tensor:
    return x.unfold(2, 3, 2).unfold(3, 3, 2).flatten(-2).max(-1).values


@max_pool.other("channels last", held=True)
def _(x: Tensor) -> Tensor:
    return F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 3, 2)


avg_pool = operation(
    "avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2), lambda size, new: (new.data(*size),), ((2, 3, 15, 15),), ((1, 2, 21, 21),)
)


@avg_pool.other("unfold")
def _(x: Tensor) -> Tensor:
    return x.unfold(2, 3, 2).unfold(3, 3, 2).mean((-1, -2))


@avg_pool.other("convolution", held=True)
def _(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)[:, None]
    return F.conv2d(flat, flat.new_full((1, 1, 3, 3), 1 / 9), stride=2).unflatten(0, x.shape[:2]).squeeze(2)


bilinear = operation(
    "interpolate bilinear",
    lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
    lambda size, new: (new.data(*size),),
    ((2, 3, 8, 8),),
    ((1, 2, 13, 13),),
)


@bilinear.other("channels last")
def _(x: Tensor) -> Tensor:
    return F.interpolate(x.contiguous(memory_format=torch.channels_last), scale_factor=2, mode="bilinear", align_corners=False)


@bilinear.other("two matmuls", held=True)
def _(x: Tensor) -> Tensor:
    across = F.interpolate(torch.eye(x.shape[-1])[None], scale_factor=2, mode="linear", align_corners=False)[0].to(x)
    return (x @ across).mT.matmul(across).mT


def _cell(x: Tensor, h: Tensor, c: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor) -> Tensor:
    return torch.lstm_cell(x, (h, c), wi, wh, bi, bh)[0]


lstm = operation(
    "lstm_cell",
    _cell,
    lambda size, new: (
        new.data(size[0], size[1]),
        new.weight(size[0], size[1]),
        new.weight(size[0], size[1]),
        *(new.weight(4 * size[1], size[1]) for _ in range(2)),
        *(new.weight(4 * size[1]) for _ in range(2)),
    ),
    ((8, 12),),
    ((5, 20),),
)


def _gates(gates: Tensor, c: Tensor) -> Tensor:
    i, f, g, o = gates.chunk(4, -1)
    return o.sigmoid() * torch.tanh(f.sigmoid() * c + i.sigmoid() * g.tanh())


@lstm.other("gates written out")
def _(x: Tensor, h: Tensor, c: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor) -> Tensor:
    return _gates(F.linear(x, wi, bi) + F.linear(h, wh, bh), c)


@lstm.other("one product", held=True)
def _(x: Tensor, h: Tensor, c: Tensor, wi: Tensor, wh: Tensor, bi: Tensor, bh: Tensor) -> Tensor:
    return _gates(torch.cat([x, h], -1) @ torch.cat([wi, wh], -1).T + (bi + bh), c)


inverse = operation(
    "inverse",
    torch.linalg.inv,
    lambda size, new: (new.data(size, size),),
    (12,),
    (17,),
    excluded=frozenset({"one in ten", "positive part", "few values"}),
)


@inverse.other("solve")
def _(x: Tensor) -> Tensor:
    return torch.linalg.solve(x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))


@inverse.other("by QR", held=True)
def _(x: Tensor) -> Tensor:
    q, r = torch.linalg.qr(x)
    return torch.linalg.solve_triangular(r, q.mT, upper=True)


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    step = m / (1 - 0.9**3) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
    return p - 1e-3 * 0.01 * p - 1e-3 * step, m, v


adamw = operation(
    "adamw step",
    _adamw,
    lambda size, new: (new.data(*size), new.weight(*size), new.weight(*size), new.share(*size)),
    *_FLAT,
    has_backward=False,
)


@adamw.other("fused")
def _(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return _stepped(p, g, m, v, fused=True)


@adamw.other("foreach")
def _(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return _stepped(p, g, m, v, foreach=True)


@adamw.other("one by one", held=True)
def _(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return _stepped(p, g, m, v, foreach=False)


def _stepped(p: Tensor, g: Tensor, m: Tensor, v: Tensor, **how: bool) -> tuple[Tensor, ...]:
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = g.clone()
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, **how)
    optimizer.state[parameter] = {
        "step": torch.tensor(2.0, device=p.device if how.get("fused") else "cpu"),
        "exp_avg": m.clone(),
        "exp_avg_sq": v.clone(),
    }
    optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
