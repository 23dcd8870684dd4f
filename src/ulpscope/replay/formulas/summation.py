# SPDX-License-Identifier: Apache-2.0
"""Add up numbers as a plain kernel does: one term after the other, in the precision that kernels accumulate in.

No honest kernel uses a worse order, so an error of this size is allowed for. Reductions are really added up so, in up to 8192 steps. For
matrix products and scattered sums that would take too long, and noise stands for it: K terms with the sum T and the sum of squares Q have
partial sums whose squares are about k Q / K + (k T / K)^2, and every one of them is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["accumulator_of", "one_by_one", "product", "running", "scattered"]

STEPS = 8192
_TOO_LARGE = 1 << 24
_SHORT = 8


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which a kernel adds up numbers of this dtype."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def one_by_one(values: torch.Tensor, dims: Sequence[int], accumulator: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Sum float64 values over `dims`, with the error that adding them up in order makes."""
    dims = list(dims) or list(range(values.dim()))
    total = values.sum(dims)
    count = math.prod(values.shape[dim] for dim in dims)
    if count <= 2 or not total.numel():
        return total
    if values.numel() > _TOO_LARGE:
        return with_noise(total, values.square().sum(dims), count, accumulator, generator)
    kept = [dim for dim in range(values.dim()) if dim not in {one % values.dim() for one in dims}]
    rows = values.permute(*(one % values.dim() for one in dims), *kept).reshape(count, -1)
    length = -(-count // STEPS)
    parts = torch.stack([part.sum(0) for part in torch.split(rows, length)]).to(accumulator) if length > 1 else rows.to(accumulator)
    with np.errstate(all="ignore"):
        in_order = torch.from_numpy(np.add.accumulate(parts.numpy(), axis=0)[-1])  # accumulate adds one after the other by definition
    error = in_order.to(torch.float64).view_as(total) - total
    return total + error.masked_fill_(~torch.isfinite(error), 0.0) * math.sqrt(length)


def with_noise(
    total: torch.Tensor, squares: torch.Tensor, count: torch.Tensor | float, accumulator: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Add noise to `total` of the size of the error that adding `count` terms in order makes."""
    unit = torch.finfo(accumulator).eps / 2
    variance = (squares / 2 + total.square() / 3) * count / 3
    noise = torch.empty_like(total).normal_(generator=generator).mul_(variance.sqrt_().mul_(unit))
    return total + noise.masked_fill_(~torch.isfinite(noise), 0.0)


def product(first: torch.Tensor, second: torch.Tensor, accumulator: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Compute a matrix product, batched or not, with the error of adding its terms in order."""
    total = first @ second
    count = first.shape[-1]
    if count < _SHORT:
        return total
    squares = first.square().sum(-1, keepdim=True) * second.square().sum(-2, keepdim=True) / count
    return with_noise(total, squares, count, accumulator, generator)


def running(values: torch.Tensor, dim: int, accumulator: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Compute all partial sums. Their errors accumulate too, so those of one row all lie on one side."""
    totals = values.cumsum(dim)
    error = totals.square().cumsum(dim).div_(3).sqrt_().mul_(torch.finfo(accumulator).eps)
    shape = [1 if place == dim % values.dim() else size for place, size in enumerate(values.shape)]
    side = torch.empty(shape, dtype=torch.float64).normal_(generator=generator).sign_()
    return totals + torch.nan_to_num(error, nan=0.0, posinf=0.0).mul_(side)


def scattered(run: Callable[..., Any], args: tuple[Any, ...], accumulator: torch.dtype, generator: torch.Generator) -> Any:
    """Run any operation that sums products of its arguments, and add the error of its sums.

    The operation itself, run on squares and on ones, tells what the squares of all terms add up to and how many terms there are.
    """
    totals, squares = run(*args), run(*(_mapped(one, torch.square) for one in args))
    counts = run(*(_mapped(one, torch.ones_like) for one in args))
    if isinstance(totals, torch.Tensor):
        return with_noise(totals, squares, _additions(counts), accumulator, generator)
    return tuple(
        None if total is None else with_noise(total, square, _additions(count), accumulator, generator)
        for total, square, count in zip(totals, squares, counts, strict=True)
    )


def _additions(terms: torch.Tensor) -> torch.Tensor:
    return (terms - 1).clamp_(min=0)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return function(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
