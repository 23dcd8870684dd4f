# SPDX-License-Identifier: Apache-2.0
"""Inputs in float64, as recorded and a little beside: what a result makes of a small relative error of each of its inputs.

Noise comes from a generator of our own with fixed seeds, so that a verdict is the same each time and nobody's random numbers are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ulpscope.model import Slot

__all__ = ["JUMP", "STEP", "is_floating", "nudged_zeros", "probes", "widened"]

STEP = 2.0**-20
"""Relative size of the noise: far above the rounding of float64, far below what makes a smooth function bend."""
JUMP = 2.0**-6
"""A result that such noise moves by this share of its size has jumped."""
Values = Mapping[Slot, torch.Tensor]


def is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def widened(inputs: Values) -> dict[Slot, torch.Tensor]:
    """Contiguous copies in float64. Slots that hold the same tensor go on holding the same one."""
    seen: dict[object, torch.Tensor] = {}
    return {slot: seen.setdefault(_identity(value), _widened(value)) for slot, value in inputs.items()}


def probes(inputs: Values, *, seed: int, is_normwise: bool = False) -> dict[Slot, torch.Tensor]:
    """The inputs with relative noise on every floating value but 0, infinities and NaN; `is_normwise` in relation to the whole tensor."""
    generator = torch.Generator().manual_seed(seed)
    return _mapped(inputs, lambda wide, tiny: _disturbed(wide, tiny, generator, is_normwise))


def nudged_zeros(inputs: Values, *, seed: int) -> dict[Slot, torch.Tensor]:
    """The inputs with tiny negative numbers for zeros: it tells which results hang on how equal zeros are ordered."""
    generator = torch.Generator().manual_seed(seed)
    return _mapped(inputs, lambda wide, tiny: _nudged(wide, tiny, generator))


def _mapped(inputs: Values, change: Callable[[torch.Tensor, float], torch.Tensor]) -> dict[Slot, torch.Tensor]:
    """Every floating input widened and changed, once for each tensor however many slots hold it."""
    seen: dict[object, torch.Tensor] = {}
    changed: dict[Slot, torch.Tensor] = {}
    for slot, value in inputs.items():
        key = _identity(value)
        if key not in seen:
            seen[key] = change(_real(_widened(value)), _tiny(value)) if is_floating(value) else value
        changed[slot] = torch.view_as_complex(seen[key]) if value.is_complex() else seen[key]
    return changed


def _widened(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return value.to(torch.complex128).contiguous()
    return value.to(torch.float64).contiguous() if value.is_floating_point() else value.contiguous()


def _disturbed(value: torch.Tensor, tiny: float, generator: torch.Generator, is_normwise: bool) -> torch.Tensor:
    noise = torch.empty_like(value).normal_(generator=generator)
    least = max(tiny, float(value.square().mean().sqrt())) if is_normwise else tiny
    for here, beside in zip(_blocks(value), _blocks(noise), strict=True):
        size = here.abs().clamp_(min=least)
        beside.mul_(size.mul_(STEP)).masked_fill_((here == 0) | ~torch.isfinite(here), 0.0)
    return noise.add_(value)


def _nudged(value: torch.Tensor, tiny: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.empty_like(value).normal_(generator=generator).abs_().mul_(-tiny)
    return torch.where(value == 0, noise, value)


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _blocks(value: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(torch.split(value.view(-1), 1 << 20))


def _tiny(value: torch.Tensor) -> float:
    return float(torch.finfo(value.dtype).tiny)


def _identity(value: torch.Tensor) -> object:
    return (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else id(value)
