# SPDX-License-Identifier: Apache-2.0
"""A second honest computation of the same call, which shares no kernel of the native precision with the first.

Every operation is taken apart by torch's own decompositions down to primitives. Each primitive is computed in float64 and its result
rounded to the dtype it has natively. So the error is that of rounding the intermediate results and nothing else, and a wrong kernel
cannot vouch for itself. Sums are added up in order, as the plainest kernel does, scattered ones in place and so in their own dtype.
Attention is computed as fused kernels do.
What is neither taken apart nor known here leaves the computation uncovered, and it judges nothing then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ulpscope.replay.summation import accumulator_of, one_by_one, product, running, scattered

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
    avg_pool3d_backward cumprod scatter_reduce upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
    upsample_nearest1d_backward upsample_nearest2d_backward
    """.split()
)
_NATIVE = frozenset(
    """
    _to_copy to rand rand_like randn randn_like bernoulli multinomial native_dropout rrelu_with_noise uniform normal exponential
    sort topk max_pool2d_with_indices
    """.split()
)
_CASTS = frozenset({"convert_element_type", "_to_copy", "to", "device_put"})
_DEEPEST = 32
_MOST_SCORES = 1 << 26


class Traced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs everything as it is and keeps the names of the operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.names.add(_name(func))
        return func(*args, **(kwargs or {}))


class Decomposed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operation as primitives that are right to the last bit. `is_covered` turns false where one could not be taken apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_covered = True
        self._depth = 0
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(func)
        if _stays_native(func, name):
            return func(*args, **kwargs)
        if func.namespace == "prims" and name == "var":
            return self._taken_apart(_variance, args, kwargs)
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

    def _rounded_once(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one primitive, computed in float64 and rounded to the dtype that it has natively."""
        target = _floating_dtype(args, kwargs)
        if target is None or target in _COMPLEX or func._schema.is_mutable:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(_widen, (args, kwargs))
        accumulator = target if name in _SCATTERED else accumulator_of(target)
        results = self._primitive(func, name, wide_args, wide_kwargs, accumulator)
        return tree_map(lambda one: one.to(target) if isinstance(one, torch.Tensor) and one.dtype == torch.float64 else one, results)

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
    """In two passes, since a primitive that is right to the last bit would be better than any kernel."""
    dims = list(dims) if dims else list(range(values.dim()))
    count = math.prod(values.shape[dim] for dim in dims)
    centred = values - values.sum(dims, keepdim=True) / count
    found: torch.Tensor = (centred * centred).sum(dims) / max(0.0, count - correction)
    return found if output_dtype is None else found.to(output_dtype)


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False, **rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As fused kernels do it: weights in the dtype of the inputs, and of the normalisation only its logarithm kept."""
    scores = _scores(query, key, is_causal, **rest)
    top = scores.amax(-1, keepdim=True)
    powers = (scores - top).exp()
    sums = powers.sum(-1, keepdim=True)
    result = powers.to(query.dtype).to(scores.dtype) @ value.to(scores.dtype) / sums
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
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    q, k, v, g = (one.to(wide) for one in (query, key, value, grad))
    shared = (g * result.to(wide)).sum(-1, keepdim=True)
    of_scores = (weights * (g @ v.mT - shared)).to(narrow).to(wide)
    scale = _scale(query, **rest)
    gradients = (of_scores @ k * scale, of_scores.mT @ q * scale, weights.to(narrow).to(wide).mT @ g)
    return tuple(one.to(narrow) for one in gradients)


def _scale(query: torch.Tensor, *, scale: float | None = None, **_: Any) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, *, attn_mask: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
    if query.numel() // query.shape[-1] * key.shape[-2] > _MOST_SCORES:
        raise NotImplementedError("attention over a sequence this long is not written out here")
    wide = accumulator_of(query.dtype)
    scores = query.to(wide) @ key.to(wide).mT * _scale(query, **rest)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask.to(wide)


def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """Added up in place, in the dtype of the gradient."""
    if scale_grad_by_freq:
        raise NotImplementedError("gradients scaled by frequency are not written out here")
    rows = grad.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
    return grad.new_zeros(num_weights, grad.shape[-1]).index_put((indices,), rows, accumulate=True)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
}


@contextmanager
def separate_kernels() -> Iterator[None]:
    """Attention as its formula, since the fused kernels exist in some precisions only and cannot be taken apart."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def is_normwise(names: set[str]) -> bool:
    """Whether matrices are factored: sound methods are then exact for a matrix nearby, element by element only in relation to the whole."""
    return any(name.startswith(("linalg_", "_linalg_", "lu_", "cholesky", "triangular_solve", "geqrf")) for name in names)


def is_composite(names: set[str]) -> bool:
    """Whether more is computed than products and sums: then it is open what a machine rounds on the way."""
    return not names <= _MOVEMENT | _PRODUCTS


def is_movement(names: set[str]) -> bool:
    """Whether these operations only place values: nothing is computed, so nothing may be rounded."""
    return bool(names) and names <= _MOVEMENT


@functools.cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    import torch._decomp
    import torch._refs

    return torch._decomp.decomposition_table


def _composite(func: Any) -> Callable[..., Any] | None:
    """The formula of an operation that torch itself defines by others."""
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
    return func.decompose if is_composite else None


def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def _stays_native(func: Any, name: str) -> bool:
    return func.is_view or name in _MOVEMENT or name in _NATIVE or name in _CASTS


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """Comparisons and choices of given values have no rounding of their own."""
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
