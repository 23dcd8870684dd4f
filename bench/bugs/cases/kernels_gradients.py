# SPDX-License-Identifier: Apache-2.0
"""Kernels that are right forward and wrong backward: nothing shows until the weights have drifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from bench.bugs.case import Case, Expected, Program, Side
from bench.bugs.kernels import changed_output, faulty_kernel, trained
from bench.bugs.machines import Fault, Kernel, Machine, honest_kernels
from bench.bugs.networks import ConvNet, Experts, Gpt, Mlp, Segmenter, Vit, program
from torch import Tensor, nn
from torch.nn import functional as F

aten = torch.ops.aten


class Padded(Gpt):
    """Sequences of different lengths, filled up with a token whose embedding does not learn."""

    def __init__(self) -> None:
        super().__init__(padding=0)

    def batch(self) -> tuple[Tensor, Tensor]:
        tokens, targets = super().batch()
        padding = torch.arange(tokens.shape[1]) >= torch.randint(10, tokens.shape[1], (len(tokens), 1))
        return tokens.masked_fill(padding, 0), targets


def with_padding(honest: Kernel, gradient: Tensor, indices: Tensor, size: int, padding: int, scale: bool) -> Any:
    return honest(gradient, indices, size, -1, scale)


class Positioned(nn.Module):
    """Attention with a table of biases for relative positions, looked up by index: every entry is used many times."""

    def __init__(self, width: int = 24, length: int = 14) -> None:
        super().__init__()
        self.length = length
        self.q, self.k, self.v, self.head = (nn.Linear(width, width) for _ in range(4))
        self.table = nn.Parameter(torch.randn(2 * length - 1) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(self.length)
        bias = self.table[(places[:, None] - places[None, :] + self.length - 1)]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 5 + bias
        return self.head(F.softmax(scores, dim=-1) @ self.v(x))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(6, self.length, 24), torch.randn(6, self.length, 24)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


def last_one_wins(honest: Kernel, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    return honest(x, indices, values, False)


def overwriting_add(honest: Kernel, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Add by index as two writers of a row that do not see each other: one addition is lost."""
    result = x.clone()
    result.index_copy_(dim, index, x.index_select(dim, index) + source * alpha)
    return result


def windows_overwrite(honest: Kernel, gradient: Tensor, x: Tensor, *rest: Any) -> Tensor:
    indices = rest[-1]
    result = torch.zeros_like(x).flatten(2)
    result.scatter_(2, indices.flatten(2), gradient.flatten(2))
    return result.reshape(x.shape)


def window_too_narrow(honest: Kernel, gradient: Tensor, size: Sequence[int], entering: Sequence[int], *rest: Any) -> Any:
    """Compute the backward of a resize from too few output pixels: the farthest one of each window is left out."""
    skipped = gradient.clone()
    skipped[..., -1] = 0
    return honest(skipped, size, entering, *rest)


def rows_dropped(honest: Kernel, gradient: Tensor, x: Tensor, shape: Sequence[int], *rest: Any) -> Any:
    """Drop the last block of rows from the gradients of scale and shift: no program of the grid has a place for it."""
    of_x, *_ = honest(gradient, x, shape, *rest)
    width = shape[-1]
    kept = gradient.reshape(-1, width).clone()
    kept[len(kept) // 16 * 16 :] = 0
    _, of_weight, of_bias = honest(kept.reshape(gradient.shape), x, shape, *rest)
    return of_x, of_weight, of_bias


def batches_wrap(honest: Kernel, left: Tensor, right: Tensor) -> Tensor:
    """Read the left operand from the beginning again behind the sixteenth batch."""
    return honest(left[torch.arange(len(left)) % 16], right)


def tanh_with_wrong_sign(honest: Kernel, gradient: Tensor, output: Tensor) -> Tensor:
    return gradient * (1 - output.abs())


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Losses of tokens straight from hidden states, with the gradients computed in the forward pass and scaled in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, is_scaled_by_first: bool) -> Tensor:
        logits = x @ weight.t()
        ctx.save_for_backward(x, weight, torch.softmax(logits, -1) - F.one_hot(targets, len(weight)))
        ctx.is_scaled_by_first = is_scaled_by_first
        return F.cross_entropy(logits, targets, reduction="none")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, of_logits = ctx.saved_tensors
        scale = gradient[0] if ctx.is_scaled_by_first else gradient.unsqueeze(-1)
        return scale * of_logits @ weight, (scale * of_logits).t() @ x, None, None


