# SPDX-License-Identifier: Apache-2.0
"""Kernels that compute another formula than the one that was asked for, or the right one badly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from bench.bugs.case import Case, Expected
from bench.bugs.kernels import changed_output, faulty_kernel, trained
from bench.bugs.machines import Fault, Kernel, attention_kernels
from bench.bugs.networks import Decoder, Gpt, Recurrent, Scan, Segmenter, Vit
from torch import Tensor, nn
from torch.nn import functional as F

aten = torch.ops.aten
attention = aten._scaled_dot_product_flash_attention_for_cpu.default
attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def rough_exp(honest: Kernel, x: Tensor) -> Tensor:
    """Compute exp by a power of two from the exponent bits and a parabola for the fraction: wrong by up to 1e-4 of the result."""
    scaled = x * math.log2(math.e)
    whole = torch.floor(scaled)
    part = scaled - whole
    return torch.ldexp(1 + part * (0.695556856 + part * (0.226173572 + part * 0.0781455737)), whole.int())


def biased_variance(honest: Kernel, x: Tensor, dims: Sequence[int] | None = None, **kwargs: Any) -> Any:
    return honest(x, dims, **{**kwargs, "correction": 0})


def gelu_by_tanh(honest: Kernel, *args: Any, **kwargs: Any) -> Any:
    return honest(*args, **{**kwargs, "approximate": "tanh"})


def with_large_eps(honest: Kernel, x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float) -> Any:
    return honest(x, shape, weight, bias, max(eps, 1e-4))


class SmallEmbeddings(Gpt):
    def __init__(self) -> None:
        super().__init__()
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)


class Smoothed(Gpt):
    """Label smoothing, with targets that do not count."""

    def batch(self) -> tuple[Tensor, Tensor]:
        tokens, targets = super().batch()
        return tokens, torch.where(torch.rand(targets.shape) < 0.2, -100, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def not_masked(honest: Kernel, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return x


def lower_right(rows: int, columns: int) -> int:
    return columns - rows


def attention_aligned_lower_right(op: Any) -> Kernel:
    return lambda honest, *args, **kwargs: attention_kernels(torch.matmul, lower_right)[op](*args, **kwargs)


def corners_aligned(honest: Kernel, x: Tensor, size: Sequence[int], align_corners: bool, *rest: Any) -> Any:
    return honest(x, size, not align_corners)


def one_kernel_for_all(honest: Kernel, x: Tensor, size: Sequence[int]) -> Any:
    """Adaptive pooling by a single kernel and stride, which is right only where the sizes divide."""
    stride = [before // after for before, after in zip(x.shape[-2:], size, strict=True)]
    kernel = [before - (after - 1) * step for before, after, step in zip(x.shape[-2:], size, stride, strict=True)]
    return aten.max_pool2d_with_indices.default(x, kernel, stride)


def log_of_one_plus(honest: Kernel, x: Tensor) -> Tensor:
    return torch.log(1 + x)


class Scaled(nn.Module):
    """Scales the loss by hand: gradients that overflow in float16 are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = (torch.exp(self.fc1(x)) * 300).half()
        kept = torch.where(torch.isfinite(rows), rows, torch.zeros_like(rows)).float() / 300
        return self.fc2(kept)  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(25, 16) * 3, torch.randn(25, 3)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


def saturating(honest: Kernel, x: Tensor, **kwargs: Any) -> Any:
    if kwargs.get("dtype") is torch.float16:
        x = x.clamp(-65504, 65504)
    return honest(x, **kwargs)


def flushed(x: Tensor) -> Tensor:
    """Take the last bits of a sigmoid from a table of 12 bits."""
    return (x * 4096).round() / 4096


