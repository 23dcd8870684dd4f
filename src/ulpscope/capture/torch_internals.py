# SPDX-License-Identifier: Apache-2.0
"""Ask torch for what its public functions do not tell; the private names that this needs are those of `_torch_private`.

`tests/capture/test_torch_internals.py` has a test for each, which says what breaks when it goes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch

from ulpscope import _torch_private as private
from ulpscope._torch_private import (
    TRANSFORMS,
    DisableAutocast,
    DisableFuncTorch,
    TensorBase,
    TorchDispatchMode,
    disable_current_modes,
    is_functorch_wrapped,
    is_zero_by_definition,
    pop_dispatch_mode,
    push_dispatch_mode,
    set_grad_enabled,
    tls_includes,
    without_function_modes,
)

__all__ = [
    "ACCUMULATE_GRAD",
    "CAST",
    "COMPILER",
    "FUSED_MODULES",
    "Foreign",
    "Quiet",
    "asynchronous_memory",
    "blind",
    "current_node",
    "current_stream",
    "dense_values",
    "detached",
    "device_of",
    "foreign_facts",
    "free_weak_reference",
    "graph_task",
    "has_dispatch_modes",
    "inside_transform",
    "is_coalescing",
    "is_fake",
    "is_foreign",
    "is_gone",
    "is_jit_tracing",
    "is_stream_capturing",
    "is_traced",
    "is_tracing_graph",
    "is_tracing_program",
    "is_work_registered",
    "is_zero_by_definition",
    "keep_from_compiler",
    "next_sequence_number",
    "not_compiled",
    "saved_tensors",
    "sequence_number",
    "set_grad_enabled",
    "storage_identity",
    "weak_reference",
    "without_class",
    "without_function_modes",
    "work_of",
]

ACCUMULATE_GRAD = 2**64 - 1
"""The sequence number of nodes that add into a leaf: larger than any range, so a walk stops there by itself."""

CAST = "ToCopyBackward0"
"""The name of the node behind a cast to another dtype. Autocast makes one for each weight and hands its result to every later call."""

COMPILER = vars(torch.compiler)
"""The names of torch.compiler. `_is_compiling_flag` is the answer of its `is_compiling` outside of the compiler's own tracing, without two
calls of Python: an export that runs the program itself sets it.
"""

FUSED_MODULES = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)
"""Modules that use a fused kernel in evaluation, and give it up when any torch function mode is active."""


def next_sequence_number() -> int:
    """Return the number that the next autograd node of this thread gets: it ties backward nodes to the call that made them."""
    return int(private.sequence_number())


def sequence_number(node: Any) -> int:
    return int(node._sequence_nr())


def graph_task() -> int:
    """Return the running backward pass on this thread, or -1."""
    return int(private.current_graph_task())


def current_node() -> Any:
    """Return the autograd node that is being run on this thread, or None."""
    return private.current_node()


def storage_identity(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage object; unique only while somebody keeps that object (see `StorageWeakRef`)."""
    return int(tensor.untyped_storage()._cdata)


_num_dispatch_modes = private.num_dispatch_modes
_storages: Any = torch.UntypedStorage


def weak_reference(tensor: torch.Tensor) -> int:
    """Keep the address of a tensor's storage object from being reused, until `free_weak_reference` is given the address that this
    returns.
    """
    reference: Any = tensor.untyped_storage()._weak_ref()  # a number, whatever its annotation says
    return int(reference)


free_weak_reference = _storages._free_weak_ref
is_gone = _storages._expired


def current_stream(device: torch.device) -> int:
    """Return the CUDA stream on which torch launches right now on this thread."""
    return int(private.current_stream(device.index))


