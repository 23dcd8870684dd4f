# SPDX-License-Identifier: Apache-2.0
"""Compute in honest reduced precision, as a matrix unit with 10-bit mantissas does.

Matrix products and convolutions round both operands to float16, multiply, accumulate in float32 and add the bias in float32. Only float32
operands are rounded; every other operation is computed as it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["reduced"]

_aten = torch.ops.aten


def reduced(op: Any) -> Callable[..., Any] | None:
    """Return the reduced-precision version of an aten operation, or None where it has none."""
    return _REDUCED.get(op)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float() if tensor.dtype is torch.float32 else tensor


def _product(op: Any) -> Callable[..., Any]:
    def compute(left: torch.Tensor, right: torch.Tensor) -> Any:
        return op(_rounded(left), _rounded(right))

    return compute


def _product_plus(op: Any) -> Callable[..., Any]:
    """Return a function for `beta * bias + alpha * product`; it adds the bias after the product is complete."""

    def compute(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        product: torch.Tensor = op(_rounded(left), _rounded(right))
        scaled = product if alpha == 1 else product * alpha
        return scaled if beta == 0 else scaled + (bias if beta == 1 else bias * beta)

    return compute


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    product: torch.Tensor = _aten.convolution.default(_rounded(x), _rounded(weight), None, *rest)
    return product if bias is None else product + bias.reshape(-1, *[1] * (weight.dim() - 2))


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    grad_x, grad_weight, _ = _aten.convolution_backward.default(_rounded(grad), _rounded(x), _rounded(weight), *rest)
    *_, wanted = rest
    grad_bias = grad.sum([0, *range(2, grad.dim())]) if wanted[2] else None
    return grad_x, grad_weight, grad_bias


_REDUCED: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _product(_aten.mm.default),
    _aten.bmm.default: _product(_aten.bmm.default),
    _aten.mv.default: _product(_aten.mv.default),
    _aten.dot.default: _product(_aten.dot.default),
    _aten.addmm.default: _product_plus(_aten.mm.default),
    _aten.addmv.default: _product_plus(_aten.mv.default),
    _aten.baddbmm.default: _product_plus(_aten.bmm.default),
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
