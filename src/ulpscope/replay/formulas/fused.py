# SPDX-License-Identifier: Apache-2.0
"""Compute fused and vendor operations by their formulas, since the CPU has no kernel for them.

A formula computes as such kernels do: low precision is widened to float32 inside and rounded once, at the end. An argument that the formula
does not cover raises NotReplayable; a wrong formula would blame a sound kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ulpscope.replay.formulas.vendor import VENDOR_FORMULAS, WITHOUT_FORMULA
from ulpscope.replay.program import NotReplayable

__all__ = ["formula_of"]

_VENDOR_PREFIXES = ("torch_npu.", "ops.npu.", "npu.")
_NO_LIMIT = 2**31 - 65536  # the vendor's defaults for "no limit" lie just below 2**31


def formula_of(op: str) -> Callable[..., Any] | None:
    """Return the formula of an operation; None where its own kernel is used. Raise NotReplayable for a vendor's without one.

    >>> formula_of("ops.npu.npu_swiglu.default") is formula_of("torch_npu.npu_swiglu")
    True
    """
    name = op.removesuffix(".default")
    if name in _ATEN:
        return _ATEN[name]
    prefix = next((prefix for prefix in _VENDOR_PREFIXES if name.startswith(prefix)), None)
    if prefix is None:
        return None
    short = name.removeprefix(prefix)
    if short in WITHOUT_FORMULA:
        raise NotReplayable(f"it is a vendor's operation without a formula: {WITHOUT_FORMULA[short]}")
    return _VENDOR.get(short)


def _inner(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _fast_gelu(x: Tensor) -> Tensor:
    inner = _inner(x)
    return (inner * torch.sigmoid(1.702 * inner)).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return F.silu(_inner(x)).to(x.dtype)


def _mish(x: Tensor) -> Tensor:
    return F.mish(_inner(x)).to(x.dtype)


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, value = _inner(x).chunk(2, dim)
    return (F.silu(gate) * value).to(x.dtype)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inner = _inner(x)
    rstd = torch.rsqrt(inner.square().mean(dims, keepdim=True) + epsilon)
    return (inner * rstd * _inner(gamma)).to(x.dtype), rstd


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = (_inner(x1) + _inner(x2)).to(x1.dtype)
    return (*_rms_norm(total, gamma, epsilon), total)


def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half") -> Tensor:
    inner = _inner(x)
    if rotary_mode == "half":
        first, second = inner.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    elif rotary_mode == "interleave":
        turned = torch.stack((-inner[..., 1::2], inner[..., 0::2]), -1).flatten(-2)
    else:
        raise NotReplayable(f"the rotary mode {rotary_mode!r} has no formula here")
    return (inner * _inner(cos) + turned * _inner(sin)).to(x.dtype)


def _confusion_transpose(x: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    return x.permute(*perm).reshape(shape) if transpose_first else x.reshape(shape).permute(*perm)


def _transpose(x: Tensor, perm: list[int], require_contiguous: bool = True) -> Tensor:
    return x.permute(*perm)


def _broadcast(x: Tensor, size: list[int]) -> Tensor:
    return x.expand(size)


def _dtype_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _format_cast(x: Tensor, *_: Any) -> Tensor:
    return x.view_as(x)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def _bmm(x: Tensor, y: Tensor, output_sizes: list[int]) -> Tensor:
    product = torch.matmul(x, y)
    return product.reshape(output_sizes) if output_sizes else product


def _layer_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def _scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return (_inner(x) * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


def _heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """Reorder any layout to batch, head, position, width."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
    if layout == "SBH":
        return x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)
    raise NotReplayable(f"attention in the layout {layout!r} has no formula here")


def _heads_back(x: Tensor, layout: str) -> Tensor:
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    if layout == "SBH":
        return x.permute(2, 0, 1, 3).flatten(2)
    return x


def _hidden(rows: int, columns: int, before: int, after: int, device: torch.device) -> Tensor:
    """Mark positions more than `before` in the past or more than `after` in the future."""
    distance = torch.arange(columns, device=device) - torch.arange(rows, device=device).unsqueeze(1)
    return (distance > after) | (distance < -before)


