# SPDX-License-Identifier: Apache-2.0
"""Hold small programs, each with the calls whose replay it tests. A program returns the tensors to differentiate, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def _unary(name: str, call: Callable[[torch.Tensor], Any], *shape: int, dtype: torch.dtype = torch.float32) -> None:
    CASES[name] = lambda: call(leaf(*(shape or (4, 6)), dtype=dtype))


_unary("operators", lambda x: (2 - x) / (x * x + 1.5) ** 2 - x.abs() % 3 + (x @ x.T).sum() + (-x).sum())
_unary("powers", lambda x: 2**x + x**2.0 + x.pow(3) + 1 / (x + 10))
_unary("comparisons", lambda x: (x > 0).float() + (x == x).sum() + ((x < 1) & ~(x >= 2)).sum() + x)
_unary("reductions", lambda x: x.sum(1) + x.mean(dim=1) + x.amax(1) + x.norm(dim=1) + x.var(1, unbiased=False) + x.std(1) + x.prod(1))
_unary("reduced_in_another_dtype", lambda x: torch.sum(x, dtype=torch.float64) + x.mean(dtype=torch.float32))
_unary("sorting", lambda x: x.sort(descending=True)[0] + x.topk(6).values + x.median(dim=1).values[:, None] + x.max(1)[0][:, None])
_unary("indices", lambda x: x.argmax(1).float() * x.cumsum(1)[:, 0] + x.argsort(1)[:, 0])
_unary("shapes", lambda x: x.view(2, 12).reshape(-1).unflatten(0, (4, 6)).t().contiguous().permute(1, 0).unsqueeze(0).squeeze(0))
_unary("repeated", lambda x: x.repeat(2, 1) + x.expand(2, 4, 6).flatten(0, 1) + x.repeat_interleave(2, dim=0) + x.tile(2, 1))
_unary("split_and_joined", lambda x: torch.cat([*x.chunk(2), *x.split([1, 3])]) + torch.stack(x.unbind(0)).roll(1, 0).repeat(2, 1))
_unary("same_tensor_twice", lambda x: x * x + torch.cat([x, x])[:4] + torch.addcmul(x, x, x) + x.matmul(x.mT).sum())
_unary("sliced", lambda x: x[1:, ::2].sum() + x[..., None].mean() + x[torch.tensor([0, 2])].sum() + x[x > 0].sum() + x[:, [1, 2]].prod())
_unary("gathered", lambda x: x.gather(1, torch.tensor([[0, 1]] * 4)) + x.index_select(1, torch.tensor([3, 3])) + x.take(torch.tensor(5)))
_unary("scattered", lambda x: torch.zeros(4, 6).scatter_add(1, torch.zeros(4, 6, dtype=torch.int64), x) + x.masked_fill(x > 1, -1e9))
_unary("clamped", lambda x: x.clamp(-1, 1) + x.clip(min=0) + torch.where(x > 0, x, 0.0) + torch.maximum(x, -x) + x.nan_to_num())
_unary(
    "activations", lambda x: F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.elu(x) + F.softplus(x) + F.mish(x) + F.hardswish(x)
)
_unary(
    "more_activations", lambda x: F.relu(x) + F.leaky_relu(x, 0.2) + x.sigmoid() + torch.tanh(x) + F.glu(torch.cat([x, x], 1)) + F.selu(x)
)
_unary(
    "softmaxes", lambda x: F.softmax(x, -1) + x.log_softmax(0) + torch.logsumexp(x, 1, keepdim=True) + F.softmax(x, 1, dtype=torch.float64)
)
_unary("normalised", lambda x: F.layer_norm(x, (6,)) + F.rms_norm(x, (6,)) + F.normalize(x) + F.group_norm(x[..., None], 2)[..., 0])
_unary("losses", lambda x: F.mse_loss(x, x.detach() + 1) + F.l1_loss(x, torch.zeros(4, 6)) + F.smooth_l1_loss(x, x.detach() * 2))
_unary("cross_entropies", lambda x: F.cross_entropy(x, torch.arange(4)) + F.nll_loss(x.log_softmax(1), torch.arange(4), reduction="sum"))
_unary(
    "binary_losses",
    lambda x: (
        F.binary_cross_entropy_with_logits(x, torch.ones(4, 6)) + F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean")
    ),
)
_unary("algebra", lambda x: torch.linalg.inv(x @ x.T + torch.eye(4)) + torch.linalg.norm(x) + torch.einsum("ij,kj->ik", x, x) + x.mm(x.t()))
_unary(
    "more_algebra", lambda x: torch.addmm(x[:, :4], x, x.T, beta=0.5) + torch.bmm(x[None], x.T[None])[0] + torch.outer(x[0], x[1])[:4, :4]
)
_unary("special", lambda x: torch.special.erf(x) + torch.erfc(x) + torch.special.expit(x) + torch.log1p(x.abs()) + torch.rsqrt(x.abs() + 1))
_unary("padded", lambda x: F.pad(x, (1, 1)) + F.pad(x[None], (1, 1), mode="reflect")[0] + F.avg_pool1d(x[None], 3, 1, 1)[0].sum())
_unary("casts", lambda x: x.double().float() + x.half().float() + x.to(torch.bfloat16).to(x) + x.type(torch.float64).type_as(x))
_unary("cast_by_text", lambda x: x.type("torch.DoubleTensor").to("cpu").to(device="cpu", dtype=torch.float32))
_unary("bits", lambda x: x.detach().view(torch.int32).float().sum() * 0 + x)
_unary("low_precision", lambda x: F.layer_norm(F.linear(x, x) @ x, (6,)).softmax(-1) * 3 + F.gelu(x), dtype=torch.bfloat16)
_unary("half_precision", lambda x: F.linear(x, x) @ x + torch.exp(x) + F.cross_entropy(x, torch.arange(4)), dtype=torch.float16)
_unary("wide", lambda x: F.gelu(x) + x.sum(), dtype=torch.float64)
_unary("complex_numbers", lambda x: (torch.fft.rfft(x) * (1 + 2j)).conj().abs() + torch.view_as_real(torch.fft.fft(x)).sum(), 4, 6)
_unary("complex_parts", lambda x: torch.fft.fft(x).real + torch.fft.fft(x).imag + torch.polar(x.abs(), x).mH.real.T, 4, 6)
_unary("named_arguments", lambda x: torch.sum(input=x, dim=1, keepdim=True) + F.gelu(input=x, approximate="none") + torch.mul(x, other=2))
_unary(
    "made_like", lambda x: x + torch.ones_like(x) + x.new_zeros(4, 6) + torch.full_like(x, 2) + x.new_full((6,), 1.0) + x.new_tensor([1.0])
)
_unary(
    "made",
    lambda x: x + torch.zeros(6) + torch.arange(6) + torch.linspace(0, 1, 6) + torch.eye(6)[:4] + torch.tensor([1.0] * 6) + torch.ones(1),
)


@case
def modules():
    x = leaf(3, 5, 8)
    weight, bias = leaf(8, 8), leaf(8)
    y = F.linear(x, weight, bias)
    y = F.layer_norm(y, (8,), weight[0], bias)
    return F.linear(y, weight) + F.embedding(torch.tensor([[1, 2, 3, 1, 1]] * 3), weight) + F.linear(y, weight, bias=bias)


@case
def convolutions():
    x = torch.randn(2, 4, 7, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = F.conv2d(x, leaf(6, 4, 3, 3), padding=1)
    y = F.batch_norm(y, torch.zeros(6), torch.ones(6), leaf(6), leaf(6), training=True)
    y = F.max_pool2d(y, 2) + F.adaptive_avg_pool2d(y, (3, 3))
    return F.interpolate(F.conv_transpose2d(y, leaf(6, 2, 2, 2), stride=2), scale_factor=2) + F.instance_norm(x)[:, :2, :1, :1]


@case
def attention():
    q, k, v = (leaf(2, 3, 5, 8) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True) + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    return y + F.scaled_dot_product_attention(q.transpose(1, 2).transpose(1, 2), k, v)


@case
def recurrent():
    x, h = leaf(4, 3, 5), torch.zeros(1, 3, 6)
    weights = [leaf(24, 5), leaf(24, 6), leaf(24), leaf(24)]
    out, hn, cn = torch.lstm(x, (h, h), weights, True, 1, 0.0, True, False, False)
    return out.sum() + hn.sum() + cn.sum() + torch.gru_cell(x[0], h[0], leaf(18, 5), leaf(18, 6)).sum()


@case
def in_place():
    x = leaf(4, 6)
    h = x * 1
    h += x
    h.mul_(0.5).add_(1, alpha=2).clamp_(-3, 3)
    h = F.relu(h, inplace=True) * 1
    torch.sigmoid_(h)
    return F.dropout(h, 0.0, True, True) + F.leaky_relu_(x * 2, 0.1)


@case
def written_items():
    cache = torch.zeros(4, 6)
    cache[:, :3] = leaf(4, 3)
    cache[1] = 5.0
    cache.index_put_((torch.tensor([0, 2]),), leaf(2, 6))
    cache.masked_fill_(cache > 4, 0.5)
    return cache.index_add(0, torch.tensor([1, 1]), leaf(2, 6)).copy_(leaf(4, 6)) * cache.t().t()


@case
def written_views():
    cache = leaf(4, 6) * 1
    cache[:, 0].mul_(2)
    return cache


@case
def written_through_a_reshape():
    y = F.linear(leaf(2, 3, 4), leaf(5, 4), leaf(5))
    y += 1
    return F.relu_(y)


@case
def given_a_result():
    x = torch.randn(4, 6)
    out = torch.empty(4, 6)
    torch.add(x, 1, out=out)
    values, places = torch.empty(4), torch.empty(4, dtype=torch.int64)
    torch.max(x, 1, out=(values, places))
    torch.empty(3).fill_(2.0).add_(1)


@case
def many_tensors():
    tensors = [torch.randn(3), torch.randn(2, 2)]
    torch._foreach_mul_(tensors, 2.0)
    torch._foreach_norm(tensors)
    torch.meshgrid(torch.arange(3.0), torch.arange(2.0), indexing="ij")
    torch.broadcast_tensors(tensors[0], torch.ones(2, 1))
    F.one_hot(torch.tensor([0, 2, 1]), 4)
    torch.bincount(torch.tensor([0, 2, 1]))
    torch.repeat_interleave(torch.tensor([1, 2]), torch.tensor([2, 3]))
    torch.unique(torch.tensor([3, 1, 3]), return_inverse=True)


@case
def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(leaf(4, 6), leaf(6, 6)) @ leaf(6, 6)
        return F.layer_norm(y.float(), (6,)) + F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])[0, 0]


@case
def strides():
    x = leaf(6, 8)
    part = x[:, ::2]
    return F.linear(part, part) + F.softmax(x.t(), 0)[:6, :6] + torch.ones(1).expand(6, 6) * part.sum(1) + x.t().contiguous().sum()


@case
def strides_laid_over():
    x = torch.randn(4, 6)
    x.as_strided((2, 2), (1, 6))
    x[1:].as_strided((2, 2), (1, 6), 0)
    x.t().as_strided((2, 2), (1, 6))


@case
def without_gradients():
    with torch.no_grad():
        (torch.randn(3, 4).t() @ torch.ones(3, 2)).relu()
    with torch.inference_mode():
        torch.ones(3).mul_(2).sum()


@case
def random_numbers():
    x = leaf(50)
    torch.randn(3), torch.randperm(9), torch.empty(20).normal_(), torch.nn.init.uniform_(torch.empty(8))
    torch.rand(4, generator=torch.Generator())
    return F.dropout(x, 0.5) + torch.bernoulli(x.sigmoid()) + F.rrelu(x, training=True) + x.detach().abs().multinomial(1)


@case
def not_random():
    x = leaf(50)
    return F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0) + F.rrelu(x)


@case
def another_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        return torch.zeros(3) + torch.rand(3) * 0 + torch.arange(3) / 2 + torch.full((3,), 0.1) + leaf(3, dtype=torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


@case
def twice_backward():
    x = leaf(4)
    y = x.exp()
    y.sum().backward(retain_graph=True)
    return y * 2


@case
def differentiated_twice():
    x, weight = leaf(4, 3), leaf(3, 3)
    (slope,) = torch.autograd.grad(torch.tanh(F.linear(x, weight)).sum(), x, create_graph=True)
    return slope


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


@case
def users_function():
    return Twice.apply(leaf(3))


@torch.library.custom_op("ulpscope_replay::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.custom_op("ulpscope_replay::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor, by: float) -> None:
    x.add_(by)


scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
)


@case
def users_operations():
    x = leaf(3)
    shift_(x.detach() * 1, 2.0)
    return scaled(x, 3.0) + torch.ops.ulpscope_replay.scaled(x, by=0.5) + torch.ops.aten.mul.Tensor(x, x)


@case
def layouts_without_strides():
    x = torch.randn(3, 3)
    x.to_sparse().to_dense()
    torch.empty(3, device="meta") + 1
    torch.empty(3)
