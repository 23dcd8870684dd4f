# SPDX-License-Identifier: Apache-2.0
"""Kernels that add up in fewer bits than they were given, or by a formula that cancels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from bench.bugs.case import Case, Expected
from bench.bugs.kernels import changed_output, faulty_kernel, trained
from bench.bugs.machines import Fault, Kernel, attention_kernels
from bench.bugs.networks import ConvNet, Gpt, Mlp, RmsNorm, Scan, Vit
from torch import Tensor, nn
from torch.nn import functional as F

aten = torch.ops.aten
attention = aten._scaled_dot_product_flash_attention_for_cpu.default


def summed_in(x: Tensor, dim: int, dtype: torch.dtype, lanes: int = 1) -> Tensor:
    """Sum over a dimension with every partial sum rounded to `dtype`, in as many lanes as a vector unit has."""
    terms = x.movedim(dim, 0)
    while len(terms) % lanes:
        terms = torch.cat([terms, torch.zeros_like(terms[:1])])
    totals = torch.zeros_like(terms[:lanes], dtype=dtype)
    for low in range(0, len(terms), lanes):
        totals = (totals.float() + terms[low : low + lanes].float()).to(dtype)
    return totals.float().sum(0).to(dtype)


# ---- group norm ------------------------------------------------------------------------------------------------------------------------


def group_norm_in_bfloat16(
    honest: Kernel, x: Tensor, weight: Tensor, bias: Tensor, batch: int, channels: int, inner: int, groups: int, eps: float
) -> Any:
    rows = x.reshape(batch, groups, -1)
    count = rows.shape[-1]
    mean = summed_in(rows, -1, torch.bfloat16).float() / count
    square = summed_in(rows.float().square().bfloat16(), -1, torch.bfloat16).float() / count
    inverse = torch.rsqrt((square - mean.square()).clamp(min=0) + eps)
    normal = ((rows.float() - mean.unsqueeze(-1)) * inverse.unsqueeze(-1)).reshape(x.shape)
    result = normal * weight.float().reshape(1, -1, 1, 1) + bias.float().reshape(1, -1, 1, 1)
    return result.to(x.dtype), mean.to(x.dtype), inverse.to(x.dtype)


class InBfloat16(ConvNet):
    """A network with group norm, all of it in bfloat16."""

    def __init__(self) -> None:
        super().__init__(norm=lambda width: nn.GroupNorm(2, width))
        self.to(torch.bfloat16)

    def batch(self) -> tuple[Tensor, Tensor]:
        images, targets = super().batch()
        return (images + 1).to(torch.bfloat16), targets

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)


# ---- running sums, softmax, gradients of scales -----------------------------------------------------------------------------------------


def running_sum_in_bfloat16(honest: Kernel, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    total, totals = torch.zeros_like(x.select(dim, 0), dtype=torch.bfloat16), []
    for term in x.unbind(dim):
        total = (total.float() + term.float()).bfloat16()
        totals.append(total)
    return torch.stack(totals, dim).to(dtype or x.dtype)


def softmax_with_sum_in_bfloat16(honest: Kernel, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    powers = torch.exp(x.float() - x.float().amax(dim, keepdim=True)).bfloat16()
    return (powers.float() / summed_in(powers, dim, torch.bfloat16).float().unsqueeze(dim)).to(x.dtype)


class Lookup(nn.Module):
    """Attention in bfloat16 over a memory of many keys, most of them about equally fit."""

    def __init__(self) -> None:
        super().__init__()
        self.entering = nn.Linear(24, 32)
        self.keys, self.values = nn.Parameter(torch.randn(700, 32) * 0.05), nn.Parameter(torch.randn(700, 32))
        self.head = nn.Linear(32, 4)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(F.gelu(self.entering(x)) @ self.keys.t(), dim=-1)
        return self.head(weights @ self.values)  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(12, 24).bfloat16(), torch.randn(12, 4).bfloat16()

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


def sum_in_bfloat16(honest: Kernel, x: Tensor, dims: Sequence[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    moved = x.movedim(list(dims), list(range(len(dims)))).flatten(0, len(dims) - 1)
    total = summed_in(moved, 0, torch.bfloat16)
    return total.reshape([1 if at in dims else size for at, size in enumerate(x.shape)]) if keepdim else total


class Normed(nn.Module):
    """Rows in bfloat16 through a norm with a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(20, 40), RmsNorm(40), nn.Linear(40, 3)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(F.silu(self.fc1(x))))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(3000, 20).bfloat16(), (torch.randn(3000, 3) + 3).bfloat16()

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


# ---- attention -------------------------------------------------------------------------------------------------------------------------


