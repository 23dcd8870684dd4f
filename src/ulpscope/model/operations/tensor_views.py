# SPDX-License-Identifier: Apache-2.0
"""List the operations that return their first tensor in another layout: its elements were made by an earlier call."""

from __future__ import annotations

from ulpscope.model.operations.unwritten import plain_name

__all__ = ["is_view"]

# https://docs.pytorch.org/docs/stable/tensor_view.html, and the operations that copy only where a view is impossible.
_VIEWS = frozenset(
    """
    __getitem__ adjoint alias as_strided atleast_1d atleast_2d atleast_3d chunk contiguous detach detach_ diagonal dsplit expand expand_as
    flatten hsplit imag indices mH mT movedim moveaxis narrow permute ravel real reshape reshape_as select slice split split_with_sizes
    squeeze squeeze_ swapaxes swapdims t t_ tensor_split transpose transpose_ H T unbind unflatten unfold unsafe_chunk unsafe_split
    unsqueeze unsqueeze_ values view view_as view_as_complex view_as_real vsplit _reshape_alias _unsafe_view unsafe_view
    """.split()
)


def is_view(op: str) -> bool:
    """Return true if an operation gives the elements of its first tensor, or some of them, in another layout.

    >>> is_view("Tensor.transpose"), is_view("aten.view.default"), is_view("torch.cat")
    (True, True, False)
    """
    return plain_name(op) in _VIEWS