def is_stream_capturing() -> bool:
    """Tell whether a launch now becomes part of a CUDA graph of the user's."""
    return bool(private.is_stream_capturing())


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same storage and version, made unseen. A transform would wrap it into something without memory."""
    if not _num_dispatch_modes() and not inside_transform():
        return tensor.detach()
    with blind():
        return tensor.detach()


def inside_transform() -> bool:
    """Tell whether a torch.func transform (vmap, grad ...) is active: its tensors have no memory to look at."""
    return bool(tls_includes(TRANSFORMS))  # functorch itself would make a state for this thread, which every later backward pass copies


def is_traced(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor belongs to a transform or a tracer and has no values of its own."""
    return bool(is_functorch_wrapped(tensor)) or private.is_functional_tensor(tensor) or isinstance(tensor, private.FunctionalTensor)


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the dense tensor that a sparse one stands for to the CPU; a RuntimeError says that its indices point outside of its shape."""
    with blind():
        plain = tensor.detach().cpu()
        if plain.layout is torch.sparse_coo:
            plain = torch.sparse_coo_tensor(
                plain._indices(), plain._values(), plain.shape, is_coalesced=plain.is_coalesced(), check_invariants=True
            )
        elif plain.layout in (torch.sparse_csr, torch.sparse_bsr):
            plain = torch.sparse_compressed_tensor(
                plain.crow_indices(), plain.col_indices(), plain.values(), plain.shape, layout=plain.layout, check_invariants=True
            )
        elif plain.layout in (torch.sparse_csc, torch.sparse_bsc):
            plain = torch.sparse_compressed_tensor(
                plain.ccol_indices(), plain.row_indices(), plain.values(), plain.shape, layout=plain.layout, check_invariants=True
            )
        return plain.to_dense().contiguous()


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has a shape and no values: the compiler's stand-ins."""
    return isinstance(tensor, private.FakeTensor)


def asynchronous_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """Return the memory of a functional collective's result, and whether somebody has waited for it; None for any other tensor."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return None
    result: Any = tensor
    return result.elem, result.completed


def is_work_registered() -> bool:
    """Tell whether a functional collective is under way: torch knows of each until somebody waits for it."""
    return private.num_collectives_under_way() > 0


def is_coalescing(group: Any) -> bool:
    """Tell whether collectives of a group are being collected, and none of them is sent off yet."""
    return (group or torch.distributed.group.WORLD) in private.collected_by_group()


def work_of(script: Any) -> Any:
    """Return the handle that Python gets for the result of an operation below Python."""
    return torch.distributed.Work.unbox(script)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_OURS_TO_ASK = frozenset(
    "FakeTensor DTensor NestedTensor AsyncCollectiveTensor FunctionalTensor UninitializedParameter UninitializedBuffer".split()
)
"""Tensor classes of torch's own whose code changes nothing and concerns nobody."""


@functools.lru_cache(maxsize=1024)
def _is_foreign_kind(kind: type) -> bool:
    return kind not in _PLAIN and not (kind.__name__ in _OURS_TO_ASK and kind.__module__.startswith("torch."))


def _is_of_device(tensor: torch.Tensor, kind: type) -> bool:
    """Tell whether a device written in Python makes all its tensors of that class: it stands for memory, as plain tensors do elsewhere."""
    keys, key = private.dispatch_keys, private.key_of_spare_device
    is_there = keys is not None and key is not None and bool(keys(tensor).has(key))
    return is_there and kind is _class_of_device(private.spare_device())


@functools.lru_cache(maxsize=8)
def _class_of_device(name: str) -> type:
    with blind():
        return type(torch.empty(0, device=name))


