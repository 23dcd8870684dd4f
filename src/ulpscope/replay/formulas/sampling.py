# SPDX-License-Identifier: Apache-2.0
"""Sample pictures and volumes at given places, in the precision that they are given in.

torch's own decomposition computes in float32 whatever it is given. Kernels that compute in the dtype of the call round the place of a
sample by a unit in the last place of its number of pixels, and the weights follow from it. How much that matters depends on the size of the
picture and on how it changes from pixel to pixel; near the middle, a small relative change of the given places does not show it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["sampled", "sampled_backward"]

_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
_A = -0.75
"""torch's constant of cubic convolution."""


@dataclass(frozen=True, slots=True)
class _Tap:
    """One pixel along one dimension for each place: its index, its weight, and the slope of the weight over the given coordinate."""

    index: torch.Tensor
    weight: torch.Tensor
    slope: torch.Tensor


def sampled(values: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> torch.Tensor:
    """Compute `grid_sampler_2d` and `grid_sampler_3d`; each term is added in the dtype of the values."""
    total = torch.zeros((), dtype=values.dtype)
    for taps, index in _pixels(values, grid, mode, padding, align_corners):
        total = total + values.flatten(2).gather(2, index) * _product([tap.weight for tap in taps])
    return total.reshape(*values.shape[:2], *grid.shape[1:-1])


def sampled_backward(
    grad: torch.Tensor,
    values: torch.Tensor,
    grid: torch.Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Compute the gradients of the values and of the places, added up in their dtype term after term."""
    entering, flat = grad.flatten(2), values.flatten(2)
    to_values = torch.zeros_like(flat)
    to_places = [torch.zeros_like(grid[..., 0]).flatten(1)[:, None] for _ in values.shape[2:]]
    together = torch.zeros(values.shape[1], dtype=torch.int64)
    for taps, index in _pixels(values, grid, mode, padding, align_corners):
        to_values = to_values.scatter_add(2, index, entering * _product([tap.weight for tap in taps]))
        if mode == _NEAREST:
            continue
        picked = entering * flat.gather(2, index)
        for at in range(len(taps)):
            steepness = _product([tap.slope if at == place else tap.weight for place, tap in enumerate(taps)])
            to_places[at] = to_places[at].index_add(1, together, picked * steepness)
    places = torch.stack([one[:, 0] for one in reversed(to_places)], -1).reshape(grid.shape)
    return (to_values.reshape(values.shape) if output_mask[0] else None), places


def _pixels(
    values: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool
) -> Iterator[tuple[tuple[_Tap, ...], torch.Tensor]]:
    """Yield each pixel that contributes to a place: its taps along the dimensions, and its index in the flattened picture."""
    sizes = values.shape[2:]
    coordinates = reversed(grid.unbind(-1))
    along = [_taps(given.flatten(1), size, mode, padding, align_corners) for given, size in zip(coordinates, sizes, strict=True)]
    for taps in itertools.product(*along):
        index = torch.zeros((), dtype=torch.int64)
        for tap, size in zip(taps, sizes, strict=True):
            index = index * size + tap.index
        yield taps, index[:, None].expand(-1, values.shape[1], -1)


def _product(factors: list[torch.Tensor]) -> torch.Tensor:
    return math.prod(factors[1:], start=factors[0])[:, None]


def _taps(given: torch.Tensor, size: int, mode: int, padding: int, align_corners: bool) -> list[_Tap]:
    place = (given + 1) / 2 * (size - 1) if align_corners else ((given + 1) * size - 1) / 2
    steep = torch.full_like(place, ((size - 1) if align_corners else size) / 2)
    if mode != _CUBIC:
        place, steep = _padded(place, steep, size, padding, align_corners)
    if mode == _NEAREST:
        return [_tap(place.round(), torch.ones_like(place), torch.zeros_like(place), size)]
    low = place.floor()
    beyond = place - low
    if mode == _LINEAR:
        return [_tap(low, low + 1 - place, -steep, size), _tap(low + 1, beyond, steep, size)]
    weights = _cubic_weights(beyond)
    found = []
    for at, (weight, slope) in enumerate(weights):
        pixel, _ = _padded(low + (at - 1), steep, size, padding, align_corners)
        found.append(_tap(pixel, weight, slope * steep, size))
    return found


def _cubic_weights(beyond: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the weights of the four pixels around a place, and how they change as it moves on."""

    def outer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A, (3 * _A * x - 10 * _A) * x + 8 * _A

    def inner(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ((_A + 2) * x - (_A + 3)) * x * x + 1, (3 * (_A + 2) * x - 2 * (_A + 3)) * x

    rest = 1 - beyond
    (after, after_slope), (last, last_slope) = inner(rest), outer(rest + 1)
    return [outer(beyond + 1), inner(beyond), (after, -after_slope), (last, -last_slope)]


def _tap(pixel: torch.Tensor, weight: torch.Tensor, slope: torch.Tensor, size: int) -> _Tap:
    """Make a tap; a pixel beyond the picture has weight 0."""
    is_inside = (pixel >= 0) & (pixel <= size - 1)
    index = torch.where(is_inside, pixel, 0).to(torch.int64)
    return _Tap(index, torch.where(is_inside, weight, 0.0), torch.where(is_inside, slope, 0.0))


def _padded(place: torch.Tensor, steep: torch.Tensor, size: int, padding: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Map a place beyond the picture to the place it is taken from, and return how that moves with the given coordinate."""
    if padding == _ZEROS:
        return place, steep
    if padding == _REFLECTION:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        if span <= 0:
            return torch.zeros_like(place), torch.zeros_like(steep)
        away = (place - low).abs()
        rest, flips = torch.fmod(away, span), (away / span).floor()
        is_even = torch.fmod(flips, 2) == 0
        steep = torch.where(is_even == (place >= low), steep, -steep)
        place = torch.where(is_even, rest + low, span - rest + low)
    steep = torch.where((place > 0) & (place < size - 1), steep, 0.0)
    return place.clamp(0, size - 1), steep