def product_in_float16(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices with every partial sum rounded to float16, eight terms at a time."""
    total = torch.zeros(*left.shape[:-1], right.shape[-1], dtype=torch.float16)
    for low in range(0, left.shape[-1], 8):
        part = left[..., low : low + 8].half().float() @ right[..., low : low + 8, :].half().float()
        total = (total.float() + part).half()
    return total.float()


def attention_in_float16(honest: Kernel, *args: Any, **kwargs: Any) -> Any:
    return attention_kernels(product_in_float16)[attention](*args, **kwargs)


# ---- layer norm ------------------------------------------------------------------------------------------------------------------------


def layer_norm_in_one_pass(
    honest: Kernel, x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    variance = x.square().mean(dims, keepdim=True) - mean.square()
    variance = torch.where(variance < 1e-6, 0.0, variance)
    inverse = torch.rsqrt(variance + eps)
    return (x - mean) * inverse * weight + bias, mean, inverse


class Flat(Vit):
    """Small patch embeddings, as they are at the start of training, and a norm with a tiny epsilon."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-12
        with torch.no_grad():
            self.patches.weight.mul_(1e-3)
            self.patches.bias.mul_(1e-3)


def inverse_in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


CASES: list[Case] = [
    *faulty_kernel(
        "group_norm_moments_in_bfloat16",
        "https://github.com/pytorch/pytorch/issues/77507",
        "group_norm of bfloat16 accumulates its moments in bfloat16",
        trained(InBfloat16),
        lambda: Fault(op=aten.native_group_norm.default, kernel=group_norm_in_bfloat16),
        Expected(call="*.group_norm", module="norms.0", phase="forward", slot="output*"),
        behind=("cpu", "accelerator"),
    ),
    *faulty_kernel(
        "cumsum_in_bfloat16",
        "synthetic",
        "cumsum of float32 keeps its running total in bfloat16",
        trained(Scan),
        lambda: Fault(op=aten.cumsum.default, kernel=running_sum_in_bfloat16),
        Expected(call="*.cumsum", phase="forward", slot="output*"),
        behind=("cpu", "fp16", "bf16"),
    ),
    *faulty_kernel(
        "cumsum_of_bfloat16",
        "https://github.com/tenstorrent/tt-metal/pull/41371",
        "cumsum of bfloat16 rounds every partial sum to bfloat16",
        trained(lambda: Scan(length=480, dtype=torch.bfloat16)),
        lambda: Fault(op=aten.cumsum.default, kernel=running_sum_in_bfloat16, phase="forward"),
        Expected(call="*.cumsum", phase="forward", slot="output*"),
        behind=("functions",),
    ),
    *faulty_kernel(
        "softmax_sum_in_bfloat16",
        "https://github.com/pytorch/executorch/pull/20090",
        "softmax of bfloat16 adds its row up in bfloat16, where 256 + 1 is 256",
        trained(Lookup),
        lambda: Fault(op=aten._softmax.default, kernel=softmax_with_sum_in_bfloat16),
        Expected(call="*.softmax", phase="forward", slot="output*"),
        behind=("cpu", "functions"),
    ),
    *faulty_kernel(
        "scale_gradient_in_bfloat16",
        "https://github.com/linkedin/Liger-Kernel/pull/950",
        "the gradient of a norm's scale is summed over all rows in bfloat16",
        trained(Normed),
        lambda: Fault(
            op=aten.sum.dim_IntList, kernel=sum_in_bfloat16, phase="backward", only_if=lambda x, *rest: x.shape == (3000, 40), calls=[0]
        ),
        Expected(call="*mul*", module="norm", phase="backward"),
        behind=("cpu", "functions"),
    ),
    *faulty_kernel(
        "attention_accumulates_in_float16",
        "https://github.com/ikawrakow/ik_llama.cpp/pull/2151",
        "fused attention accumulates its products in float16",
        trained(lambda: Gpt(length=72)),
        lambda: Fault(op=attention, kernel=attention_in_float16),
        Expected(call="*.scaled_dot_product_attention", module="blocks.0.attention", phase="forward", slot="output*"),
        behind=("cpu", "split-k", "functions"),
    ),
    *faulty_kernel(
        "layer_norm_in_one_pass",
        "https://github.com/pytorch/pytorch/issues/190491",
        "layer_norm takes the variance as E[x^2] - E[x]^2 and sets it to zero below 1e-6",
        trained(Flat),
        lambda: Fault(op=aten.native_layer_norm.default, kernel=layer_norm_in_one_pass),
        Expected(call="*.layer_norm", module="blocks.0.norm1", phase="forward", slot="output*"),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "rms_norm_inverse_in_bfloat16",
        "https://github.com/amd/IRON/pull/139",
        "the inverse root of a norm is rounded to bfloat16 before it scales the row: one coherent error for each row",
        trained(lambda: Mlp(between=RmsNorm)),
        lambda: Fault(op=aten.rsqrt.default, kernel=changed_output(inverse_in_bfloat16)),
        Expected(call="*.rsqrt", phase="forward", slot="output*"),
        behind=("cpu", "accelerator-tf32"),
    ),
]
