# SPDX-License-Identifier: Apache-2.0
"""Compute grouped matrix products, as mixtures of experts use them, as plain products: the fused kernel takes no float64."""

from __future__ import annotations

import torch

from ulpscope.replay.program import NotReplayable

__all__ = ["grouped_product"]


def grouped_product(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute one product for each group. Groups end at `offs`: rows of the first matrix, columns of the second, or their shared dimension.

    Rows behind the last end belong to no group; the kernel leaves their results uninitialized.
    """
    if offs is None:
        return torch.bmm(mat_a, mat_b)
    if bias is not None:
        raise NotReplayable("a grouped product with a bias is not written out here")
    ends = [int(end) for end in offs]
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    is_flat = mat_a.dim() == 2, mat_b.dim() == 2
    if is_flat == (True, True):
        return torch.stack([mat_a[:, begin:end] @ mat_b[begin:end] for begin, end in groups])
    size = mat_a.shape[0] if is_flat[0] else mat_b.shape[-1]
    if not ends or ends[-1] != size or any(begin > end for begin, end in groups):
        raise NotReplayable("some of its rows belong to no group: their result is memory as it was found")
    if is_flat[0]:
        return torch.cat([mat_a[begin:end] @ mat_b[place] for place, (begin, end) in enumerate(groups)])
    return torch.cat([mat_a[place] @ mat_b[:, begin:end] for place, (begin, end) in enumerate(groups)], 1)
