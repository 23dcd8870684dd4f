# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that capture leans on, each with what it gives and what is lost without it.

`tests/capture/test_torch_internals.py` has a test for each, which says what breaks when the name goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

__all__ = [
    "ACCUMULATE_GRAD",
    "COMPILER",
    "FUSED_MODULES",
    "Quiet",
    "blind",
    "current_node",
    "current_stream",
    "detached",
    "free_weak_reference",
    "graph_task",
    "has_dispatch_modes",
    "inside_transform",
    "is_fake",
    "is_gone",
    "is_jit_tracing",
    "is_stream_capturing",
    "is_traced",
    "next_sequence_number",
    "saved_tensors",
    "sequence_number",
    "set_grad_enabled",
    "storage_identity",
    "weak_reference",
    "without_function_modes",
]

ACCUMULATE_GRAD = 2**64 - 1
"""The sequence number of nodes that add into a leaf: larger than any range, so a walk stops there by itself."""

COMPILER = vars(torch.compiler)
"""The names of torch.compiler. `_is_compiling_flag` is what its `is_compiling` tells outside of the compiler's own tracing, without two
calls of Python: an export that runs the program itself sets it.
"""

FUSED_MODULES = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)
"""Modules that use a fused kernel in evaluation, and give it up when any torch function mode is active."""

_autograd = torch._C._autograd
_functorch = torch._C._functorch


def next_sequence_number() -> int:
    """The number that the next autograd node of this thread gets: ties backward nodes to the call that made them."""
    return int(_autograd._get_sequence_nr())


def sequence_number(node: Any) -> int:
    return int(node._sequence_nr())


def graph_task() -> int:
    """The running backward pass on this thread, or -1."""
    return int(torch._C._current_graph_task_id())


def current_node() -> Any:
    """The autograd node that is being run on this thread, or None."""
    return torch._C._current_autograd_node()


def storage_identity(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage object; unique only while somebody keeps that object (see `StorageWeakRef`)."""
    return int(tensor.untyped_storage()._cdata)


_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_tls_includes, _TRANSFORMS = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
_storages: Any = torch._C.StorageBase


def weak_reference(tensor: torch.Tensor) -> int:
    """What keeps the address of a tensor's storage object from being reused, until `free_weak_reference` is given it: that address."""
    reference: Any = tensor.untyped_storage()._weak_ref()  # a number, whatever its annotation says
    return int(reference)


free_weak_reference = _storages._free_weak_ref
is_gone = _storages._expired


def current_stream(device: torch.device) -> int:
    """The CUDA stream on which torch launches right now on this thread."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def is_stream_capturing() -> bool:
    """Whether what is launched now becomes part of a CUDA graph of the user's."""
    return bool(torch._C._cuda_isCurrentStreamCapturing())


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same storage and version, made unseen. A transform would wrap it into something without memory."""
    if not _num_dispatch_modes() and not inside_transform():
        return tensor.detach()
    with blind():
        return tensor.detach()


def inside_transform() -> bool:
    """Whether a torch.func transform (vmap, grad ...) is active: its tensors have no memory to look at."""
    return _tls_includes(_TRANSFORMS)  # functorch itself would make a state for this thread, which every later backward pass copies


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform or a tracer and has no values of its own."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor)) or torch._is_functional_tensor(tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no values: the compiler's stand-ins."""
    return isinstance(tensor, FakeTensor)


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace is writing down what is called: whatever we did would become part of the user's graph."""
    return torch._C._get_tracing_state() is not None


without_function_modes = torch._C.DisableTorchFunction
"""A context in which no __torch_function__ mode or subclass, the user's or ours, sees what we do."""


set_grad_enabled = torch._C._set_grad_enabled
"""The same as torch.set_grad_enabled without making an object: half a microsecond of a hot path."""


def has_dispatch_modes() -> bool:
    """Whether somebody sees every operation of this thread: a profiler, a counter, a tracer."""
    return bool(torch._C._len_torch_dispatch_stack())


def saved_tensors(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What an autograd node keeps of its forward call, while it keeps it: by name, `self` of `_saved_self`."""
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
    """The same as `blind` for a hot path: a microsecond where the user has no dispatch mode. Autocast stays as it is."""

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
    """A context for our own arithmetic: no mode and no transform sees it, autograd does not track it, autocast does not change it, and
    where the user's compiled code runs around it, the compiler does not look at it.
    """
    compiler = set_eval_frame(None)
    try:
        with (
            without_function_modes(),
            _python_dispatch._disable_current_modes(),
            torch._C._DisableFuncTorch(),
            torch._C._DisableAutocast(),
            torch.no_grad(),
        ):
            yield
    finally:
        set_eval_frame(compiler)
