# SPDX-License-Identifier: Apache-2.0
"""Disturb the inputs of a call for free_benchmark, and measure how far two results of the call lie apart.

Noise, a flipped bit and a swap change the first floating tensor of a call; a higher precision or another device changes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LIMITS", "disturbed", "mapped", "relative_error", "restored", "tensors_of"]

LIMITS = {torch.float16: 0.002, torch.bfloat16: 0.004, torch.float32: 0.0002}
"""The relative error that the guide allows between the two results, by the dtype of the first."""

_NOISE = {torch.float16: 1e-6, torch.bfloat16: 1e-4, torch.float32: 1e-8, torch.float64: 1e-16}
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
_SMALLEST_GRADIENT = 1e-3

_Change = Callable[[torch.Tensor], torch.Tensor]


def disturbed(values: Any, mode: str) -> Any:
    """Return a disturbed copy of the arguments of a call; None where there is nothing to disturb.

    >>> disturbed((torch.tensor([1.0, 2.0]), 3), "change_value")
    (tensor([2., 1.]), 3)
    """
    floats = [tensor for tensor in tensors_of(values) if tensor.is_floating_point()]
    if mode in _SINGLE:
        once = _Once(*_SINGLE[mode])
        copy = mapped(values, once)
        return copy if once.is_done else None
    if not floats:
        return None
    if mode == "no_change":
        return mapped(values, torch.Tensor.clone)
    if mode == "to_cpu":
        return mapped(values, lambda tensor: tensor.to("cpu", copy=True))
    return _raised(values, {tensor.dtype for tensor in floats})


def tensors_of(values: Any) -> list[torch.Tensor]:
    """List every tensor in the value, in order."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(values, take)
    return found


def mapped(value: Any, change: _Change) -> Any:
    """Return the same structure with every tensor changed.

    >>> mapped({"a": [torch.ones(1), 2]}, lambda tensor: tensor + 1)
    {'a': [tensor([2.]), 2]}
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(part, change) for part in value))
    if type(value) in (list, tuple):
        return type(value)(mapped(part, change) for part in value)
    return value


def restored(second: Any, first: Any) -> Any:
    """Cast a second result to the dtypes and devices of the first; None where they do not have the same structure."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return second.to(device=first.device, dtype=first.dtype) if second.shape == first.shape else None
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        parts = [restored(other, own) if isinstance(own, torch.Tensor) else own for own, other in zip(first, second, strict=True)]
        if any(part is None and own is not None for part, own in zip(parts, first, strict=True)):
            return None
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return None


def relative_error(first: torch.Tensor, second: torch.Tensor, *, is_gradient: bool = False) -> float:
    """Return the largest relative difference of two results.

    Elements that are tiny in both do not count; nan says that only one result has a NaN or inf.

    >>> round(relative_error(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0])), 3)
    0.2
    """
    floor = _SMALLEST_GRADIENT if is_gradient else math.sqrt(_NOISE.get(first.dtype, 1e-8))
    wide = torch.float64 if second.device.type in ("cpu", "cuda") else torch.float32
    one, other = first.detach().to(second.device, wide), second.detach().to(wide)
    if one.shape != other.shape:
        return math.nan
    agrees = (one == other) | (one.isnan() & other.isnan())
    if bool(agrees.all()):
        return 0.0
    if not bool((one.isfinite() & other.isfinite() | agrees).all()):
        return math.nan
    counts = ~agrees & (torch.maximum(one.abs(), other.abs()) > floor)
    error = torch.where(counts, (one - other).abs() / other.abs().clamp(min=floor), 0.0)
    return float(error.max())


class _Once:
    """Changes the first tensor that fits and copies every other."""

    def __init__(self, change: _Change, fits: Callable[[torch.Tensor], bool]) -> None:
        self._change = change
        self._fits = fits
        self.is_done = False

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_done or tensor.device.type == "meta" or not self._fits(tensor):
            return tensor.detach().clone()
        self.is_done = True
        return self._change(tensor.detach())


def _raised(values: Any, dtypes: set[torch.dtype]) -> Any:
    """Cast every floating tensor to one dtype that is wider than each of them; None where there is none."""
    narrow = dtypes & {torch.float16, torch.bfloat16, torch.float32}
    if not narrow:
        return None
    wide = torch.float64 if dtypes & {torch.float32, torch.float64} else torch.float32
    return mapped(values, lambda tensor: tensor.to(wide) if tensor.dtype in narrow else tensor.clone())


def _noisy(tensor: torch.Tensor) -> torch.Tensor:
    noise = _NOISE[tensor.dtype]
    return torch.where(tensor.abs() > math.sqrt(noise), tensor + noise, tensor)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(_BITS[tensor.dtype])
    return torch.where(tensor.abs() > torch.finfo(tensor.dtype).smallest_normal, bits ^ 1, bits).view(tensor.dtype)


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone(memory_format=torch.contiguous_format)
    flat = copy.view(-1)
    first = flat[0].clone()
    flat[0] = flat[-1]
    flat[-1] = first
    return copy


def _is_large(tensor: torch.Tensor) -> bool:
    """Tell whether noise would show in the tensor: its dtype is known, and not all its elements are tiny."""
    return tensor.dtype in _NOISE and tensor.numel() > 0 and bool(tensor.detach().abs().max() >= _NOISE[tensor.dtype])


_SINGLE: dict[str, tuple[_Change, Callable[[torch.Tensor], bool]]] = {
    "add_noise": (_noisy, _is_large),
    "bit_noise": (_flipped, _is_large),
    "change_value": (_swapped, lambda tensor: tensor.is_floating_point() and tensor.numel() > 1),
}