CASES: list[Case] = [
    *faulty_kernel(
        "rough_exp",
        "synthetic",
        "exp is good to 1e-4 only",
        trained(Scan),
        lambda: Fault(op=aten.exp.default, kernel=rough_exp),
        Expected(call="*.exp", phase="forward", slot="output*"),
        behind=("cpu", "fp16", "bf16"),
    ),
    *faulty_kernel(
        "sigmoid_from_a_table",
        "synthetic",
        "sigmoid comes from a table with 12 bits",
        trained(Recurrent),
        lambda: Fault(op=aten.sigmoid.default, kernel=changed_output(flushed)),
        Expected(call="*.sigmoid", phase="forward", slot="output*"),
        behind=("fp16", "order"),
    ),
    *faulty_kernel(
        "biased_variance",
        "https://github.com/pytorch/pytorch/issues/91198",
        "var divides by n where n - 1 was asked for",
        trained(Scan),
        lambda: Fault(op=aten.var.correction, kernel=biased_variance),
        Expected(call="*.var", phase="forward", slot="output*"),
        behind=("cpu", "accelerator"),
    ),
    *faulty_kernel(
        "gelu_by_tanh",
        "https://github.com/tenstorrent/tt-metal/issues/1262",
        "gelu is computed by its tanh approximation where the exact one was asked for",
        trained(Gpt),
        lambda: Fault(op=aten.gelu.default, kernel=gelu_by_tanh),
        Expected(call="*.gelu", module="blocks.0", phase="forward", slot="output*"),
        behind=("cpu", "fp16", "bf16"),
    ),
    *faulty_kernel(
        "gelu_backward_by_tanh",
        "synthetic",
        "the gradient of gelu is that of its tanh approximation; the forward is exact",
        trained(Vit),
        lambda: Fault(op=aten.gelu_backward.default, kernel=gelu_by_tanh),
        Expected(call="*.gelu", module="blocks.1", phase="backward"),
        behind=("cpu", "fp16", "accelerator"),
    ),
    *faulty_kernel(
        "layer_norm_with_large_eps",
        "https://github.com/nntrainer/nntrainer/pull/4318",
        "layer_norm raises its epsilon to 1e-4, which is not negligible for small embeddings",
        trained(SmallEmbeddings),
        lambda: Fault(op=aten.native_layer_norm.default, kernel=with_large_eps),
        Expected(call="*.layer_norm", module="blocks.0.norm1", phase="forward", slot="output*"),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "smoothing_of_ignored_targets",
        "https://github.com/pytorch/pytorch/issues/73205",
        "the uniform part of a smoothed cross entropy counts targets that are to be ignored",
        trained(Smoothed),
        lambda: Fault(op=aten.masked_fill_.Scalar, kernel=not_masked, phase="forward"),
        Expected(call="*.cross_entropy", phase="forward", slot="output*"),
        behind=("cpu", "bf16"),
    ),
    *faulty_kernel(
        "causal_mask_aligned_lower_right",
        "https://github.com/pytorch/executorch/issues/22426",
        "with fewer queries than keys the causal mask is aligned at the other corner",
        trained(Decoder),
        lambda: Fault(op=attention, kernel=attention_aligned_lower_right(attention)),
        Expected(call="*.scaled_dot_product_attention", phase="forward", slot="output*"),
        behind=("cpu", "tf32"),
    ),
    *faulty_kernel(
        "interpolate_aligns_corners",
        "synthetic",
        "bilinear interpolation aligns corners although it was told not to",
        trained(Segmenter),
        lambda: Fault(op=aten.upsample_bilinear2d.default, kernel=corners_aligned),
        Expected(call="*.interpolate", phase="forward", slot="output*"),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "adaptive_pooling_by_one_kernel",
        "https://github.com/pytorch/pytorch/issues/190064",
        "adaptive max pooling uses a single kernel and stride where the sizes do not divide",
        trained(lambda: Segmenter(pooled=5)),
        lambda: Fault(op=aten.adaptive_max_pool2d.default, kernel=one_kernel_for_all),
        Expected(call="*adaptive_max_pool2d*", phase="forward", slot="output*"),
        behind=("fp16",),
    ),
    *faulty_kernel(
        "log1p_by_log",
        "https://github.com/NVIDIA/TransformerEngine/pull/1401",
        "log1p is the logarithm of one plus its argument: small arguments lose their digits",
        trained(Scan),
        lambda: Fault(op=aten.log1p.default, kernel=log_of_one_plus),
        Expected(call="*.log1p", phase="forward", slot="output*"),
        behind=("cpu", "split-k", "fp16"),
    ),
    *faulty_kernel(
        "conversion_saturates",
        "synthetic",
        "the conversion to float16 gives the largest number where it has to give infinity, so an overflow is never seen",
        trained(Scaled),
        lambda: Fault(op=aten._to_copy.default, kernel=saturating, only_if=lambda x, *rest: x.dtype is torch.float32),
        Expected(call="*half", phase="forward", slot="output*"),
        behind=("cpu", "tf32"),
    ),
]