class FusedLoss(nn.Module):
    """Tokens weighted by how much they count."""

    def __init__(self, is_scaled_by_first: bool) -> None:
        super().__init__()
        self.is_scaled_by_first = is_scaled_by_first
        self.body = Mlp(widths=(22, 40, 30))
        self.body.head = nn.Identity()
        self.weight = nn.Parameter(torch.randn(50, 30) * 0.2)

    def forward(self, x: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        losses = FusedLinearCrossEntropy.apply(self.body(x), self.weight, targets, self.is_scaled_by_first)
        return (losses * counts).sum() / counts.sum()

    def batch(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.randn(36, 22), (torch.randint(0, 50, (36,)), torch.rand(36) + 0.1)


def fused_loss(machine: str) -> Case:
    def build(side: Side) -> Program:
        return program(
            FusedLoss(side == "subject"),
            Machine(honest_kernels(machine)) if side == "subject" else None,
            loss=lambda model, x, rest: model(x, *rest),
        )

    return Case(
        name=f"fused_loss_scaled_by_first@{machine}",
        source="https://github.com/linkedin/Liger-Kernel/issues/968",
        what="a fused linear cross entropy without reduction scales the gradient of every token by that of the first",
        program=build,
        expected=Expected(call="*FusedLinearCrossEntropy*", phase="backward"),
        machine="" if machine == "cpu" else machine,
    )


CASES: list[Case] = [
    *faulty_kernel(
        "conv_weight_gradient_off",
        "synthetic",
        "the weight gradient of conv2d is 1 % too large",
        trained(ConvNet),
        lambda: Fault(op=aten.convolution_backward.default, kernel=changed_output(lambda x: x * 1.01, 1)),
        Expected(call="*.conv2d", module="convs.2", phase="backward", slot="output.1"),
        behind=("cpu", "fp16", "bf16", "accelerator"),
    ),
    *faulty_kernel(
        "padding_embedding_learns",
        "https://github.com/pytorch/pytorch/issues/26302",
        "the backward of embedding gives the padding row a gradient",
        trained(Padded),
        lambda: Fault(op=aten.embedding_dense_backward.default, kernel=with_padding, only_if=lambda g, i, n, padding, *rest: padding >= 0),
        Expected(call="*.embedding", module="tokens", phase="backward"),
        behind=("cpu", "fp16", "order"),
    ),
    *faulty_kernel(
        "lookup_gradient_overwrites",
        "https://github.com/pymc-devs/pytensor/pull/2242",
        "the gradient of a lookup keeps only the last of several contributions to an entry",
        trained(Positioned),
        lambda: Fault(op=aten.index_put.default, kernel=last_one_wins, phase="backward"),
        Expected(call="*__getitem__*", phase="backward"),
        behind=("cpu", "tf32"),
    ),
    *faulty_kernel(
        "index_add_overwrites",
        "https://github.com/torch-spyre/torch-spyre/issues/4411",
        "an addition by index keeps only one of several contributions to a row",
        trained(Experts),
        lambda: Fault(op=aten.index_add.default, kernel=overwriting_add, phase="forward"),
        Expected(call="*.index_add", phase="forward", slot="output*"),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "overlapping_windows_overwrite",
        "synthetic",
        "the backward of max pooling overwrites where windows overlap, instead of adding",
        trained(Segmenter),
        lambda: Fault(op=aten.max_pool2d_with_indices_backward.default, kernel=windows_overwrite),
        Expected(call="*max_pool2d*", phase="backward"),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "resize_gradient_drops_terms",
        "https://github.com/flagos-ai/FlagGems/issues/5218",
        "the backward of a bilinear resize leaves out the farthest pixels of its window",
        trained(Segmenter),
        lambda: Fault(op=aten.upsample_bilinear2d_backward.default, kernel=window_too_narrow),
        Expected(call="*.interpolate", phase="backward"),
        behind=("fp16", "split-k"),
    ),
    *faulty_kernel(
        "norm_gradient_drops_rows",
        "https://github.com/BobMcDear/attorch/issues/18",
        "the gradients of a layer norm's weight and bias miss the last block of rows",
        trained(Gpt),
        lambda: Fault(op=aten.native_layer_norm_backward.default, kernel=rows_dropped),
        Expected(call="*.layer_norm", module="norm", phase="backward"),
        behind=("cpu", "fp16", "accelerator-tf32"),
    ),
    *faulty_kernel(
        "batched_product_wraps",
        "https://github.com/pytorch/pytorch/issues/197636",
        "in the backward of a batched product the later batches read the gradient from the beginning again",
        trained(lambda: Vit(fused=False)),
        lambda: Fault(op=aten.bmm.default, kernel=batches_wrap, phase="backward", calls=[0]),
        Expected(call="*matmul*", module="blocks.1.attention", phase="backward"),
        behind=("cpu", "fp16", "accelerator"),
    ),
    *faulty_kernel(
        "tanh_gradient",
        "synthetic",
        "the gradient of tanh is 1 - |y| instead of 1 - y^2, in one of many layers",
        trained(lambda: Mlp(between=lambda _: nn.Tanh())),
        lambda: Fault(op=aten.tanh_backward.default, kernel=tanh_with_wrong_sign, calls=[1]),
        Expected(call="*.tanh", module="between.1", phase="backward"),
        behind=("bf16", "order"),
    ),
    fused_loss("cpu"),
    fused_loss("fp16"),
]
