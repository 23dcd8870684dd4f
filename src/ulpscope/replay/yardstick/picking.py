# SPDX-License-Identifier: Apache-2.0
"""Compare indices by the values that they pick: sorting and searching leave the order of equal elements open."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["picks_the_same"]


def picks_the_same(inputs: Iterable[torch.Tensor], ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Tell whether two index tensors each pick, without repetition, the same elements of an input along one dimension."""
    if ours.dtype != torch.int64 or ours.dim() == 0 or ours.shape != theirs.shape:
        return False
    return any(_picks_alike(one, dim, ours, theirs) for one in inputs if one.dim() == ours.dim() for dim in range(one.dim()))


def _picks_alike(values: torch.Tensor, dim: int, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    fits = all(there >= here for at, (there, here) in enumerate(zip(values.shape, ours.shape, strict=True)) if at != dim)
    is_index = all(bool((one >= 0).all()) and bool((one < values.shape[dim]).all()) for one in (ours, theirs))
    if not fits or not is_index or ours.shape[dim] > values.shape[dim]:
        return False
    picked = [values.gather(dim, one) for one in (ours, theirs)]
    return bool((picked[0] == picked[1]).all()) and all(_is_choice(one, dim) for one in (ours, theirs))


def _is_choice(indices: torch.Tensor, dim: int) -> bool:
    ordered = indices.sort(dim).values
    return not bool((ordered.diff(dim=dim) == 0).any())
