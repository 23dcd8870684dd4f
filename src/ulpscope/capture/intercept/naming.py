# SPDX-License-Identifier: Apache-2.0
"""Name a function of torch as records do, and decide whether a call of it is worth a record."""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import resolve_name

from ulpscope._torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket
from ulpscope.recording.stand_ins import stands_in

__all__ = [
    "business_of",
    "caller",
    "communicates",
    "higher_order_name",
    "is_own_business",
    "leaves_unwritten",
    "lends_memory",
    "makes_no_values",
    "may_grow",
    "may_write",
    "never_writes",
    "op_name",
    "silently_written",
    "writes_by_name",
    "writes_lists",
    "writes_silently",
    "written_arguments",
]

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

# Calls from these modules are how they do their work, not what the user's model computes.
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
# But calls from these count: nothing else shows what they do to tensors of the user's.
_USERS_CALLERS = ("torch.optim.swa_utils",)
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
        "torch._library.custom_ops",
        "ulpscope.capture.lifecycle",
        "ulpscope.capture.intercept.patching",
        "ulpscope.capture.session",
    }
)


@functools.lru_cache(maxsize=8192)
def op_name(func: Any) -> str | None:
    """Return the name of a function in records: `functional.gelu`, `Tensor.add_`, `torch.matmul`, `ops.mylib.foo`; None if a call is not
    worth a record.

    >>> op_name(torch.nn.functional.gelu)
    'functional.gelu'
    """
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        name = str(func).removesuffix(".default")
        return name if name.startswith("aten.") else f"ops.{name}"
    if isinstance(func, HigherOrderOperator):  # recorded where torch runs it, which is not always where a mode sees it
        return None
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


def higher_order_name(operator: Any) -> str:
    """Return the name of a call of a higher-order operator (`torch.cond`, `flex_attention`): `higher_order.cond`."""
    return f"higher_order.{operator.name()}"


def _full_name(func: Any) -> str:
    own = getattr(func, "__name__", type(func).__name__)
    if getattr(torch, own, None) is func:  # a function may have several names: torch.spmm is torch.mm
        return f"torch.{own}"
    return resolve_name(func) or f"{getattr(func, '__module__', None) or 'unknown'}.{own}"


@functools.lru_cache(maxsize=8192)
def written_arguments(func: Any) -> frozenset[int | str]:
    """Return positions and names of the arguments that an ATen operation writes to; below autograd no version shows a write."""
    arguments = func._schema.arguments
    written = [(position, argument.name) for position, argument in enumerate(arguments) if _is_written(argument)]
    return frozenset(key for pair in written for key in pair)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@functools.lru_cache(maxsize=8192)
def writes_silently(op: str) -> bool:
    """Tell whether a call may write to arguments without always raising their version: see `silently_written`."""
    return _unannounced(op) is not None or writes_lists(op)


@functools.lru_cache(maxsize=8192)
def writes_lists(op: str) -> bool:
    """Tell whether a call is unscaling, or works on lists of tensors in place."""
    name = op.rpartition(".")[2]
    return name.endswith("_") and name.startswith(("_foreach_", "_amp_foreach_", "_fused_"))


_NOTHING: frozenset[int | str] = frozenset()
_FIRST: frozenset[int | str] = frozenset({0})
_RUNNING = ("running_mean", "running_var")
_SWITCHES = {"training": False, "use_input_stats": True}
"""Arguments that decide whether running statistics are written, with their defaults."""


@dataclass(frozen=True, slots=True)
class _Unannounced:
    """Arguments that a call writes to without raising their version, and the argument (if any) that has to be true for that."""

    written: frozenset[int | str]
    switch: str | None = None
    switch_place: int = 0


_NORMALISATIONS_IN_PYTHON = {
    "functional.batch_norm": _Unannounced(frozenset({1, 2, *_RUNNING}), "training", 5),
    "functional.instance_norm": _Unannounced(frozenset({1, 2, *_RUNNING}), "use_input_stats", 5),
}
"""No schema describes these two."""


@functools.lru_cache(maxsize=8192)
def _unannounced(op: str) -> _Unannounced | None:
    """Read the schema of an operation for arguments that it writes to although its name has no trailing underscore.

    torch does not raise their version. Of running statistics most schemas do not even say that they are written.
    """
    if op in _NORMALISATIONS_IN_PYTHON:
        return _NORMALISATIONS_IN_PYTHON[op]
    namespace, _, rest = op.removeprefix("ops.").partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, name, None) if namespace in ("torch", "aten") and not name.startswith("__") else None
    if packet is None or name.endswith(("_", "_no_training", "_no_update", "_functional")) or "backward" in name:
        return None
    schema = getattr(packet, overload or packet.overloads()[0])._schema
    written: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        if (_is_written(argument) and not argument.is_out) or argument.name in _RUNNING:
            written |= {place, argument.name}
    if not written:
        return None
    names = [argument.name for argument in schema.arguments]
    switch = next((each for each in _SWITCHES if each in names), None)
    return _Unannounced(frozenset(written), switch, names.index(switch) if switch else 0)


