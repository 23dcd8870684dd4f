# SPDX-License-Identifier: Apache-2.0
"""Autocast on the emulated device, by the lists of CPU autocast.

Unlike CPU autocast it keeps no cache of cast weights: a weight used twice in one region is cast twice, and its two gradients are added in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ulpscope._torch_private import ExcludeKeys, key_of_autocast, tree_leaves, tree_map_only

__all__ = ["register"]

_LOWER = (
    *("addbmm", "addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "prelu", "scaled_dot_product_attention"),
    *("conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
)
_FLOAT32 = (
    *("adaptive_avg_pool3d", "avg_pool3d", "cdist", "max_pool3d", "prod", "prod.dim_int", "trace"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy_loss", "hinge_embedding_loss"),
    *("huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss"),
    *("nll_loss2d", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
)
_WIDEST = ("cat", "index_copy", "stack")


def register(aten: Any, anything: Any) -> None:
    """Register the policies; an operation in no list runs in the dtype it was given."""
    anything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in ((_LOWER, _lower), (_FLOAT32, lambda _: torch.float32), (_WIDEST, _widest)):
        for name in names:
            aten.impl(name, _cast_first(name, dtype), "AutocastPrivateUse1")


def _lower(_: object) -> torch.dtype:
    return torch.get_autocast_dtype("npu")


def _widest(arguments: object) -> torch.dtype:
    widths = {leaf.dtype for leaf in tree_leaves(arguments) if _is_cast(leaf)}
    return torch.float32 if torch.float32 in widths or not widths else next(iter(widths))


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "npu" and value.dtype is not torch.float64


def _cast_first(name: str, dtype: Callable[[object], torch.dtype]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    autocast = key_of_autocast()

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with ExcludeKeys(autocast):
            wanted = dtype((args, kwargs))
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(wanted) if _is_cast(tensor) else tensor, (args, kwargs))
            return op(*args, **kwargs)

    return kernel
