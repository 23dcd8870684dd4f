# SPDX-License-Identifier: Apache-2.0
"""Find the function behind the recorded name of an operation.

A record is data from a file, so its names are not trusted: nothing is imported, and no attribute is followed by name alone. A name counts
only where it stands for arithmetic on tensors. That is a function that torch lets a tensor override and that lies in one of torch's modules
of arithmetic, or an ATen operation whose schema takes no text but the choices listed here (other text might be a path), or an operation
that other code has registered in this process and that takes no text at all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import torch
import torch.nn.functional
from torch.overrides import get_testing_overrides

from ulpscope._torch_private import OpOverload, OpOverloadPacket, functional_of_c, has_kernel, schemas_of_operator
from ulpscope.model import Level
from ulpscope.replay.calls.registered import REGISTERED
from ulpscope.replay.formulas.fused import formula_of
from ulpscope.replay.program import NotReplayable

__all__ = ["Function", "function_of", "writes_to_arguments"]

Function: TypeAlias = Callable[..., Any]

_OWNERS: dict[str, Any] = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.nn.init": torch.nn.init,
    "torch._C._nn": functional_of_c,
    "VF": torch,
}
_VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_NOT_CALLS = {
    "module": "the code of a module is not part of its record",
    "Function": "the code of an autograd.Function is not part of its record",
    "distributed": "a collective needs its other ranks",
    "optimizer": "an optimizer's step is replayed from its parameters and state",
    "state": "it is not a call",
}
_DEVICES = frozenset("cpu cuda npu xpu ipu mtia hpu mlu musa privateuseone".split())

# These make tensors from numbers, so no tensor can override them.
_CREATORS = frozenset(
    """
    arange as_tensor bartlett_window blackman_window eye fftfreq full full_like hamming_window hann_window kaiser_window linspace
    logspace new_full new_ones new_tensor new_zeros normal ones ones_like rand rand_like randint randint_like randn randn_like randperm
    range rfftfreq scalar_tensor tensor tril_indices triu_indices zeros zeros_like
    """.split()
)
_NOT_OVERRIDABLE = frozenset({"unflatten"})
_UNDEFINED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split())

# Operations that read memory or files, return something else than tensors, or work on the tensor object and not on its values.
_DENIED = frozenset(
    """
    __array__ __array_wrap__ __bool__ __complex__ __contains__ __deepcopy__ __dlpack__ __dlpack_device__ __float__ __format__ __index__
    __int__ __len__ __long__ __nonzero__ __reduce_ex__ __repr__ __reversed__ __setstate__ _assert_async _assert_scalar
    _assert_tensor_metadata _backward _clear_non_serializable_cached_data _cufft_clear_plan_cache _cufft_set_plan_cache_max_size
    _functional_assert_async _has_compatible_shallow_copy_type _index_put_impl_ _make_dep_token _print _resize_output _resize_output_
    _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate apply_ backward const_data_ptr
    cudnn_is_acceptable data data_ptr element_size from_file get_gradients is_pinned is_shared item map2_ map_ module_load numpy
    pin_memory record_stream register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad save set_ set_data share_memory_
    storage storage_offset storage_type sym_constrain_range sym_constrain_range_for_size tolist untyped_storage
    """.split()
)
# Internals that trust their arguments, and memory layouts that capture never keeps.
_DENIED_PATTERN = re.compile(
    r"_test_|_unsafe_(?!view$)|unsafe_(index|put|set)|nested|sparse|cslt|(?<!fake_)quantize(?!_per)|quantized|qparams|int[48]pack|4bit|philox"
    r"|batch_dim|_copy_from|pin_memory|storage|_debug|_foobar|_make_|_validate|_propagate|_lazy_clone|_assert|sym_constrain|cudnn_init"
    r"|_mkldnn_reshape|_sobol|_resize|_use_count|_philox|_fill_mem|_from_mask|_sync|functionalize"
)
# Torch's own namespaces but `aten` and `prims`: machinery, collectives, and kernels that trust how their arguments were packed.
_DENIED_NAMESPACES = frozenset(
    """
    _c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test c10d debug_mode_ops debugprims export fsdp inductor mkl
    mkldnn onednn prim profiler quantization quantized rngprims sparse static_runtime symm_mem tensorexpr torchbind_testing
    """.split()
)
# Parameters of ATen operations whose text is one of a few words.
_CHOICES = frozenset(
    """
    UPLO activation approximate driver equation indexing interpolation mode norm ord p pad_mode padding padding_side reduce rounding_mode
    side
    """.split()
)
# Overloads of ATen operations whose text is the name of a dimension, of which torch below 2.13 has many.
_NAMED_DIMENSIONS = re.compile(r"dimname|names|named", re.IGNORECASE)
_NO_ARITHMETIC = re.compile(r"Any|Dict|Future|Storage|Stream|__torch__")
_MODULES = frozenset(
    """
    torch torch._jit_internal torch._lobpcg torch._lowrank torch._tensor torch.functional torch.nn.functional torch.nn.init
    """.split()
)
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@functools.lru_cache(maxsize=8192)
def function_of(op: str, level: Level = "api") -> Function:
    """Return the function that a record of this operation and level is a call of.

    >>> function_of("functional.gelu") is torch.nn.functional.gelu
    True
    """
    head, _, name = op.rpartition(".")
    first = op.partition(".")[0]
    if op in REGISTERED:
        return REGISTERED[op]
    if first in _NOT_CALLS:
        raise NotReplayable(_NOT_CALLS[first])
    written_out = formula_of(op)
    if written_out is not None:
        return written_out
    if level == "op" or first == "aten":
        return _registered(op)
    if first == "ops":
        return _registered(op.partition(".")[2])
    if name in _UNDEFINED:
        raise NotReplayable("its result is memory as it was found")
    if head == "Tensor" and name in _VIEW_ATTRIBUTES:
        return functools.partial(_attribute, name)
    if head == "Tensor" and name in _DEVICES:
        return _on_another_device
    function = _named(head, name)
    if function is None:
        raise NotReplayable(f"'{op[:80]}' is none of torch's functions on tensors")
    return function


def writes_to_arguments(function: Function, op: str) -> bool:
    """Tell whether a call may write to its arguments, as far as its name or schema tells."""
    if isinstance(function, OpOverload):
        return function._schema.is_mutable
    if isinstance(function, OpOverloadPacket):
        return any(overload._schema.is_mutable for overload in _overloads(function))
    name = op.rpartition(".")[2]
    if name.startswith("__"):
        return name == "__setitem__" or bool(
            re.fullmatch(r"__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift|div)__", name)
        )
    return name.endswith("_") or name in ("batch_norm", "instance_norm", "embedding", "embedding_bag")


def _named(owner_name: str, name: str) -> Function | None:
    owner = _OWNERS.get(owner_name)
    if owner is None or not _is_allowed(name):
        return None
    function = getattr(owner, name, None) if owner is torch.Tensor else vars(owner).get(name)
    is_listed = _is_hashable(function) and function in _overridable()
    is_known = is_listed or name in _CREATORS or name in _NOT_OVERRIDABLE or (not isinstance(function, FunctionType) and _is_aten(name))
    is_functional = owner is torch.nn.functional and isinstance(function, FunctionType) and function.__module__ == owner.__name__
    is_public = is_functional and not name.startswith("_") and name != "assert_int_or_pair"
    if not callable(function) or isinstance(function, type) or not (is_known or is_public):
        return None
    return function if _is_from_arithmetic(function, name) else None


def _is_from_arithmetic(function: Any, name: str) -> bool:
    """Tell whether a Python function lies in a module of arithmetic, or a C++ function takes no text that might be a path."""
    if isinstance(function, FunctionType):
        return function.__module__ in _MODULES
    return all(_is_arithmetic(packet, _CHOICES) for packet in _packets(name))


def _is_allowed(name: str) -> bool:
    return name not in _DENIED and not _DENIED_PATTERN.search(name) and _IDENTIFIER.fullmatch(name) is not None


def _is_hashable(value: Any) -> bool:
    return isinstance(value, (FunctionType, BuiltinFunctionType)) or type(value).__name__ in ("method_descriptor", "wrapper_descriptor")


@functools.cache
def _overridable() -> frozenset[Any]:
    return frozenset(get_testing_overrides())


def _is_aten(name: str) -> bool:
    """Tell whether an ATen operation of this name has a kernel."""
    return any(map(_has_kernel, _packets(name)))


def _packets(name: str) -> list[OpOverloadPacket]:
    """Find the ATen operations of this name; some names stand for ATen functions behind a prefix."""
    found = (_packet("aten", each) for each in (name, f"linalg_{name}"))
    return [packet for packet in found if packet is not None]


def _packet(namespace: str, name: str) -> OpOverloadPacket | None:
    """Find an operation that the dispatcher knows.

    The schema lookup comes first, since `torch.ops` creates an entry for any name that it is asked for.
    """
    if not schemas_of_operator(f"{namespace}::{name}"):
        return None
    found = getattr(getattr(torch.ops, namespace), name, None)
    return found if isinstance(found, OpOverloadPacket) else None


def _has_kernel(packet: OpOverloadPacket) -> bool:
    return any(map(_is_dispatched, _overloads(packet)))


def _is_dispatched(overload: OpOverload) -> bool:
    """Tell whether the overload works on tensors: TorchScript knows others of the same name, on numbers, text and lists."""
    return bool(has_kernel(overload._name))


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]


def _registered(name: str) -> Function:
    """Find an operation of the dispatcher: `aten.mm.default`, `aten.add.Tensor`, `mylib.foo`."""
    parts = name.split(".")
    if len(parts) not in (2, 3) or not all(_IDENTIFIER.fullmatch(part) for part in parts) or parts[0].startswith("__"):
        raise NotReplayable(f"'{name[:80]}' is no name of an operation")
    namespace, short = parts[:2]
    if short in _UNDEFINED:
        raise NotReplayable("its result is memory as it was found")
    packet = _packet(namespace, short) if namespace not in _DENIED_NAMESPACES else None
    if packet is None or not _is_allowed(short) or not _has_kernel(packet):
        raise NotReplayable(f"the operation '{name[:80]}' is not registered here, or is not arithmetic")
    function = packet if len(parts) == 2 else getattr(packet, parts[2], None)
    if not isinstance(function, (OpOverload, OpOverloadPacket)):
        raise NotReplayable(f"the operation '{name[:80]}' is not registered here")
    if not _is_arithmetic(function, _CHOICES if namespace == "aten" else frozenset()):
        raise NotReplayable(f"the operation '{name[:80]}' takes more than tensors and numbers")
    return function


def _is_arithmetic(function: Any, choices: frozenset[str]) -> bool:
    """Tell whether every overload is arithmetic: it takes only tensors, numbers and the text in `choices`, or makes a tensor of numbers."""
    overloads = [function] if isinstance(function, OpOverload) else _overloads(function)
    for overload in filter(_is_dispatched, overloads):
        if choices and _NAMED_DIMENSIONS.search(overload._overloadname):
            continue
        taken, made = ([str(value.type) for value in values] for values in (overload._schema.arguments, overload._schema.returns))
        texts = [argument.name for argument in overload._schema.arguments if "str" in str(argument.type)]
        if not choices.issuperset(texts) or any(map(_NO_ARITHMETIC.search, (*taken, *made))):
            return False
        if not any("Tensor" in kind for kind in (taken if not choices else (*taken, *made))):
            return False
    return True


def _attribute(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, name)  # type: ignore[no-any-return]


def _on_another_device(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Replay a move to another device: the values stay, and a replay has only one device."""
    return tensor.view_as(tensor)
