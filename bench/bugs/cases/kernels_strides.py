# SPDX-License-Identifier: Apache-2.0
"""Kernels that take the start of a tensor and its shape, and never ask for its strides."""

from __future__ import annotations

from typing import Any

import torch
from bench.bugs.case import Case, Expected
from bench.bugs.kernels import as_if_contiguous, faulty_kernel, is_strided, trained
from bench.bugs.machines import Fault, Kernel
from bench.bugs.networks import ConvNet, LinearAttention, Mlp
from torch import Tensor, nn
from torch.nn import functional as F

aten = torch.ops.aten
ISSUES = "https://github.com/pytorch/pytorch/issues"


class ChannelsLast(ConvNet):
    def batch(self) -> tuple[Tensor, Tensor]:
        images, targets = super().batch()
        return images.to(memory_format=torch.channels_last), targets


def batch_norm_backward(honest: Kernel, gradient: Tensor, x: Tensor, *rest: Any) -> Any:
    return honest(gradient, as_if_contiguous(x), *rest)


class Slices(nn.Module):
    """A convolution over time, written as a sum of convolutions with slices of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, 3, 3, 3) * 0.1)
        self.head = nn.Linear(8, 6)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.conv2d(frames[:, 0], self.weight[:, :, 0], padding=1)
        for time in (1, 2):
            x = x + F.conv2d(frames[:, time], self.weight[:, :, time], padding=1)
        return self.head(F.silu(x).mean((2, 3)))  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(4, 3, 5, 12, 12), torch.randint(0, 6, (4,))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets)


def convolution(honest: Kernel, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    return honest(x, as_if_contiguous(weight), *rest)


class Transposed(Mlp):
    """One of its weights lies in memory as the transpose of what it is, as weights shared with an encoder do."""

    def __init__(self) -> None:
        super().__init__(widths=(20, 44, 44, 28))
        self.layers[1].weight = nn.Parameter(self.layers[1].weight.detach().t().contiguous().t())


def lost(honest: Kernel, written: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    honest(written.clone(), *rest, **kwargs)
    return written


def softmax(honest: Kernel, x: Tensor, *rest: Any) -> Any:
    return honest(as_if_contiguous(x), *rest)


def softmax_backward(honest: Kernel, gradient: Tensor, *rest: Any) -> Any:
    return honest(as_if_contiguous(gradient), *rest)


class TransposedAfter(LinearAttention):
    """The keys are transposed after their softmax, so its gradient comes back transposed."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        keys = F.softmax(self.k(rows), dim=1)
        return self.head((F.softmax(self.q(rows), dim=-1) @ (keys.transpose(1, 2) @ self.v(rows))).mean(1))  # type: ignore[no-any-return]


def softplus(honest: Kernel, x: Tensor, *rest: Any) -> Any:
    return honest(as_if_contiguous(x), *rest)


class Rates(nn.Module):
    """Rates made positive after the channels were moved to the front."""

    def __init__(self) -> None:
        super().__init__()
        self.entering, self.rate, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.entering(x))
        rate = F.softplus(self.rate(rows).movedim(-1, 1))
        return self.head(rate * rows.movedim(-1, 1)).mean(1)  # type: ignore[no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(5, 24, 16), torch.randn(5, 3)

    def loss(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(found, wanted)


CASES: list[Case] = [
    *faulty_kernel(
        "batch_norm_backward_channels_last",
        f"{ISSUES}/175189",
        "the backward of batch norm reads an input in channels_last memory as if it were contiguous; the forward is right",
        trained(ChannelsLast),
        lambda: Fault(op=aten.native_batch_norm_backward.default, kernel=batch_norm_backward, only_if=lambda g, x, *rest: is_strided(x)),
        Expected(call="*.batch_norm", module="norms.2", phase="backward"),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "conv2d_sliced_weight",
        f"{ISSUES}/192212",
        "conv2d reads a weight that is a slice of a larger one as if it were contiguous",
        trained(Slices),
        lambda: Fault(
            op=aten.convolution.default, kernel=convolution, phase="forward", only_if=lambda x, weight, *rest: is_strided(weight)
        ),
        Expected(call="*.conv2d", phase="forward", slot="output*"),
        behind=("cpu", "accelerator"),
    ),
    *faulty_kernel(
        "adam_addcdiv_strided",
        f"{ISSUES}/118115",
        "addcdiv_ writes a non-contiguous parameter to a copy, so Adam never moves it",
        trained(Transposed, optimizer=torch.optim.Adam),
        lambda: Fault(op=aten.addcdiv_.default, kernel=lost, only_if=lambda x, *rest: is_strided(x)),
        Expected(call="optimizer.Adam", phase="optimizer", slot="mutated.layers.1.weight"),
        behind=("cpu", "fp16", "accelerator"),
    ),
    *faulty_kernel(
        "softmax_strided",
        "https://github.com/tracel-ai/burn/issues/4815",
        "softmax of a transposed tensor is taken over the memory underneath",
        trained(LinearAttention),
        lambda: Fault(op=aten._softmax.default, kernel=softmax, only_if=lambda x, *rest: is_strided(x)),
        Expected(call="*.softmax", phase="forward", slot="output*"),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "softmax_backward_strided",
        "https://github.com/flagos-ai/Torch-FL/issues/171",
        "the backward of softmax ignores the strides of the gradient that it is given; the forward is right",
        trained(TransposedAfter),
        lambda: Fault(op=aten._softmax_backward_data.default, kernel=softmax_backward, only_if=lambda g, *rest: is_strided(g)),
        Expected(call="*.softmax", phase="backward"),
        behind=("cpu", "tf32"),
    ),
    *faulty_kernel(
        "softplus_strided",
        f"{ISSUES}/131736",
        "softplus reads a tensor with moved axes as if it were contiguous",
        trained(Rates),
        lambda: Fault(op=aten.softplus.default, kernel=softplus, only_if=lambda x, *rest: is_strided(x)),
        Expected(call="*.softplus", phase="forward", slot="output*"),
        behind=("split-k",),
    ),
]