def silently_written(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int | str]:
    """Name the arguments that such a call writes to, by place and by name."""
    known = _unannounced(op)
    if known is None:
        return _FIRST if writes_lists(op) else _NOTHING
    if known.switch is None:
        return known.written
    is_on = kwargs.get(known.switch, args[known.switch_place] if len(args) > known.switch_place else _SWITCHES[known.switch])
    return known.written if is_on else _NOTHING


@functools.lru_cache(maxsize=8192)
def makes_no_values(op: str) -> bool:
    """Tell whether the result is memory as it was found: torch.empty and its kin."""
    return any(
        part in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided") for part in op.split(".")
    )


@functools.lru_cache(maxsize=8192)
def communicates(op: str) -> bool:
    """Tell whether a program called a functional collective by its operation: it returns before its result is there."""
    return op.startswith(("ops._c10d_functional", "ops.c10d_functional"))


def may_grow(op: str) -> bool:
    """Tell whether a call may give a tensor more memory, which is not written yet."""
    return op.split(".")[1:2] in (["resize_"], ["resize_as_"])


def leaves_unwritten(op: str) -> bool:
    """Tell whether a call may leave memory unwritten that did not exist before."""
    return makes_no_values(op) or may_grow(op)


def writes_by_name(op: str, path: tuple[int | str, ...]) -> bool:
    """Tell from its name whether a call writes to the tensor at that place; used for tensors without a version."""
    name = op.split(".")[1] if op.startswith("aten.") else op.rpartition(".")[2]
    return path[0] == "out" or (path[0] in (0, "tensor") and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))))


_LENDING = frozenset("data_ptr numpy __array__ __dlpack__ untyped_storage storage share_memory_ set_".split())


@functools.lru_cache(maxsize=8192)
def lends_memory(func: Any) -> bool:
    """Tell whether a function hands out the memory of a tensor, so that somebody may write to it unseen."""
    return getattr(func, "__name__", "") in _LENDING


# No schema describes these, or theirs is wrong: running statistics are written by functions that seem to write nothing.
_WRITE_NOTHING = frozenset(
    """
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __matmul__ __rmatmul__ __pow__ __rpow__
    __neg__ __abs__ __mod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __getitem__ __pos__ __contains__
    __rmod__ cross_entropy mse_loss l1_loss nll_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div softmax
    log_softmax softmin normalize pad interpolate one_hot glu unfold fold cosine_similarity pairwise_distance tensor as_tensor from_numpy
    float half bfloat16 double int long bool cpu cuda to type type_as T mT H mH real imag
    """.split()
)
_MAY_WRITE = ("batch_norm", "instance_norm", "renorm", "_fused_", "_foreach_")
_LAST_HARMLESS = {"embedding": 3, "embedding_bag": 3}
"""Functions that write if the argument at that place, or the one called max_norm, is given."""


def may_write(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call may write to memory that it is given. An unknown call may."""
    known = _writes(op)
    if known is True or (kwargs and ("out" in kwargs or kwargs.get("inplace") or kwargs.get("max_norm") is not None)):
        return True
    return known is not False and len(args) > known and bool(args[known])


def never_writes(op: str) -> bool:
    """Tell whether no call of that name writes to memory that it is given, unless a keyword argument says so."""
    return _writes(op) is False


@functools.lru_cache(maxsize=8192)
def _writes(op: str) -> bool | int:
    """Return True, False, or the place of the argument that decides."""
    namespace, _, name = op.rpartition(".")
    if namespace.startswith("aten"):  # an operation with its overload: aten.add.Tensor
        return True
    if namespace not in ("torch", "Tensor", "functional") or any(part in name for part in _MAY_WRITE):
        return True
    if namespace == "functional":
        if name in _LAST_HARMLESS:
            return _LAST_HARMLESS[name]
        function = getattr(torch.nn.functional, name, None)
        try:
            parameters = list(inspect.signature(function).parameters) if function is not None else []
        except (TypeError, ValueError):  # written in C++
            parameters = []
        if "inplace" in parameters:
            return parameters.index("inplace")
    if name in _WRITE_NOTHING:
        return False
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("__") else None
    if packet is None:
        return True
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(schema.is_mutable and not any(argument.is_out for argument in schema.arguments) for schema in schemas)


def is_own_business(frame: FrameType | None) -> bool:
    """Tell whether the call comes from inside an optimizer, a wrapper for parallel training and the like."""
    while frame is not None:
        business = business_of(frame)
        if business is not None:
            return business
        frame = frame.f_back
    return False


def business_of(frame: FrameType) -> bool | None:
    """Tell whether a frame is torch's own business; None if it stands in between, and its caller decides."""
    module = frame.f_globals.get("__name__", "")
    return None if module in _TRANSPARENT or stands_in(frame.f_code) else _is_internal(module)


@functools.lru_cache(maxsize=8192)
def _is_internal(module: str) -> bool:
    return module not in _USERS_CALLERS and any(module == name or module.startswith(name + ".") for name in _INTERNAL_CALLERS)


def caller(depth: int) -> FrameType:
    """Return the frame `depth` levels above the calling function."""
    return sys._getframe(depth + 1)
