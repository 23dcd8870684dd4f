# SPDX-License-Identifier: Apache-2.0
"""Check whether any draw explains the result of fractional max pooling, whose regions are random (Graham 2014, arXiv:1412.6071).

Along each dimension of a plane one number u of [0, 1) decides where all regions begin:

    start(i) = int((i + u) alpha) - int(u alpha),    alpha = (size - kernel) / (regions - 1),    the last one at size - kernel

As u grows, a start changes at the fractions of m / alpha and nowhere else. So few sequences are possible, and all of them are tried. Near
such a place a kernel that rounds i + u, alpha and their product may give either start; between two of them none does. A result is right if
one sequence along each dimension explains the whole plane.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

__all__ = ["Pooled", "Scattered"]

_MOST = 1 << 22
"""Comparisons at a time: planes are judged block after block."""
_ROUNDINGS = 6.0
"""Units of rounding, of numbers up to the size: three for the start, and three for the place at which it changes."""


@dataclass(frozen=True, slots=True)
class _Starts:
    """The possible starts of the regions along one dimension: the first start of each region, and which later ones each sequence allows."""

    kernel: int
    last: int
    first: torch.Tensor
    allowed: torch.Tensor
    """By sequence, region and distance from the first of its starts."""

    @classmethod
    def of(cls, size: int, kernel: int, regions: int, rounding: float) -> _Starts:
        last = size - kernel
        if regions <= 1 or last == 0:
            return cls(kernel, last, torch.full((regions,), last), torch.ones(1, regions, 1, dtype=torch.bool))
        alpha = last / (regions - 1)
        changes = torch.cat([torch.arange(last + 1, dtype=torch.float64).div(alpha).frac(), torch.tensor([0.0, 1.0])]).unique()  # type: ignore[no-untyped-call]
        draws = torch.cat([(changes[1:] + changes[:-1]) / 2, changes])[:, None]
        room = torch.full_like(draws, _ROUNDINGS * rounding * size)
        room[: len(changes) - 1] = 0.0
        begin, offset = (torch.arange(regions - 1) + draws) * alpha, draws * alpha
        low, high = (begin - room).floor() - (offset + room).floor(), (begin + room).floor() - (offset - room).floor()
        low, high = (torch.nn.functional.pad(one.clamp(0, last), (0, 1), value=float(last)).long() for one in (low, high))
        first = low.amin(0)
        starts = first[:, None] + torch.arange(int((high - first).max()) + 1)
        allowed = ((starts >= low[..., None]) & (starts <= high[..., None])).unique(dim=0)  # type: ignore[no-untyped-call]
        return cls(kernel, last, first, allowed)

    @property
    def places(self) -> torch.Tensor:
        """Return every possible start of every region; starts past the end become the last one."""
        return (self.first[:, None] + torch.arange(self.allowed.shape[-1])).clamp(max=self.last)

    @property
    def reach(self) -> torch.Tensor:
        """Return every place that a region may hold."""
        return (self.first[:, None] + torch.arange(self.allowed.shape[-1] + self.kernel - 1)).clamp(max=self.last + self.kernel - 1)


@dataclass(frozen=True)
class Pooled:
    """The planes that a pooling is given and the number of regions it makes; `dtype` is the one in which starts are computed."""

    values: torch.Tensor
    kernel: tuple[int, ...]
    regions: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, values: torch.Tensor, kernel: int | Sequence[int], result: torch.Size, num_dims: int) -> Pooled:
        sizes = (kernel,) * num_dims if isinstance(kernel, int) else tuple(kernel)
        return cls(_planes(values, num_dims), sizes, tuple(result[-num_dims:]), values.dtype)

    @property
    def num_planes(self) -> int:
        return len(self.values)

    @property
    def num_dims(self) -> int:
        return len(self.kernel)

    @cached_property
    def _starts(self) -> list[_Starts]:
        rounding = torch.finfo(self.dtype).eps / 2
        sizes = zip(self.values.shape[1:], self.kernel, self.regions, strict=True)
        return [_Starts.of(size, kernel, regions, rounding) for size, kernel, regions in sizes]

    def num_unexplained(self, results: torch.Tensor | None, indices: torch.Tensor | None = None) -> int:
        """Count the planes for which no draw gives these results and, where they are given, these indices into the plane."""
        results, indices = (None if one is None else _planes(one, self.num_dims) for one in (results, indices))
        width = math.prod(self.regions) * math.prod(starts.allowed.shape[-1] for starts in self._starts)
        wrong = 0
        for at in _blocks(self.num_planes, width):
            part = replace(self, values=self.values[at])
            fits = part._fits(None if results is None else results[at], None if indices is None else indices[at])
            wrong += int((~_explained(fits, [starts.allowed for starts in self._starts])).sum())
        return wrong

    def _fits(self, results: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
        """Tell by plane, region and its start along each dimension whether that region has this maximum, at this place."""
        highest = self.values
        for at, size in enumerate(self.kernel):
            highest = highest.unfold(at + 1, size, 1).amax(-1)
        grid = [self._along(starts.places, at) for at, starts in enumerate(self._starts)]
        places: tuple[slice | torch.Tensor, ...] = (slice(None), *grid)
        highest = highest[places]
        fits = torch.ones_like(highest, dtype=torch.bool)
        if results is not None:
            fits &= _same(highest, self._by_region(results))
        if indices is not None:
            count = math.prod(self.values.shape[1:])
            is_inside = (indices >= 0) & (indices < count)
            found = indices.clamp(0, count - 1)
            picked = self.values.flatten(1).gather(1, found.flatten(1)).view_as(found)
            fits &= _same(highest, self._by_region(picked)) & self._by_region(is_inside)
            for starts, place, begin in zip(self._starts, torch.unravel_index(found, self.values.shape[1:]), grid, strict=True):
                place = self._by_region(place)
                fits &= (place >= begin) & (place < begin + starts.kernel)
        return fits

    def _along(self, values: torch.Tensor, at: int) -> torch.Tensor:
        """Reshape numbers by region and start of one dimension, so that they broadcast with those of the other dimensions."""
        shape = [1] * (2 * self.num_dims)
        shape[at], shape[at + self.num_dims] = values.shape
        return values.reshape(shape)

    def _by_region(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(*values.shape, *(1,) * self.num_dims)


def _explained(fits: torch.Tensor, allowed: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tell which planes one sequence along each dimension explains; `fits` is by plane, region and start.

    Sequences that no choice of the others could explain are dropped first, which leaves few.
    """
    sequences, *others = allowed
    num_dims = len(allowed)
    alone = fits
    if others:
        alone = alone.flatten(num_dims + 2).any(-1).movedim(num_dims + 1, 2).flatten(3).all(-1)
    is_possible = torch.stack([(alone & one).any(-1).all(-1) for one in sequences], dim=1)
    if not others:
        return is_possible.any(1)
    found = torch.zeros(len(fits), dtype=torch.bool)
    for place, one in enumerate(sequences):
        is_open = is_possible[:, place] & ~found
        if bool(is_open.any()):
            chosen = one.reshape(len(one), *(1,) * len(others), one.shape[-1], *(1,) * len(others))
            found[is_open] = _explained((fits[is_open] & chosen).any(num_dims + 1).all(1), others)
    return found