def is_foreign(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of a class that may count, draw or refuse in its `__torch_dispatch__`: we run none of its code."""
    kind = type(tensor)
    return kind not in _PLAIN and _is_foreign_kind(kind) and not _is_of_device(tensor, kind)


class Foreign(NamedTuple):
    """The facts of a tensor without its foreign class. `alias` is the same memory, None if it has none to look at. `shape` is None if only
    the class knows it.
    """

    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    device: torch.device | None
    alias: torch.Tensor | None


class _Asked(Exception):
    """Raised when a question about a tensor has reached the code of its class."""


class _NobodyAsks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands before every class of tensors: a question that one of them would answer raises `_Asked`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Asked


_NOBODY_ASKS = _NobodyAsks()  # type: ignore[no-untyped-call]
_Base: Any = TensorBase


def foreign_facts(tensor: torch.Tensor) -> Foreign:
    """Look at a tensor past its class; facts that only the class knows, and memory that it does not have, are None."""
    shape = strides = device = storage = None
    offset = size = 0
    if not private.tls_excludes(private.key_of_python):  # there nobody stands before the class
        with without_function_modes():
            push_dispatch_mode(_NOBODY_ASKS)
            try:
                device = _Base.device.__get__(tensor)
                shape = _whole_numbers(_Base.shape.__get__(tensor))
                if _Base.layout.__get__(tensor) is torch.strided:
                    strides = _whole_numbers(_Base.stride(tensor))
                    offset, size, storage = _Base.storage_offset(tensor), _Base.element_size(tensor), _Base.untyped_storage(tensor)
            except (_Asked, RuntimeError, NotImplementedError):
                pass
            finally:
                pop_dispatch_mode(None)
    if shape is None or strides is None or device is None or storage is None:
        return Foreign(shape, strides, device, None)
    end = 0 if 0 in shape else offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    is_there = _has_memory(storage, end * size)
    return Foreign(shape, strides, device, _alias(tensor, shape, strides, offset, storage) if is_there else None)


def _has_memory(storage: Any, num_bytes: int) -> bool:
    """Tell whether so many bytes lie in a storage: a class without memory of its own has a storage that only claims a size."""
    try:
        return bool(storage.data_ptr() != 0 and num_bytes <= storage.nbytes())
    except RuntimeError:
        return False


def _whole_numbers(sizes: Any) -> tuple[int, ...] | None:
    """Return a shape, or None if it is made of symbols."""
    return tuple(sizes) if all(type(size) is int for size in sizes) else None


def _alias(tensor: torch.Tensor, shape: Any, strides: Any, offset: int, storage: Any) -> torch.Tensor | None:
    with blind():
        try:
            alias = torch.empty(0, dtype=_Base.dtype.__get__(tensor), device=storage.device).set_(storage, offset, shape, strides)
            alias = alias.conj() if _Base.is_conj(tensor) else alias
            return alias._neg_view() if _Base.is_neg(tensor) else alias
        except (RuntimeError, NotImplementedError):  # a quantised dtype, for one
            return None


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a plain tensor, if that needs no code of a foreign class; else the tensor given."""
    if not is_foreign(tensor):
        return tensor
    alias = foreign_facts(tensor).alias
    return tensor if alias is None else alias


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the device of a tensor, unless only the code of its class knows."""
    return foreign_facts(tensor).device if is_foreign(tensor) else tensor.device


def is_jit_tracing() -> bool:
    """Tell whether torch.jit.trace is writing down calls: anything we did would become part of the user's graph."""
    return private.jit_tracing_state() is not None


def is_tracing_program() -> bool:
    """Tell whether torch.fx runs the user's program with proxies for tensors, to write down its calls."""
    return bool(private.fx_tracing.get("_is_fx_tracing_flag"))


def is_tracing_graph() -> bool:
    """Tell whether a graph is being made from stand-ins (fake, functional or proxy tensors): calls then compute nothing."""
    return any(private.dispatch_mode_of(tracer) is not None for tracer in private.TRACERS)


def keep_from_compiler(code: CodeType) -> None:
    """Keep torch.compile from compiling code of ours as if it were the user's; the compiler still follows functions that it calls, or that
    a graph calls.

    Around a graph break it would compile the handler of a mode, and torch 2.13 then returns an inner value of that to the user.
    """
    private.skip_in_compiler(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            keep_from_compiler(inner)


def not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Hide a hook from the compiler, where torch calls it in the middle of code that is being compiled.

    The compiler follows torch's calls there, and would make our recording part of the user's graph, or break the graph.
    """

    def called(*args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        hook(*args)

    return called


def has_dispatch_modes() -> bool:
    """Tell whether a mode sees every operation of this thread: a profiler, a counter, a tracer."""
    return bool(_num_dispatch_modes())


def saved_tensors(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that an autograd node keeps of its forward call, while it keeps them: by name, `self` for `_saved_self`."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # given back already, or changed in place since
                continue
            if isinstance(value, torch.Tensor):
                yield name.removeprefix("_saved_"), value
    try:
        kept = getattr(node, "saved_tensors", ())
    except RuntimeError:
        return
    yield from ((str(number), value) for number, value in enumerate(kept) if isinstance(value, torch.Tensor))


class Quiet:
    """Does the same as `blind` on a hot path: a microsecond if the user has no dispatch mode. Autocast stays as it is."""

    __slots__ = ("_blind", "_grad", "_guard")

    def __enter__(self) -> None:
        self._blind: Any = None
        self._guard = without_function_modes()
        self._guard.__enter__()
        self._grad = torch.is_grad_enabled()
        set_grad_enabled(False)
        if has_dispatch_modes():
            self._blind = blind()
            self._blind.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._blind is not None:
            self._blind.__exit__(None, None, None)
        set_grad_enabled(self._grad)
        self._guard.__exit__(None, None, None)


@contextlib.contextmanager
def blind() -> Iterator[None]:
    """Run our own arithmetic: no mode and no transform sees it, autograd does not track it, autocast does not change it, and where the
    user's compiled code runs around it, the compiler does not look at it.
    """
    compiler = private.set_compiler(None)
    try:
        with (
            without_function_modes(),
            disable_current_modes(),
            DisableFuncTorch(),
            DisableAutocast(),
            torch.no_grad(),
        ):
            yield
    finally:
        private.set_compiler(compiler)
