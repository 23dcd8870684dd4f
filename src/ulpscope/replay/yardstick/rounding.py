# SPDX-License-Identifier: Apache-2.0
"""Run the same call as a machine that rounds the operands of matrix products to a narrower format, its range included.

Only matrix products and convolutions are rounded, forward and backward; accumulation stays in the wider precision, and so does a term added
to the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ulpscope._torch_private import TorchDispatchMode
from ulpscope.model import OperandFormat

__all__ = ["FORMATS", "PRODUCTS", "ROUNDINGS", "RoundedOperands"]

Rounding = Callable[[torch.Tensor], torch.Tensor]

_OPERANDS: dict[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "linear": (0, 1),
    "addmm": (1, 2),
    "addmv": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "_addmm_activation": (1, 2),
    "_grouped_mm": (0, 1),
    "conv_tbc": (0, 1),
    "convolution": (0, 1),
    "convolution_overrideable": (0, 1),
    "_convolution": (0, 1),
    "mkldnn_convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
}
PRODUCTS = frozenset(_OPERANDS)
"""What machines may round the operands of, by their names in aten."""


def _through(dtype: torch.dtype) -> Rounding:
    return lambda value: value.to(torch.float32).to(dtype).to(value.dtype)


def _tf32_nearest(value: torch.Tensor) -> torch.Tensor:
    bits = value.to(torch.float32).contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return _finite_only(value, rounded.view(torch.float32))


def _tf32_truncated(value: torch.Tensor) -> torch.Tensor:
    bits = value.to(torch.float32).contiguous().view(torch.int32)
    return _finite_only(value, (bits & ~0x1FFF).view(torch.float32))


def _finite_only(value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(value), rounded.to(value.dtype), value)


ROUNDINGS: dict[OperandFormat, tuple[Rounding, ...]] = {
    "float16": (_through(torch.float16),),
    "tf32": (_tf32_nearest, _tf32_truncated),
    "bfloat16": (_through(torch.bfloat16),),
}
"""How each format is reached. Hardware drops the low bits for TF32, libraries round to nearest before: both are met."""
FORMATS: tuple[OperandFormat, ...] = ("float16", "tf32", "bfloat16")


class RoundedOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation as it is, with the operands of matrix products rounded."""

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounding = rounding

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        places = _OPERANDS.get(func._schema.name.rpartition("::")[2], ())
        rounded = [self._round(one) if place in places else one for place, one in enumerate(args)]
        return func(*rounded, **(kwargs or {}))

    def _round(self, value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
        return self._rounding(value) if is_wide else value
