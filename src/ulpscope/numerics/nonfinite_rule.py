# SPDX-License-Identifier: Apache-2.0
"""Tell which non-finite values a call received and left, and what that says about the call.

The same rules serve the live hunt and the analysis of a recorded run. Values are told apart by kind: NaN, +inf, -inf, and the dtype's own
finite limit where a device stops there instead of overflowing. -inf is the usual mask, so it is not an accusation by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Flag
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ulpscope.model import DTYPES, Summary

__all__ = [
    "CLEAN",
    "Kinds",
    "Origin",
    "Passage",
    "asks_for",
    "gives_data",
    "is_move",
    "kinds_of",
    "kinds_of_range",
    "makes_nothing_new",
    "pass_through",
]


class Kinds(Flag):
    """The kinds of non-finite values in one tensor."""

    NAN = 1
    POSINF = 2
    NEGINF = 4
    LIMIT = 8

    @property
    def is_mask(self) -> bool:
        """Tell whether only -inf is there."""
        return self is Kinds.NEGINF


CLEAN = Kinds(0)
MASK_NOTE = "a mask: what is not finite in it was asked for"
"""The note on a tensor that the live hunt found to be a mask."""

Origin: TypeAlias = Literal["made", "given", "soft", "masked"]
"""Where non-finite values in a tensor came from. made: a call made them; given: from outside of all recorded calls; soft: a call made -inf
and may have meant to; masked: the program asked for them."""
Passage: TypeAlias = Literal["clean", "made", "given", "soft", "masked", "passed", "swallowed"]
"""What one call did. clean: no non-finite value; made: it made them; given: it had them from outside; soft: it made -inf that may be meant;
masked: it handled a mask; passed: it passed them on; swallowed: it made them vanish."""

# Moves and selections of values: a non-finite result was non-finite before.
_MOVES = frozenset(
    """
    view view_as reshape reshape_as flatten unflatten ravel contiguous transpose transpose_ t t_ permute movedim moveaxis swapaxes swapdims
    chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind expand expand_as broadcast_to broadcast_tensors squeeze squeeze_
    unsqueeze unsqueeze_ narrow select diagonal unfold as_strided clone detach detach_ T mT H mH real imag view_as_real view_as_complex
    cat concat concatenate stack hstack vstack dstack roll flip fliplr flipud rot90 repeat repeat_interleave tile gather take
    take_along_dim index_select masked_select __getitem__ triu tril cpu cuda npu pin_memory alias unsafe_chunk unsafe_split resolve_conj
    resolve_neg conj adjoint pixel_shuffle pixel_unshuffle channel_shuffle sort topk kthvalue unique argsort atleast_1d atleast_2d
    atleast_3d
    zeros zeros_like ones ones_like zero_ arange eye rand randn randint rand_like randn_like randperm new_zeros new_ones requires_grad_
    isnan isinf isfinite sign argmax argmin eq ne lt le gt ge
    """.split()
)
# Operations whose results are never larger than their inputs, with derivatives of about 1.
_BOUNDED = frozenset(
    """
    relu relu_ relu6 gelu silu sigmoid sigmoid_ tanh tanh_ leaky_relu elu selu softplus hardtanh hardsigmoid hardswish mish logsigmoid
    """.split()
)
_MASK = -65504.0  # the lowest float16: a program adds less than that to a score only to hide it
_GIVING = frozenset("tensor as_tensor from_numpy frombuffer from_dlpack load asarray from_file".split())
# Operations whose -inf can only be an overflow; any other -inf (log(0), a mask times a large number) is often meant.
_PRODUCTS = frozenset(
    """
    linear matmul mm bmm addmm addbmm baddbmm mv addmv dot vdot inner outer einsum bilinear conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d __matmul__ scaled_dot_product_attention multi_head_attention_forward tensordot chain_matmul multi_dot
    layer_norm rms_norm batch_norm group_norm instance_norm gelu silu embedding
    """.split()
)


def _short(op: str) -> str:
    parts = [part for part in op.split(".") if part]
    if len(parts) > 1 and parts[0] == "aten":
        return parts[1]
    return parts[-1] if parts else op


@lru_cache(maxsize=4096)
def makes_nothing_new(op: str) -> bool:
    """Tell whether an operation moves, selects, counts or bounds values, or makes plain numbers, so that its result need not be looked
    at.
    """
    short = _short(op)
    return short in _MOVES or short in _BOUNDED


@lru_cache(maxsize=4096)
def is_move(op: str) -> bool:
    """Tell whether an operation only moves or selects values, by its name alone or by that of its autograd node."""
    short = _short(op)
    return short in _MOVES or short in ("unsafe_view", "_unsafe_view", "_reshape_alias", "to_copy", "slice", "index")


@lru_cache(maxsize=4096)
def gives_data(op: str) -> bool:
    """Tell whether an operation brings values in from outside of torch."""
    return _short(op) in _GIVING


def kinds_of(summary: Summary | None, dtype: str = "", *, saturates: bool = False) -> Kinds:
    """Return the kinds in a summary; without counts, as far as its extremes show them."""
    if summary is None:
        return CLEAN
    found = CLEAN
    if summary.num_nan or _is_nan(summary.max) or _is_nan(summary.min):
        found |= Kinds.NAN
    if summary.num_posinf or summary.max == math.inf:
        found |= Kinds.POSINF
    if summary.num_neginf or summary.min == -math.inf:
        found |= Kinds.NEGINF
    if saturates and not found and _is_at_limit(summary.min, summary.max, dtype):
        found |= Kinds.LIMIT
    return found


def kinds_of_range(low: float, high: float, limit: float | None = None) -> Kinds:
    """Return the kinds that extremes show, if NaN passes through to them; `limit` is the dtype's largest number on a device that stops
    there.
    """
    if low != low or high != high:
        return Kinds.NAN
    found = CLEAN
    if high == math.inf:
        found |= Kinds.POSINF
    if low == -math.inf:
        found |= Kinds.NEGINF
    if limit is not None and not found and (high >= limit or low <= -limit):
        found |= Kinds.LIMIT
    return found


def _is_nan(value: float | None) -> bool:
    return value is not None and value != value


def _is_at_limit(low: float | None, high: float | None, dtype: str) -> bool:
    entry = DTYPES.get(dtype)
    if entry is None or not entry.is_floating:
        return False
    return (high is not None and high >= entry.max) or (low is not None and low <= -entry.max)


def asks_for(values: Iterable[Any], leaving: Kinds) -> bool:
    """Tell whether the call asked for its result: an argument is an infinity or, for -inf, one of the large negative numbers that masks
    use.
    """
    is_mask = not leaving & ~(Kinds.NEGINF | Kinds.LIMIT)
    return any(_asks(value, is_mask) for value in values)


def _asks(value: Any, is_mask: bool) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value) or (is_mask and value <= _MASK)
    if isinstance(value, (list, tuple)):
        return any(_asks(item, is_mask) for item in value[:64])
    if isinstance(value, Mapping):
        return any(_asks(item, is_mask) for item in value.values())
    return False


def pass_through(op: str, entering: Mapping[Origin | None, Kinds], leaving: Kinds, *, asked: bool) -> Passage:
    """Tell what one call did with non-finite values.

    `entering` has the kinds of its inputs by their origin, None where the origin is unknown.
    """
    received = CLEAN
    for kinds in entering.values():
        received |= kinds
    if not leaving:
        return _without_results(entering, received)
    if not received:
        return _from_nothing(op, leaving, asked)
    if "made" in entering or "given" in entering:
        return "passed"
    if entering.get(None, CLEAN) & ~Kinds.NEGINF:
        return "given"
    if leaving & ~received and not asked:
        return "passed" if "soft" in entering else "made"
    return "soft" if "soft" in entering else "masked"


def _without_results(entering: Mapping[Origin | None, Kinds], received: Kinds) -> Passage:
    if not received:
        return "clean"
    is_suspect = any(origin in ("made", "given") for origin in entering) or received & ~Kinds.NEGINF
    return "swallowed" if is_suspect else "masked"


def _from_nothing(op: str, leaving: Kinds, asked: bool) -> Passage:
    if asked or gives_data(op):
        return "given" if Kinds.NAN in leaving else "masked"  # no program masks with NaN
    return "soft" if leaving.is_mask and _short(op) not in _PRODUCTS else "made"
