# SPDX-License-Identifier: Apache-2.0
"""Autocast of another device on the CPU.

Each kind of device has its own lists of what autocast runs in which precision. The dtype of the recorded result says which it was:
matrix products that gave low precision were given it, and what gave float32 for low precision was given float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ulpscope.model import DTYPES, CallRecord, Slot

__all__ = ["autocast_of_another_device", "cast"]

_CAST_DOWN = frozenset(
    """
    __matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution einsum gru_cell linear lstm_cell matmul mm multi_dot mv prelu rnn_relu_cell rnn_tanh_cell
    scaled_dot_product_attention
    """.split()
)


def autocast_of_another_device(record: CallRecord) -> torch.dtype | None:
    """The dtype that the call's floating arguments were cast to; None where the CPU's own autocast decides."""
    if record.modes is None or record.modes.autocast is None or record.level != "api" or _is_on_cpu(record):
        return None
    made = {slot.dtype for slot in record.slots if slot.slot.role == "output" and slot.dtype in DTYPES and DTYPES[slot.dtype].is_floating}
    if made == {"float32"}:
        return torch.float32
    if made == {record.modes.autocast} and record.call.short in _CAST_DOWN:
        dtype: torch.dtype = getattr(torch, record.modes.autocast)
        return dtype
    return None


def cast(given: Mapping[Slot, torch.Tensor], dtype: torch.dtype) -> dict[Slot, torch.Tensor]:
    """The tensors with those of low precision or float32 in this dtype."""
    return {
        slot: tensor.to(dtype) if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) else tensor
        for slot, tensor in given.items()
    }


def _is_on_cpu(record: CallRecord) -> bool:
    return all(slot.device in ("", "cpu") for slot in record.slots)
