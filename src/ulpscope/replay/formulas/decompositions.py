# SPDX-License-Identifier: Apache-2.0
"""Compute the same call a second time, honestly, with no kernel of the native precision that the first computation used.

torch's own decompositions take every operation apart into primitives. Each primitive is computed in float64, and its result is rounded to
the dtype that it has natively. So the error is that of rounding the intermediate results and nothing else, and a wrong kernel cannot vouch
for itself. Sums are added up in order, as the plainest kernel does; scattered sums are added in place, in their own dtype. Attention is
computed as fused kernels do. An operation that is neither taken apart nor known here leaves the computation uncovered, and an uncovered
computation judges nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ulpscope._torch_private import TorchDispatchMode, decomposition_table, is_made_of_others, tree_flatten, tree_map
from ulpscope.replay.formulas.grouped import grouped_product
from ulpscope.replay.formulas.sampling import sampled, sampled_backward
from ulpscope.replay.formulas.summation import accumulator_of, one_by_one, product, running, scattered

__all__ = ["Decomposed", "Traced", "is_composite", "is_movement", "is_normwise", "separate_kernels"]

_MOVEMENT = frozenset(
    """
    _reshape_alias _unsafe_view alias arange as_strided as_strided_scatter cat chunk clone constant_pad_nd contiguous copy copy_ detach
    detach_ diagonal diagonal_scatter embedding empty empty_like empty_strided expand fill_ flip full full_like gather index index_select
    lift lift_fresh masked_fill masked_fill_ masked_select movedim narrow new_empty new_empty_strided new_full new_zeros ones_like
    permute pixel_shuffle repeat reshape resize_ roll scalar_tensor scatter select select_scatter slice slice_scatter split split_with_sizes
    squeeze stack t tile transpose tril triu unbind unfold unsafe_chunk unsafe_split unsqueeze view view_as_complex view_as_real where zero_
    zeros zeros_like
    """.split()
)
_PRODUCTS = frozenset("mm bmm addmm baddbmm addbmm mv addmv dot linear convolution convolution_backward add add_ sum mul".split())
_SCATTERED = frozenset("index_add index_put _unsafe_index_put scatter_add".split())
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_KNOWN_SUMS = _SCATTERED | _CONVOLUTIONS | {"mm", "bmm", "cumsum"}
_LINEAR = frozenset(
    """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward cumprod scatter_reduce upsample_nearest1d_backward upsample_nearest2d_backward
    """.split()
)
_NATIVE = frozenset(
    """
    _to_copy to rand rand_like randn randn_like bernoulli multinomial native_dropout rrelu_with_noise uniform normal exponential
    sort topk max_pool2d_with_indices
    """.split()
)
_UNARY = "abs cos exp expm1 log log10 log1p log2 neg reciprocal rsqrt sin sqrt tanh"
_CASTS = frozenset({"convert_element_type", "_to_copy", "to", "device_put"})
_DEEPEST = 32
_MOST_SCORES = 1 << 26


class Traced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation as it is and keeps the operations' names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.names.add(_name(func))
        return func(*args, **(kwargs or {}))


_CERTAIN = frozenset("add sub rsub mul div neg sqrt".split())
"""What IEEE 754 rounds correctly; and the sum of one term."""
_EXACT = frozenset("abs amax amin ceil copysign floor fmax fmin fmod maximum minimum neg round sign trunc".split())
"""What every format of the operands holds, so that nothing is rounded in any: a choice among them, and whole numbers below them."""


class Decomposed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operation as primitives that are right to the last bit. `is_covered` turns false where one could not be taken apart.

    With a `seed`, each primitive errs by chance by up to one more unit in its last place, like another honest kernel that rounds otherwise.
    This shows what rounding may do to a result that is exact only because nothing happened to be rounded. `is_narrow`: the call is one of
    16 bits or fewer, whose kernels compute in formats of their own.
    """

    def __init__(self, seed: int | None = None, *, is_narrow: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_covered = True
        self._is_narrow = is_narrow
        self._noise = None if seed is None else torch.Generator().manual_seed(seed)
        self._depth = 0
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(func)
        if _stays_native(func):
            return func(*args, **kwargs)
        if not kwargs and func in _primitives() and (target := _shared_dtype(args)) is not None:
            return self._as_primitive(func, name, args, target)
        if func.namespace == "prims" and name == "var":
            return self._taken_apart(_variance, args, kwargs)
        if func in (torch.ops.aten.var_mean.dim, torch.ops.aten.var_mean.correction) and _shared_dtype(args) is not None:
            return self._taken_apart(_variance_and_mean, args, kwargs)
        if func.namespace == "prims" or name in _LINEAR or name in _KNOWN_SUMS:
            return self._rounded_once(func, name, args, kwargs)
        decomposition = _FORMULAS.get(name) or _table().get(func) or _composite(func)
        if decomposition is not None and self._depth < _DEEPEST:
            return self._taken_apart(decomposition, args, kwargs)
        self.is_covered = self.is_covered and not _computes(func, args)
        return func(*args, **kwargs)

    def _taken_apart(self, decomposition: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        try:
            with self:
                return decomposition(*args, **kwargs)
        finally:
            self._depth -= 1

    def _as_primitive(self, func: Any, name: str, args: tuple[Any, ...], target: torch.dtype) -> Any:
        """Compute what torch's reference would for tensors of one dtype, as one primitive of that name and without a cast."""
        wide = tuple(_widen(one) for one in args)
        if name != "sum":
            found = self._primitive(func, name, wide, {}, accumulator_of(target))
            return found.to(target) if name in _EXACT else self._rounded(found, target, is_certain=name in _CERTAIN)
        values, dims, *keeps = (*wide, None)
        dims = [one % values.dim() for one in dims or ()] or list(range(values.dim()))
        total = self._primitive(torch.ops.prims.sum.default, name, (values, dims), {}, accumulator_of(target))
        total = self._rounded(total, target, is_certain=total.numel() == values.numel())
        return total.reshape([1 if at in dims else size for at, size in enumerate(values.shape)]) if any(keeps) else total

    def _rounded_once(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one primitive in float64 and round its result to the dtype that it has natively."""
        target = _floating_dtype(args, kwargs)
        if target is None or target in _COMPLEX or func._schema.is_mutable:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(_widen, (args, kwargs))
        accumulator = target if name in _SCATTERED else accumulator_of(target)
        results = self._primitive(func, name, wide_args, wide_kwargs, accumulator)
        if name in _EXACT:
            return tree_map(lambda one: one.to(target) if isinstance(one, torch.Tensor) and one.dtype == torch.float64 else one, results)
        is_certain = name in _CERTAIN or (name == "sum" and isinstance(results, torch.Tensor) and results.numel() == args[0].numel())
        return tree_map(
            lambda one: (
                self._rounded(one, target, is_certain=is_certain) if isinstance(one, torch.Tensor) and one.dtype == torch.float64 else one
            ),
            results,
        )

    def _rounded(self, value: torch.Tensor, target: torch.dtype, *, is_certain: bool = False) -> torch.Tensor:
        """Round to a dtype, with the noise of another kernel where one is asked for.

        `is_certain`: every machine rounds this operation correctly, so a result that needs no rounding is the same everywhere, unless a
        kernel computes in a format of its own.
        """
        if self._noise is None or value.dtype != torch.float64:
            return value.to(target)
        noise = torch.empty(value.shape, dtype=torch.float64).uniform_(-1, 1, generator=self._noise)
        if is_certain and not self._is_narrow:  # for float64: a value that fits float32; nothing here computes with more digits to tell
            noise.masked_fill_(value.to(torch.float32 if target is torch.float64 else target) == value, 0.0)
        return (value + value * noise * torch.finfo(target).eps).to(target)

    def _primitive(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], accumulator: torch.dtype) -> Any:
        if name == "sum" and func.namespace == "prims":
            return one_by_one(args[0], args[1] or [], accumulator, self._generator)
        if name in ("mm", "bmm"):
            return product(args[0], args[1], accumulator, self._generator)
        if name == "cumsum":
            return running(args[0], args[1], accumulator, self._generator)
        if name in _KNOWN_SUMS:
            return scattered(lambda *given: func(*given, **kwargs), args, accumulator, self._generator)
        return func(*args, **kwargs)


def _variance(values: torch.Tensor, dims: Any, correction: float = 1, *, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the variance in two passes, since a primitive that is right to the last bit would be better than any kernel."""
    dims = list(dims) if dims else list(range(values.dim()))
    count = math.prod(values.shape[dim] for dim in dims)
    centred = values - values.sum(dims, keepdim=True) / count
    squares = centred.real * centred.real + centred.imag * centred.imag if centred.is_complex() else centred * centred
    found: torch.Tensor = squares.sum(dims) / max(0.0, count - correction)
    return found if output_dtype is None else found.to(output_dtype)


def _variance_and_mean(
    values: torch.Tensor, dims: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = [dim % values.dim() for dim in dims or ()] or list(range(values.dim()))
    mean = values.sum(dims, keepdim=keepdim) / math.prod(values.shape[dim] for dim in dims)
    return _variance(values, dims, int(unbiased) if correction is None else correction).view_as(mean), mean


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False, **rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention as fused kernels do: weights in the dtype of the inputs, and only the logarithm kept of the normalisation."""
    scores = _scores(query, key, is_causal, **rest)
    top = scores.amax(-1, keepdim=True)
    is_hidden = top == -math.inf
    top = top.masked_fill(is_hidden, 0.0)
    powers = (scores - top).exp()
    sums = powers.sum(-1, keepdim=True).masked_fill(is_hidden, 1.0)
    result = _times(powers.to(query.dtype).to(scores.dtype), value.to(scores.dtype)) / sums
    return result.to(query.dtype), (top + sums.log()).squeeze(-1)


def _flash_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    **rest: Any,
) -> tuple[torch.Tensor, ...]:
    scores = _scores(query, key, is_causal, **rest)
    wide, narrow = scores.dtype, query.dtype
    weights = (scores - logsumexp.unsqueeze(-1)).exp().masked_fill(scores == -math.inf, 0.0)
    q, k, v, g = (one.to(wide) for one in (query, key, value, grad))
    shared = (g * result.to(wide)).sum(-1, keepdim=True)
    of_scores = (weights * (_times(g, v.mT) - shared)).to(narrow).to(wide)
    scale = _scale(query, **rest)
    gradients = (_times(of_scores, k) * scale, _times(of_scores.mT, q) * scale, _times(weights.to(narrow).to(wide).mT, g))
    return tuple(one.to(narrow) for one in gradients)


def _times(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Multiply `one @ other`; batches of the same shape skip torch's broadcasting."""
    batch = one.shape[:-2]
    if len(batch) < 2 or batch != other.shape[:-2] or not one.numel() or not other.numel():
        return one @ other
    return torch.bmm(one.flatten(0, -3), other.flatten(0, -3)).view(*batch, one.shape[-2], other.shape[-1])


def _scale(query: torch.Tensor, *, scale: float | None = None, **_: Any) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, *, attn_mask: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
    if query.numel() // query.shape[-1] * key.shape[-2] > _MOST_SCORES:
        raise NotImplementedError("attention over a sequence this long is not written out here")
    wide = accumulator_of(query.dtype)
    scores = _times(query.to(wide), key.to(wide).mT) * _scale(query, **rest)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask.to(wide)


def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """Add up the gradients of each embedding row in place, in the dtype of the gradient."""
    if scale_grad_by_freq:
        raise NotImplementedError("gradients scaled by frequency are not written out here")
    rows = grad.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
    return grad.new_zeros(num_weights, grad.shape[-1]).index_put((indices,), rows, accumulate=True)


def _interpolated_backward(interpolate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward formula of an interpolation: along each dimension, a product with the weights of the forward formula.

    So the place of each pixel between others, and the weights that follow, are rounded as they are forward.
    """

    def formula(
        grad: torch.Tensor, output_size: list[int], input_size: list[int], align_corners: bool, *scales: float | None
    ) -> torch.Tensor:
        sizes = list(zip(input_size[2:], output_size, [*scales, *[None] * len(output_size)], strict=False))
        found = grad
        for at, (before, after, scale) in enumerate(sizes):
            ones, places = ([1] * len(sizes) for _ in range(2))
            ones[at], places[at] = before, after
            own = [scale if place == at else None for place in range(len(sizes))]
            rows = torch.eye(before, dtype=grad.dtype, device=grad.device).reshape(1, before, *ones)
            weights = interpolate(rows, places, align_corners, *own).reshape(before, after)
            found = (found.movedim(at + 2, -1) @ weights.mT).movedim(-1, at + 2)
        return found

    return formula


def _multilabel_margin_loss(values: torch.Tensor, targets: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the margins of each wrong class against each right one.

    torch's decomposition also counts the places after the last right class, as class 0.
    """
    count = values.shape[-1]
    rows, chosen = values.reshape(-1, count), targets.reshape(-1, count)
    is_named = (chosen == -1).cumsum(-1) == 0
    is_target = ((chosen.unsqueeze(-1) == torch.arange(count)) & is_named.unsqueeze(-1)).any(1)
    of_right = rows.gather(-1, chosen.where(is_named, 0)).unsqueeze(-1)
    losses = (1.0 - of_right + rows.unsqueeze(1)).clamp_min(0) / count
    total = losses.masked_fill(is_target.unsqueeze(1) | ~is_named.unsqueeze(-1), 0).sum((1, 2))
    flags = is_target.to(values.dtype).reshape(targets.shape)
    if reduction == 0:
        return (total if values.dim() > 1 else total.squeeze(0)), flags
    return (total.mean() if reduction == 1 else total.sum()), flags


_FORMULAS: dict[str, Callable[..., Any]] = {
    "multilabel_margin_loss_forward": _multilabel_margin_loss,
    "upsample_linear1d_backward": _interpolated_backward(torch.ops.aten.upsample_linear1d.default),
    "upsample_bilinear2d_backward": _interpolated_backward(torch.ops.aten.upsample_bilinear2d.default),
    "upsample_bicubic2d_backward": _interpolated_backward(torch.ops.aten.upsample_bicubic2d.default),
    "grid_sampler_2d": sampled,
    "grid_sampler_3d": sampled,
    "grid_sampler_2d_backward": sampled_backward,
    "grid_sampler_3d_backward": sampled_backward,
    "_grouped_mm": grouped_product,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
}


@contextmanager
def separate_kernels() -> Iterator[None]:
    """Compute attention by its formula: the fused kernels exist in some precisions only and cannot be taken apart."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def is_normwise(names: set[str]) -> bool:
    """Tell whether the call factors matrices.

    Sound methods are then exact for a matrix nearby, and each element only in relation to the whole.
    """
    return any(name.startswith(("linalg_", "_linalg_", "lu_", "cholesky", "triangular_solve", "geqrf")) for name in names)


def is_composite(names: set[str]) -> bool:
    """Tell whether the call computes more than products and sums: then machines may differ in what they round on the way."""
    return not names <= _MOVEMENT | _PRODUCTS


def is_movement(names: set[str]) -> bool:
    """Tell whether these operations only move values: nothing is computed, so nothing may be rounded."""
    return bool(names) and names <= _MOVEMENT


@functools.cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    return decomposition_table()


def _composite(func: Any) -> Callable[..., Any] | None:
    """Return the formula of an operation that torch itself defines by others."""
    return func.decompose if is_made_of_others(func.name()) else None


@functools.cache
def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


@functools.cache
def _stays_native(func: Any) -> bool:
    name = _name(func)
    return func.is_view or name in _MOVEMENT or name in _NATIVE or name in _CASTS


@functools.cache
def _primitives() -> frozenset[Any]:
    aten = torch.ops.aten
    unary = (getattr(aten, name).default for name in _UNARY.split())
    return frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.sum.dim_IntList, *unary})


def _shared_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    """Return the one dtype of all tensors; None if something might be cast, or if there is nothing to add up."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    dtype = tensors[0].dtype if tensors else None
    if dtype not in (torch.float32, torch.float64) or any(one.dtype is not dtype for one in tensors):
        return None
    is_plain = len(args) == len(tensors) or not any(isinstance(one, complex) for one in args)
    return dtype if is_plain and tensors[0].dim() and (len(tensors) > 1 or tensors[0].numel()) else None


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether an operation rounds: comparisons and choices of given values do not."""
    name = _name(func)
    if name in {"sort", "topk", "max", "min", "argmax", "argmin", "nonzero", "item", "_local_scalar_dense", "bincount", "equal"}:
        return False
    return any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in tree_flatten(args)[0])


_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
}
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.contiguous().to(_WIDER.get(value.dtype, value.dtype))
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _floating_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    leaves = tree_flatten((args, kwargs))[0]
    asked = [one for one in leaves if isinstance(one, torch.dtype)]
    if asked:
        return asked[0] if asked[0].is_floating_point else None
    given = [one.dtype for one in leaves if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())]
    return functools.reduce(torch.promote_types, given) if given else None
