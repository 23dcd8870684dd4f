# SPDX-License-Identifier: Apache-2.0
"""Faults that strike now and then: a flipped bit, a result that was never written, rows behind a limit of the grid."""

from __future__ import annotations

from typing import Any

import torch
from bench.bugs.case import Case, Expected
from bench.bugs.kernels import changed_output, faulty_kernel, trained
from bench.bugs.machines import Fault, Kernel
from bench.bugs.networks import Gpt, Mlp, Recurrent, Vit
from torch import Tensor

aten = torch.ops.aten
attention = aten._scaled_dot_product_flash_attention_for_cpu.default


def flipped(bit: int) -> Kernel:
    """Flip one bit of one element in the middle of the result."""

    def change(x: Tensor) -> Tensor:
        words = x.contiguous().clone().view(torch.int32).flatten()
        words[len(words) // 2] ^= 1 << bit
        return words.view(torch.float32).reshape(x.shape)

    return changed_output(change)


def stale() -> Kernel:
    """Return the buffer of the last call without having written to it."""
    kept: list[Any] = []

    def kernel(honest: Kernel, *args: Any, **kwargs: Any) -> Any:
        out, *rest = honest(*args, **kwargs)
        found = kept[-1] if kept else out
        kept.append(out.clone())
        return found.clone(), *rest

    return kernel


def rows_missing(honest: Kernel, bias: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> Tensor:
    """Give rows behind a limit their bias and nothing else."""
    result = honest(bias, left, right, **kwargs).clone()
    result[len(left) * 7 // 8 :] = bias
    return result


def column_shifted(x: Tensor) -> Tensor:
    """Write the last tile of eight columns one column too far."""
    moved = x.clone()
    moved[..., -7:] = x[..., -8:-1]
    return moved


CASES: list[Case] = [
    *faulty_kernel(
        "flipped_exponent_bit",
        "synthetic",
        "one exponent bit of one element of one matrix product flips, at step 2",
        trained(Gpt, steps=3),
        lambda: Fault(op=aten.addmm.default, kernel=flipped(25), phase="forward", calls=[6], steps=[2]),
        Expected(call="*.linear", module="blocks.1.fc1", phase="forward", slot="output*", step=2),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "flipped_fraction_bit",
        "synthetic",
        "one fraction bit of one element of one matrix product flips, at step 2",
        trained(Vit, steps=3),
        lambda: Fault(op=aten.addmm.default, kernel=flipped(20), phase="forward", calls=[3], steps=[2]),
        Expected(call="*.linear", module="blocks.0.fc2", phase="forward", slot="output*", step=2),
        behind=("cpu", "fp16", "split-k"),
    ),
    *faulty_kernel(
        "flipped_bit_in_gradient",
        "synthetic",
        "one exponent bit of one element of one gradient flips, at step 1",
        trained(Recurrent),
        lambda: Fault(op=aten.mm.default, kernel=flipped(25), phase="backward", calls=[3], steps=[1]),
        Expected(call="*.linear", phase="backward", step=1),
        behind=("cpu", "tf32"),
    ),
    *faulty_kernel(
        "attention_not_written",
        "synthetic",
        "the second attention returns what lay in its buffer since the last step",
        trained(Gpt),
        lambda: Fault(op=attention, kernel=stale(), calls=[1]),
        Expected(call="*.scaled_dot_product_attention", module="blocks.1.attention", phase="forward", slot="output*", step=1),
        behind=("cpu", "fp16"),
    ),
    *faulty_kernel(
        "rows_behind_a_limit",
        "https://github.com/ROCm/legacy-rocm-build/issues/6595",
        "a matrix product leaves out the rows behind a limit: they hold the bias alone",
        trained(Gpt),
        lambda: Fault(op=aten.addmm.default, kernel=rows_missing, phase="forward"),
        Expected(call="*.linear", module="blocks.0.attention.qkv", phase="forward", slot="output*"),
        behind=("cpu", "bf16"),
    ),
    *faulty_kernel(
        "product_off_by_a_little",
        "synthetic",
        "one linear layer is too large by a ten-thousandth",
        trained(Mlp),
        lambda: Fault(op=aten.addmm.default, kernel=changed_output(lambda x: x * 1.0001), phase="forward", calls=[1]),
        Expected(call="*.linear", module="layers.1", phase="forward", slot="output*"),
        behind=("cpu", "fp16", "tf32", "bf16"),
    ),
    *faulty_kernel(
        "gradient_off_by_a_little",
        "synthetic",
        "the gradient of one layer's weight is too small by a thousandth",
        trained(Vit),
        lambda: Fault(op=aten.mm.default, kernel=changed_output(lambda x: x * 0.999), phase="backward", calls=[3]),
        Expected(call="*.linear", module="blocks.1.fc2", phase="backward"),
        behind=("cpu", "fp16", "accelerator"),
    ),
    *faulty_kernel(
        "tile_shifted",
        "synthetic",
        "the last tile of a product lands one column too far",
        trained(Gpt),
        lambda: Fault(op=aten.addmm.default, kernel=changed_output(column_shifted), phase="forward", calls=[3]),
        Expected(call="*.linear", module="blocks.0.fc2", phase="forward", slot="output*"),
        behind=("accelerator",),
    ),
]