@dataclass(frozen=True)
class Scattered:
    """The gradient of pooled values: each region's goes to the place of its maximum, and nowhere else.

    Without indices that place is the only one within reach that holds the maximum. If several hold it, only the sum of their gradients is
    known.
    """

    pooled: Pooled
    results: torch.Tensor
    indices: torch.Tensor | None
    entering: torch.Tensor

    def num_wrong(self, gradient: torch.Tensor) -> int:
        """Count the places that get another gradient than they should; a plane whose sum is wrong counts too."""
        eps, num_dims = torch.finfo(gradient.dtype).eps, self.pooled.num_dims
        values, entering = (_planes(one, num_dims) for one in (gradient, self.entering))
        results, indices = (None if one is None else _planes(one, num_dims) for one in (self.results, self.indices))
        width = math.prod(self.pooled.regions) * math.prod(starts.reach.shape[-1] for starts in self.pooled._starts)
        wrong = 0
        for at in _blocks(self.pooled.num_planes, width):
            part = replace(self.pooled, values=self.pooled.values[at])
            assert results is not None
            places, may_be = _candidates(part, results[at], None if indices is None else indices[at])
            wrong += _num_wrong(values[at].flatten(1), entering[at].flatten(1), places, may_be, eps)
        return wrong


def _candidates(pooled: Pooled, results: torch.Tensor, indices: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by plane and region the places of the plane, and which of them may have been chosen."""
    if indices is not None:
        places = indices.flatten(1)[..., None].clamp(0, math.prod(pooled.values.shape[1:]) - 1)
        return places, torch.ones_like(places, dtype=torch.bool)
    grid = [pooled._along(starts.reach, at) for at, starts in enumerate(pooled._starts)]
    # places beyond the last one were replaced by the last one, which must count once
    is_new = torch.ones((), dtype=torch.bool)
    for at, starts in enumerate(pooled._starts):
        is_new = is_new & pooled._along(torch.nn.functional.pad(starts.reach.diff(dim=1) > 0, (1, 0), value=True), at)
    at_all: tuple[slice | torch.Tensor, ...] = (slice(None), *grid)
    values = pooled.values[at_all]
    flat = torch.zeros((), dtype=torch.int64)
    for place, size in zip(grid, pooled.values.shape[1:], strict=True):
        flat = flat * size + place
    may_be = (_same(values, pooled._by_region(results)) & is_new).flatten(1, pooled.num_dims).flatten(2)
    return flat.flatten(0, pooled.num_dims - 1).flatten(1).expand(may_be.shape), may_be


def _num_wrong(gradient: torch.Tensor, entering: torch.Tensor, places: torch.Tensor, may_be: torch.Tensor, eps: float) -> int:
    """Count the wrong gradients in some planes: compare each place with the sum of what enters there, within its rounding."""
    entering = entering[..., None].expand(places.shape)

    def gathered(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient).scatter_add(1, places.flatten(1), values.where(may_be, 0.0).flatten(1))

    is_sure = may_be.sum(-1, keepdim=True) == 1
    is_open = gathered((may_be & ~is_sure).to(gradient.dtype)) > 0
    expected, size, many = gathered(entering), gathered(entering.abs()), gathered(torch.ones_like(entering))
    room = eps * (many - 1).clamp(min=0) * size
    is_known = ~is_open & torch.isfinite(expected) & torch.isfinite(size)
    wrong = int((((gradient - expected).abs() > room) & is_known).sum() + (torch.isnan(gradient) & is_known).sum())
    whole, given = entering[..., 0].sum(1), entering[..., 0].abs().sum(1)
    is_told = may_be.any(-1).all(-1) & torch.isfinite(given)
    apart = (gradient.sum(1) - whole).abs() > eps * many.amax(1) * given
    return wrong + int(((apart | gradient.isnan().any(1)) & is_told & is_open.any(1)).sum())


def _planes(values: torch.Tensor, num_dims: int) -> torch.Tensor:
    lead, rest = values.shape[:-num_dims], values.shape[-num_dims:]
    wide = values.to(torch.float64) if values.is_floating_point() else values
    return wide.reshape(math.prod(lead), *rest)


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _blocks(count: int, width: int) -> Iterator[slice]:
    many = max(1, _MOST // max(width, 1))
    yield from (slice(begin, begin + many) for begin in range(0, count, many))
