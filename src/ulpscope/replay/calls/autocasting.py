# SPDX-License-Identifier: Apache-2.0
"""Cast the arguments of a call as autocast did, also the autocast of another device.

Each kind of device has its own lists of operations that autocast runs in low precision or in float32. The dtype of the recorded result
tells which list applied: a matrix product with a low-precision result got low-precision arguments; a call that gave float32 for low
precision got float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ulpscope.model import DTYPES, CallRecord, Slot

__all__ = ["as_autocast_rounds", "autocast_of_another_device", "cast"]

_CAST_DOWN = frozenset(
    """
    __matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution einsum gru_cell linear lstm_cell matmul mm multi_dot mv prelu rnn_relu_cell rnn_tanh_cell
    scaled_dot_product_attention
    """.split()
)


def autocast_of_another_device(record: CallRecord) -> torch.dtype | None:
    """Return the dtype that the call's floating arguments were cast to; None where the CPU's own autocast decides."""
    if record.modes is None or record.modes.autocast is None or record.level != "api" or _is_on_cpu(record):
        return None
    return torch.float32 if _made(record) == {"float32"} else _cast_down_to(record)


def as_autocast_rounds(record: CallRecord, given: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
    """Round the values as autocast did, in their recorded dtypes: a product under autocast never sees the digits that were cut off."""
    dtype = _cast_down_to(record) if record.level == "api" else None
    if dtype is None:
        return dict(given)
    return {slot: tensor.to(given[slot].dtype) for slot, tensor in cast(given, dtype).items()}


def _cast_down_to(record: CallRecord) -> torch.dtype | None:
    autocast = record.modes.autocast if record.modes is not None else None
    if autocast is None or _made(record) != {autocast} or record.call.short not in _CAST_DOWN:
        return None
    dtype: torch.dtype = getattr(torch, autocast)
    return dtype


def _made(record: CallRecord) -> set[str]:
    """Return the floating dtypes of the results."""
    return {slot.dtype for slot in record.slots if slot.slot.role == "output" and slot.dtype in DTYPES and DTYPES[slot.dtype].is_floating}


def cast(given: Mapping[Slot, torch.Tensor], dtype: torch.dtype) -> dict[Slot, torch.Tensor]:
    """Cast the float32, bfloat16 and float16 tensors to this dtype; return the others as they are."""
    return {
        slot: tensor.to(dtype) if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) else tensor
        for slot, tensor in given.items()
    }


def _is_on_cpu(record: CallRecord) -> bool:
    return all(slot.device in ("", "cpu") for slot in record.slots)