def _vendor_mask(mask: Tensor | None, sparse_mode: int, rows: int, columns: int, before: int, after: int) -> Tensor | None:
    if sparse_mode in (0, 1) and mask is None:
        return None
    device = torch.device("cpu") if mask is None else mask.device
    if sparse_mode == 1 and mask is not None:
        return mask.bool()
    if sparse_mode == 0 and mask is not None:
        if before >= _NO_LIMIT and after >= _NO_LIMIT:
            return mask.bool()
        if rows == columns:
            return mask.bool() | _hidden(rows, columns, before, after, device)
    if sparse_mode == 2:
        return _hidden(rows, columns, _NO_LIMIT, 0, device)
    if sparse_mode == 3:
        return _hidden(rows, columns, _NO_LIMIT, columns - rows, device)
    raise NotReplayable(f"attention in the sparse mode {sparse_mode} has no formula here")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, bias: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition, and the logarithm of each row's sum."""
    query, key, value = _inner(q), _inner(k), _inner(v)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden.expand_as(weights).all(-1, keepdim=True), 0.0)
    return (F.dropout(weights, dropout) @ value).to(q.dtype), scores.logsumexp(-1)


def _fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2**31 - 1,
    next_tockens: int = 2**31 - 1,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    **more: Any,
) -> tuple[Tensor]:
    if any(each is not None for each in (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, *more.values())):
        raise NotReplayable("attention with a position bias, a prefix or packed sequences has no formula here")
    width = query.shape[-1] if input_layout in ("BNSD", "BSND") else query.shape[-1] // head_num
    key_heads = head_num if input_layout in ("BNSD", "BSND") else key.shape[-1] // width
    q = _heads_first(query, input_layout, head_num)
    k, v = (_heads_first(each, input_layout, key_heads) for each in (key, value))
    hidden = _vendor_mask(atten_mask, sparse_mode, q.shape[2], k.shape[2], pre_tockens, next_tockens)
    out, _ = _attend(q, k, v, scale, hidden, None, 1.0 - keep_prob)
    return (_heads_back(out, input_layout),)


def _prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = 2**31 - 10001,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    **more: Any,
) -> Tensor:
    if any(each is not None for each in (pse_shift, padding_mask, *more.values())) or query.dtype == torch.int8:
        raise NotReplayable("attention with a position bias, quantization or packed sequences has no formula here")
    key_heads = num_key_value_heads or num_heads
    q = _heads_first(query, input_layout, num_heads)
    k, v = (_heads_first(each, input_layout, key_heads) for each in (key, value))
    hidden = _vendor_mask(atten_mask, sparse_mode, q.shape[2], k.shape[2], pre_tokens, next_tokens)
    return _heads_back(_attend(q, k, v, scale_value, hidden, None, 0.0)[0], input_layout)


def _causal(q: Tensor, k: Tensor, is_causal: bool) -> Tensor | None:
    return _hidden(q.shape[-2], k.shape[-2], _NO_LIMIT, 0, q.device) if is_causal else None


def _default_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, _default_scale(q, scale), _causal(q, k, is_causal), None, dropout_p)


def _biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor]:
    """Compute attention with a bias; the logarithm of the sums is not returned, since some kernels pad it."""
    return _attend(q, k, v, _default_scale(q, scale), _causal(q, k, is_causal), attn_bias, dropout_p)[:1]


_VENDOR: dict[str, Callable[..., Any]] = {
    **VENDOR_FORMULAS,
    "fast_gelu": _fast_gelu,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_bmmV2": _bmm,
    "npu_broadcast": _broadcast,
    "npu_confusion_transpose": _confusion_transpose,
    "npu_dtype_cast": _dtype_cast,
    "npu_fast_gelu": _fast_gelu,
    "npu_format_cast": _format_cast,
    "npu_flash_attention": _fusion_attention,
    "npu_fusion_attention": _fusion_attention,
    "npu_layer_norm_eval": _layer_norm,
    "npu_linear": _linear,
    "npu_mish": _mish,
    "npu_prompt_flash_attention": _prompt_flash_attention,
    "npu_rms_norm": _rms_norm,
    "npu_rotary_mul": _rotary_mul,
    "npu_scaled_masked_softmax": _scaled_masked_softmax,
    "npu_silu": _silu,
    "npu_swiglu": _swiglu,
    "npu_transpose": _transpose,
}
_ATEN: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_cudnn_attention": _biased_attention,
    "aten._scaled_dot_product_efficient_attention": _biased_attention,
    "aten._scaled_dot_product_flash_attention": _flash_attention,
}
