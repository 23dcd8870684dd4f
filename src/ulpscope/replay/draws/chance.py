# SPDX-License-Identifier: Apache-2.0
"""Measure how surprising a draw is, by inequalities that hold for every size and every distribution: no limit of large numbers is taken.

A surprise e says that an honest draw is this far off with probability 2 exp(-e) at most. As standard errors of a normal distribution that
is sqrt(2 e): 8 of them are one in 4e13.
"""

from __future__ import annotations

import math

import torch

__all__ = ["IMPOSSIBLE", "apart_as_samples", "share_surprise", "standard_errors", "sum_surprise", "worst_of"]

IMPOSSIBLE = math.inf
_ENDS = 2.0
"""How many units in the last place two honest generators may put the same quantile apart: each draws on a grid of its own."""


def standard_errors(surprise: float) -> float:
    return math.sqrt(2 * max(surprise, 0.0))


def worst_of(surprises: list[float]) -> float:
    """Return the largest of several surprises, reduced for their number (each gets its share of the chance)."""
    return max(surprises, default=0.0) - math.log(max(len(surprises), 1))


def share_surprise(count: int, total: int, share: float) -> float:
    """Return the surprise of `count` successes among `total` independent trials of one probability (Chernoff)."""
    if not total:
        return 0.0
    if not 0 < share < 1:
        return 0.0 if count == round(share * total) else IMPOSSIBLE
    found = count / total
    terms = ((one, other) for one, other in ((found, share), (1 - found, 1 - share)) if one > 0)
    return total * sum(one * math.log(one / other) for one, other in terms)


def sum_surprise(difference: float, variance: float, largest: float = 1.0, slack: float = 0.0) -> float:
    """Return the surprise of a sum of independent numbers that is `difference` off (Bernstein).

    No number lies further than `largest` from its mean.

    `slack` is how far rounding may move the sum.
    """
    off = max(abs(difference) - slack, 0.0)
    if not off:
        return 0.0
    scale = 2 * (variance + largest * off / 3)
    return off * off / scale if scale > 0 else IMPOSSIBLE


def apart_as_samples(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the surprise of two samples of one distribution, from the largest distance between their shares below any value.

    Elements must be drawn alike. The bound is the Dvoretzky-Kiefer-Wolfowitz inequality for each of the two samples. Values of the given
    dtype may be off by their rounding.
    """
    one, other = (values.reshape(-1).to(torch.float64).sort().values for values in (ours, theirs))
    if not one.numel() or not other.numel():
        return 0.0
    if not bool(torch.isfinite(one).all()):
        return IMPOSSIBLE
    distance = max(_above(one, other, dtype), _above(other, one, dtype))
    reach = 1 / math.sqrt(one.numel()) + 1 / math.sqrt(other.numel())
    return max(2 * (distance / reach) ** 2 - math.log(2), 0.0)


def _above(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> float:
    """Return by how much the share of `one` at or below some value exceeds the share of `other` a rounding further up."""
    slack = _ENDS * torch.finfo(dtype).eps * (one.abs() + other.abs().median()) if dtype.is_floating_point else torch.zeros_like(one)
    here = torch.searchsorted(one, one, right=True).to(torch.float64) / one.numel()
    there = torch.searchsorted(other, one + slack, right=True).to(torch.float64) / other.numel()
    return float((here - there).max())
