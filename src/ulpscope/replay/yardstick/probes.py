# SPDX-License-Identifier: Apache-2.0
"""Make a call's inputs in float64, as recorded and with small relative noise, to see how far such noise moves its results.

Noise comes from a generator of our own with fixed seeds, so that a verdict is the same each time and no other random numbers are touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ulpscope.model import DTYPES, DType, Slot

__all__ = ["JUMP", "STEP", "Probes", "coarsest_dtype", "coarsest_of", "is_floating", "widened"]

STEP = 2.0**-20
"""Relative size of the noise: far above the rounding of float64, far below what makes a smooth function bend."""
JUMP = 2.0**-6
"""A result that such noise moves by this share of its size has jumped."""
Values = Mapping[Slot, torch.Tensor]

_BLOCK = 1 << 20
_MOST_KEPT, _MOST_KEPT_AT_ONCE = 1 << 22, 1 << 17
_KEPT: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}
"""Noise by its seed and sizes, at most 32 MiB: the layers of a model need the same again and again."""


def is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def coarsest_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the first of the floating tensors with the fewest digits; nothing where none is floating."""
    floating = [one for one in tensors if is_floating(one)]
    return [min(floating, key=lambda one: _dtype(one).mantissa)] if floating else []


def coarsest_dtype(tensors: Sequence[torch.Tensor]) -> DType:
    """Return the floating dtype with the fewest digits among the inputs; without one, the dtype of the result, which comes last."""
    return _dtype((coarsest_of(tensors) or tensors)[-1])


def _dtype(tensor: torch.Tensor) -> DType:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


def widened(inputs: Values) -> dict[Slot, torch.Tensor]:
    """Copy the inputs to contiguous float64 tensors. Slots that hold the same tensor go on holding the same one."""
    seen: dict[object, torch.Tensor] = {}
    return {slot: seen.setdefault(_identity(value), _widened(value)) for slot, value in inputs.items()}


class Probes:
    """The inputs of a call with small changes. Values that all probes share are computed once, unless they are large."""

    def __init__(self, inputs: Values) -> None:
        self._inputs = inputs
        self._bases: dict[tuple[object, bool], _Base] = {}
        self._are_large = sum(value.numel() for value in inputs.values()) > _BLOCK

    def noisy(self, seed: int, *, is_normwise: bool = False) -> dict[Slot, torch.Tensor]:
        """Add relative noise to every floating value but 0, infinities and NaN; `is_normwise` takes it relative to the whole tensor."""
        different = {_identity(value): value for value in self._inputs.values() if is_floating(value)}
        sizes = tuple(value.numel() * (2 if value.is_complex() else 1) for value in different.values())
        noise = dict(zip(different, _noises(seed, sizes), strict=True))
        return self._mapped(lambda value: self._disturbed(value, noise[_identity(value)], is_normwise))

    def with_nudged_zeros(self, seed: int) -> dict[Slot, torch.Tensor]:
        """Replace zeros with tiny negative numbers: this tells which results depend on how equal zeros are ordered."""
        generator = torch.Generator().manual_seed(seed)
        return self._mapped(lambda value: _nudged(_real(_widened(value)), _tiny(value), generator))

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Widen and change every floating input, once for each tensor however many slots hold it."""
        seen: dict[object, torch.Tensor] = {}
        changed: dict[Slot, torch.Tensor] = {}
        for slot, value in self._inputs.items():
            key = _identity(value)
            if key not in seen:
                seen[key] = change(value) if is_floating(value) else value
            changed[slot] = torch.view_as_complex(seen[key]) if value.is_complex() else seen[key]
        return changed

    def _disturbed(self, value: torch.Tensor, noise: torch.Tensor, is_normwise: bool) -> torch.Tensor:
        if self._are_large:
            return _disturbed_in_blocks(_real(_widened(value)), noise, _tiny(value), is_normwise)
        key = _identity(value), is_normwise
        if key not in self._bases:
            self._bases[key] = _Base.of(_real(_widened(value)), _tiny(value), is_normwise)
        return self._bases[key].disturbed(noise)


@dataclass(frozen=True, slots=True)
class _Base:
    """A tensor to add noise to: the size of one unit of noise, and the elements that stay as they are (None: none)."""

    value: torch.Tensor
    unit: torch.Tensor
    is_still: torch.Tensor | None

    @classmethod
    def of(cls, value: torch.Tensor, tiny: float, is_normwise: bool) -> _Base:
        unit = value.abs().clamp_(min=_least(value, tiny, is_normwise)).mul_(STEP)
        is_still = value == 0
        if not math.isfinite(float(unit.sum())):
            is_still |= ~torch.isfinite(value)
        return cls(value, unit, is_still if bool(is_still.any()) else None)

    def disturbed(self, noise: torch.Tensor) -> torch.Tensor:
        moved = noise.view_as(self.unit) * self.unit
        if self.is_still is not None:
            moved.masked_fill_(self.is_still, 0.0)
        return moved.add_(self.value)


def _disturbed_in_blocks(value: torch.Tensor, noise: torch.Tensor, tiny: float, is_normwise: bool) -> torch.Tensor:
    """Add noise to a large tensor block by block, in the memory of the noise."""
    least = _least(value, tiny, is_normwise)
    for here, beside in zip(torch.split(value.view(-1), _BLOCK), torch.split(noise, _BLOCK), strict=True):
        beside.copy_(_Base.of(here, least, False).disturbed(beside))
    return noise.view_as(value)


def _least(value: torch.Tensor, tiny: float, is_normwise: bool) -> float:
    return max(tiny, float(value.square().mean().sqrt())) if is_normwise else tiny


def _noises(seed: int, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Draw normal numbers for tensors of these sizes, one after the other."""
    if (found := _KEPT.get((seed, sizes))) is not None:
        return found
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.empty(size, dtype=torch.float64).normal_(generator=generator) for size in sizes]
    if sum(sizes) <= _MOST_KEPT_AT_ONCE:
        while _KEPT and sum(sum(one) for _, one in _KEPT) + sum(sizes) > _MOST_KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[seed, sizes] = drawn
    return drawn


def _widened(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return value.to(torch.complex128).contiguous()
    return value.to(torch.float64).contiguous() if value.is_floating_point() else value.contiguous()


def _nudged(value: torch.Tensor, tiny: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.empty_like(value).normal_(generator=generator).abs_().mul_(-tiny)
    return torch.where(value == 0, noise, value)


def _real(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _tiny(value: torch.Tensor) -> float:
    return float(torch.finfo(value.dtype).tiny)


def _identity(value: torch.Tensor) -> object:
    return (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else id(value)
