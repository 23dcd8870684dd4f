# SPDX-License-Identifier: Apache-2.0
"""Backends that compute otherwise than this CPU: honestly (other rounding, other order, other formulas), or with one faulty kernel.

A machine is a dispatch mode, so it sits below the API and below autograd, where a backend's kernels are. `honest` maps aten
operations to what this backend computes for them; a `Fault` breaks one of them. Faulty kernels are handed the machine's own honest
kernel, so what is wrong comes on top of the rounding that this machine has anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Fault",
    "Kernel",
    "Kernels",
    "Machine",
    "accelerator",
    "attention_kernels",
    "honest_kernels",
    "layer_norm",
    "layer_norm_backward",
    "machine_of",
    "other_functions",
    "other_order",
    "own_norms",
    "rounded_operands",
    "split_k",
]

aten = torch.ops.aten
Kernel: TypeAlias = Callable[..., Any]
Kernels: TypeAlias = Mapping[Any, Kernel]
Format: TypeAlias = Literal["float16", "tf32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`kernel(honest, *args, **kwargs)` instead of `honest(*args, **kwargs)`, for one aten operation.

    `calls` are the ones that it strikes, counted from 0 among the calls of that operation and phase in one step, and `steps`
    the steps; None means all. With `only_if(*args)` it strikes only such arguments: a broken kernel is often broken for some.
    """

    op: Any
    kernel: Kernel
    phase: Literal["forward", "backward"] | None = None
    calls: Sequence[int] | None = None
    steps: Sequence[int] | None = None
    only_if: Callable[..., bool] | None = None


class Machine(TorchDispatchMode):
    """Entered once for each step (see `Program.machine`); steps and calls are counted here."""

    def __init__(self, honest: Kernels | None = None, *faults: Fault) -> None:
        super().__init__()
        self._honest = dict(honest or {})
        self._faults = faults
        self._step = -1
        self._counts: dict[int, int] = {}
        self.num_hits = 0

    def __enter__(self) -> Machine:
        self._step += 1
        self._counts = {}
        return super().__enter__()  # type: ignore[no-any-return]

    def __call__(self) -> Machine:
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = self._honest.get(func, func)
        for at, fault in enumerate(self._faults):
            if func is fault.op and self._strikes(at, fault, args):
                self.num_hits += 1
                return fault.kernel(kernel, *args, **(kwargs or {}))
        return kernel(*args, **(kwargs or {}))

    @property
    def is_idle(self) -> bool:
        """Tell whether it has faults and none of them ever struck: then the case is broken."""
        return bool(self._faults) and not self.num_hits

    def _strikes(self, at: int, fault: Fault, args: Any) -> bool:
        if fault.only_if is not None and not fault.only_if(*args):
            return False
        if fault.phase not in (None, "backward" if torch._C._current_graph_task_id() != -1 else "forward"):
            return False
        index = self._counts.get(at, 0)
        self._counts[at] = index + 1
        return (fault.calls is None or index in fault.calls) and (fault.steps is None or self._step in fault.steps)


def machine_of(side: str, subject: Kernels | None, reference: Kernels | None = None) -> Callable[[], AbstractContextManager[object]]:
    """Return the machine of one side: with these kernels, or this CPU as it is."""
    kernels = subject if side == "subject" else reference
    return Machine(kernels) if kernels else nullcontext


def accelerator(format: Format = "float16") -> Kernels:
    """Combine everything: operands rounded, products split over K, other norms, other elementwise functions."""
    return {**other_functions(), **own_norms(), **rounded_operands(format, product=_split_product(2))}


def honest_kernels(name: str) -> Kernels:
    """Return the machine that cases call by this name; `cpu` is this one."""
    return {
        "cpu": dict,
        "fp16": lambda: rounded_operands("float16"),
        "tf32": lambda: rounded_operands("tf32"),
        "bf16": lambda: rounded_operands("bfloat16"),
        "split-k": split_k,
        "order": other_order,
        "functions": lambda: {**other_functions(), **own_norms()},
        "accelerator": accelerator,
        "accelerator-tf32": lambda: accelerator("tf32"),
    }[name]()


# ---- matrix products ------------------------------------------------------------------------------------------------------------------


