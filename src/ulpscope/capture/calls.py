# SPDX-License-Identifier: Apache-2.0
"""What a function of torch is called in a record, and whether calling it is worth a record."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch.overrides import resolve_name

__all__ = ["caller", "is_own_business", "makes_no_values", "op_name", "writes_silently", "written_arguments"]

_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})

_NAMESPACES = (
    ("torch.nn.functional.", "functional."),
    ("torch.functional.", "torch."),
    ("torch.Tensor.", "Tensor."),
    ("torch.distributed.", "distributed."),
)

# These read or set facts about a tensor, or leave torch; no arithmetic happens in them.
_NOT_ARITHMETIC = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous is_floating_point is_complex is_signed is_same_size is_set_to
    data_ptr element_size untyped_storage storage storage_type get_device requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook backward __len__ __repr__ __str__ __format__ __hash__ __reduce_ex__ __reduce__ __setstate__
    __deepcopy__ __dir__ __bool__ __float__ __int__ __index__ __complex__ __iter__ item tolist numpy __array__ __array_wrap__ is_nonzero
    has_names rename_ is_inference is_conj is_neg is_shared share_memory_ is_pinned __dlpack__ __dlpack_device__ is_storage is_tensor
    get_default_dtype result_type can_cast promote_types broadcast_shapes _make_subclass _is_view dense_dim sparse_dim qscheme is_coalesced
    set_grad_enabled _set_grad_enabled record_stream module_load _is_zerotensor
    """.split()
)

# What these modules call is how they do their work, not what the user's model computes.
_INTERNAL_CALLERS = (
    "torch.optim",
    "torch.distributed",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.amp",
    "torch.cuda.amp",
    "torch.autograd",
    "torch.random",
    "torch.serialization",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch._higher_order_ops",
)
# Python wrappers that stand between the caller and the function.
_TRANSPARENT = frozenset(
    {
        "torch._tensor",
        "torch.overrides",
        "torch.functional",
        "torch.nn.functional",
        "torch.utils._contextlib",
        "torch._jit_internal",
        "torch._ops",
        "ulpscope.capture.patching",
        "ulpscope.capture.session",
    }
)


@functools.lru_cache(maxsize=8192)
def op_name(func: Any) -> str | None:
    """`functional.gelu`, `Tensor.add_`, `torch.matmul`, `ops.mylib.foo`; None where a call is not worth a record.

    >>> op_name(torch.nn.functional.gelu)
    'functional.gelu'
    """
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(func).removesuffix(".default")
        return name if name.startswith("aten.") else f"ops.{name}"
    name = _full_name(func)
    short = name.rpartition(".")[2]
    if short in ("__get__", "__set__", "__delete__"):
        attribute = name.split(".")[-2]
        return f"Tensor.{attribute}" if short == "__get__" and attribute in _VIEW_ATTRIBUTES else None
    if short in _NOT_ARITHMETIC:
        return None
    for prefix, ours in _NAMESPACES:
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return name


def _full_name(func: Any) -> str:
    own = getattr(func, "__name__", type(func).__name__)
    if getattr(torch, own, None) is func:  # a function may have several names: torch.spmm is torch.mm
        return f"torch.{own}"
    return resolve_name(func) or f"{getattr(func, '__module__', None) or 'unknown'}.{own}"


@functools.lru_cache(maxsize=8192)
def written_arguments(func: Any) -> frozenset[int | str]:
    """Positions and names of the arguments that an ATen operation writes to; below autograd no version tells."""
    arguments = func._schema.arguments
    written = [(position, argument.name) for position, argument in enumerate(arguments) if argument.is_write]
    return frozenset(key for pair in written for key in pair)


@functools.lru_cache(maxsize=8192)
def writes_silently(op: str) -> bool:
    """Whether a call writes to its first argument without always raising its version: unscaling, and lists of tensors in place."""
    name = op.rpartition(".")[2]
    return name.endswith("_") and name.startswith(("_foreach_", "_amp_foreach_", "_fused_"))


@functools.lru_cache(maxsize=8192)
def makes_no_values(op: str) -> bool:
    """Whether the result is memory as it was found: torch.empty and its kin."""
    return any(
        part in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided") for part in op.split(".")
    )


def is_own_business(frame: FrameType | None) -> bool:
    """Whether the call comes from inside an optimizer, a wrapper for parallel training and the like."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in _TRANSPARENT:
            return _is_internal(module)
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=8192)
def _is_internal(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _INTERNAL_CALLERS)


def caller(depth: int) -> FrameType:
    """The frame `depth` levels above the function that asks."""
    return sys._getframe(depth + 1)