def rounded_operands(format: Format, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Kernels:
    """Round float32 operands to a narrower format and add up in float32, as a matrix unit does."""
    return _products(lambda x: _rounded(x, format), product)


def split_k(parts: int = 4) -> Kernels:
    """Compute matrix products in parts of the inner dimension, added in float32."""
    return _products(lambda x: x, _split_product(parts))


def other_order() -> Kernels:
    """Compute products and sums from the last term to the first."""
    return {**_products(lambda x: x, _reversed_product), **_reversed_sums()}


def _rounded(x: Tensor, format: Format) -> Tensor:
    if x.dtype is not torch.float32:
        return x
    if format == "tf32":
        words = x.contiguous().view(torch.int32)
        return ((words + 0xFFF + ((words >> 13) & 1)) & ~0x1FFF).view(torch.float32).view(x.shape)
    return x.to(getattr(torch, format)).float()


def _split_product(parts: int) -> Callable[[Tensor, Tensor], Tensor]:
    def product(left: Tensor, right: Tensor) -> Tensor:
        size = left.shape[-1]
        edges = [size * part // parts for part in range(parts + 1)]
        spans = [(low, high) for low, high in itertools.pairwise(edges) if low < high]
        if len(spans) < 2:
            return torch.matmul(left, right)
        pieces = [torch.matmul(left[..., low:high], right[..., low:high, :]) for low, high in spans]
        total = pieces[0]
        for piece in pieces[1:]:
            total = total + piece
        return total

    return product


def _reversed_product(left: Tensor, right: Tensor) -> Tensor:
    return torch.matmul(left.flip(-1), right.flip(-2))


def _products(prepared: Callable[[Tensor], Tensor], product: Callable[[Tensor, Tensor], Tensor]) -> Kernels:
    def plain(left: Tensor, right: Tensor) -> Tensor:
        return product(prepared(left), prepared(right))

    def vector(left: Tensor, right: Tensor) -> Tensor:
        return product(prepared(left), prepared(right).unsqueeze(-1)).squeeze(-1)

    def plus(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        result = plain(left, right) * alpha
        return result if beta == 0 else result + bias * beta

    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        result: Tensor = aten.convolution.default(prepared(x), prepared(weight), None, *rest)
        return result if bias is None else result + bias.reshape(-1, *[1] * (weight.dim() - 2))

    def convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        of_x, of_weight, _ = aten.convolution_backward.default(prepared(gradient), prepared(x), prepared(weight), *rest)
        of_bias = gradient.sum([0, *range(2, gradient.dim())]) if rest[-1][2] else None
        return of_x, of_weight, of_bias

    return {
        **attention_kernels(plain),
        aten.mm.default: plain,
        aten.bmm.default: plain,
        aten.mv.default: vector,
        aten.addmm.default: plus,
        aten.baddbmm.default: plus,
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution_backward,
    }


def attention_kernels(product: Callable[[Tensor, Tensor], Tensor], offset: Callable[[int, int], int] = lambda rows, columns: 0) -> Kernels:
    """Compute fused attention, forward and backward, over a given matrix product. `offset` moves the diagonal of the causal mask."""

    def scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
        found = product(_wide(q), _wide(k).transpose(-2, -1)) * (scale or 1 / math.sqrt(q.shape[-1]))
        if is_causal:
            rows, columns = found.shape[-2:]
            found = found.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(1 + offset(rows, columns)), -math.inf)
        if mask is not None:
            found = found.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else found + mask
        return found

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        found = scores(q, k, is_causal, attn_mask, scale)
        total = torch.logsumexp(found, -1)
        mixed = product(torch.exp(found - total.unsqueeze(-1)), _wide(v))
        return mixed.to(q.dtype), total

    def backward(
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        total: Tensor,
        dropout: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.exp(scores(q, k, is_causal, attn_mask, scale) - total.unsqueeze(-1))
        entering = _wide(gradient)
        of_weights = product(entering, _wide(v).transpose(-2, -1))
        inner = (entering * _wide(out)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - inner) * (scale or 1 / math.sqrt(q.shape[-1]))
        of_q, of_k = product(of_scores, _wide(k)), product(of_scores.transpose(-2, -1), _wide(q))
        return of_q.to(q.dtype), of_k.to(k.dtype), product(weights.transpose(-2, -1), entering).to(v.dtype)

    return {
        aten._scaled_dot_product_flash_attention_for_cpu.default: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: backward,
    }


def _reversed_sums() -> Kernels:
    def sum_dims(x: Tensor, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
        which = list(range(x.dim())) if not dims else list(dims)
        return aten.sum.dim_IntList(x.flip(which), dims, keepdim, dtype=dtype)

    def mean_dims(x: Tensor, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
        which = list(range(x.dim())) if not dims else list(dims)
        count = math.prod(x.shape[dim] for dim in which)
        return aten.sum.dim_IntList(x.flip(which), dims, keepdim, dtype=dtype) / count

    def sum_all(x: Tensor, *, dtype: Any = None) -> Any:
        return aten.sum.default(x.flatten().flip(0), dtype=dtype)

    return {aten.sum.dim_IntList: sum_dims, aten.mean.dim: mean_dims, aten.sum.default: sum_all}


# ---- elementwise functions and softmax -----------------------------------------------------------------------------------------------


def other_functions() -> Kernels:
    """Compute the same functions by other formulas: exp as a power of two, gelu by the complementary error function, softmax by both."""
    return {
        aten.exp.default: _exp,
        aten.sigmoid.default: _sigmoid,
        aten.silu.default: lambda x: x / (1 + _exp(-x)),
        aten.gelu.default: _gelu,
        aten._softmax.default: _softmax,
        aten._log_softmax.default: _log_softmax,
        aten._softmax_backward_data.default: _softmax_backward,
        aten.rsqrt.default: lambda x: 1 / torch.sqrt(x),
    }


def _wide(x: Tensor) -> Tensor:
    """Cast to the dtype that a kernel of a narrow dtype computes in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _exp(x: Tensor) -> Tensor:
    return torch.exp2(_wide(x) * math.log2(math.e)).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return (1 / (1 + _exp(-_wide(x)))).to(x.dtype)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate != "none":
        return aten.gelu.default(x, approximate=approximate)  # type: ignore[no-any-return]
    wide = _wide(x)
    return (0.5 * wide * torch.erfc(-wide * math.sqrt(0.5))).to(x.dtype)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x)
    powers = torch.exp2((wide - wide.amax(dim, keepdim=True)) * math.log2(math.e))
    return (powers * (1 / powers.sum(dim, keepdim=True))).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x)
    shifted = wide - wide.amax(dim, keepdim=True)
    total = torch.exp2(shifted * math.log2(math.e)).sum(dim, keepdim=True)
    return (shifted - torch.log2(total) * math.log(2)).to(torch.float32 if half_to_float else x.dtype)


def _softmax_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    wide, p = _wide(gradient), _wide(output)
    return (p * (wide - (wide * p).sum(dim, keepdim=True))).to(dtype)


# ---- norms ---------------------------------------------------------------------------------------------------------------------------


def own_norms() -> Kernels:
    """Compute layer, group and batch norm in two passes, forward and backward, with sums of this machine's own order."""
    return {
        aten.native_layer_norm.default: layer_norm,
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten.native_batch_norm.default: batch_norm,
        aten.native_batch_norm_backward.default: batch_norm_backward,
        aten.native_group_norm.default: group_norm,
    }


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide = _wide(x)
    mean = wide.mean(dims, keepdim=True)
    variance = (wide - mean).square().mean(dims, keepdim=True)
    inverse = 1 / torch.sqrt(variance + eps)
    result = (wide - mean) * inverse
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(x.dtype), mean, inverse


def layer_norm_backward(
    gradient: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    inner = list(range(x.dim() - len(shape), x.dim()))
    outer = list(range(x.dim() - len(shape)))
    wide, normal = _wide(gradient), (_wide(x) - mean) * inverse
    scaled = wide if weight is None else wide * weight
    of_x = inverse * (scaled - scaled.mean(inner, keepdim=True) - normal * (scaled * normal).mean(inner, keepdim=True))
    of_weight = (wide * normal).sum(outer) if outer else wide * normal
    of_bias = wide.sum(outer) if outer else wide
    return (
        of_x.to(x.dtype) if wanted[0] else None,
        of_weight.to(weight.dtype) if wanted[1] and weight is not None else None,
        of_bias.to(bias.dtype) if wanted[2] and bias is not None else None,
    )


def _channels(x: Tensor, of: Tensor) -> Tensor:
    """Reshape a value for each channel, so that it broadcasts over `of`."""
    return x.reshape(1, -1, *[1] * (of.dim() - 2))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = [0, *range(2, x.dim())]
    if training or running_mean is None or running_variance is None:
        mean = x.mean(dims)
        variance = (x - _channels(mean, x)).square().mean(dims)
        count = x.numel() // x.shape[1]
        if running_mean is not None and running_variance is not None:
            running_mean.mul_(1 - momentum).add_(mean * momentum)
            running_variance.mul_(1 - momentum).add_(variance * (momentum * count / max(count - 1, 1)))
    else:
        mean, variance = running_mean, running_variance
    inverse = 1 / torch.sqrt(variance + eps)
    result = (x - _channels(mean, x)) * _channels(inverse, x)
    if weight is not None:
        result = result * _channels(weight, x)
    if bias is not None:
        result = result + _channels(bias, x)
    return result, (mean if training else mean[:0]), (inverse if training else inverse[:0])


def batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    training: bool,
    eps: float,
    wanted: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not training:
        return aten.native_batch_norm_backward.default(  # type: ignore[no-any-return]
            gradient, x, weight, running_mean, running_variance, mean, inverse, training, eps, wanted
        )
    dims = [0, *range(2, x.dim())]
    normal = (x - _channels(mean, x)) * _channels(inverse, x)
    of_weight, of_bias = (gradient * normal).sum(dims), gradient.sum(dims)
    count = x.numel() // x.shape[1]
    inner = gradient - _channels(of_bias, x) / count - normal * (_channels(of_weight, x) / count)
    factor = inverse if weight is None else inverse * weight
    return (inner * _channels(factor, x) if wanted[0] else None, of_weight if wanted[1] else None, of_bias if wanted[2] else None)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, channels: int, inner: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = _wide(x).reshape(batch, groups, -1)
    mean = grouped.mean(-1)
    variance = (grouped - mean.unsqueeze(-1)).square().mean(-1)
    inverse = 1 / torch.sqrt(variance + eps)
    result = ((grouped - mean.unsqueeze(-1)) * inverse.unsqueeze(-1)).reshape(x.shape)
    if weight is not None:
        result = result * _channels(weight, x)
    if bias is not None:
        result = result + _channels(bias, x)
    return result.to(x.dtype), mean.to(x.dtype), inverse.to(x.dtype)
