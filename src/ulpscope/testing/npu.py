# SPDX-License-Identifier: Apache-2.0
"""Emulate an accelerator without hardware: a device named `npu`, written in Python, that computes on the CPU.

    from ulpscope.testing import npu

    npu.install()
    with npu.inject("aten.gelu.default", "scale", call=1):
        train(device="npu")

Without a fault every result is bitwise that of the CPU. `install` claims torch's only spare device name and cannot be
undone, so nothing calls it but you. Scripts take their faults from the environment variable ULPSCOPE_NPU_FAULTS, and
their arithmetic from ULPSCOPE_NPU_ARITHMETIC=reduced. This file rests on private functions of torch; `install` says
which one is missing where it cannot work.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ulpscope._torch_private import (
    correct_aliasing,
    current_graph_task,
    make_wrapper,
    missing_for_emulation,
    no_torch_function,
    rebuild_on_device,
    set_up_spare_device,
    spare_device,
    tree_leaves,
    tree_map_only,
    without_function_modes,
)
from ulpscope._torch_versions import TRIED
from ulpscope.errors import UlpscopeError
from ulpscope.testing import autocast, device_module, vendor_ops
from ulpscope.testing.arithmetic import reduced
from ulpscope.testing.faults import FAULTS, Fault, Injection, Phase, find_operation, named_fault, parse_injections

__all__ = ["FAULTS", "Injection", "NpuTensor", "inject", "install", "is_installed", "reduced_precision"]

FAULTS_VARIABLE = "ULPSCOPE_NPU_FAULTS"
ARITHMETIC_VARIABLE = "ULPSCOPE_NPU_ARITHMETIC"

_libraries: list[Any] = []  # torch forgets a registration when its library is collected
_injections: list[Injection] = []
_reduced_depth = 0


class NpuTensor(torch.Tensor):
    """A tensor on the emulated device: a shell with the metadata, around the CPU tensor `_raw` that holds the values."""

    _raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> NpuTensor:
        shell: NpuTensor = make_wrapper(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device("npu", 0),
        )
        shell._raw = raw
        return shell

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run_composite(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> NpuTensor:
        return NpuTensor(inner["_raw"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self._raw)
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{text[:-1]}, device='{self.device}'{grad})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_on_device, (
            self.detach().cpu(),
            self.dtype,
            str(self.device),
            self.requires_grad,
        )

    def detach(self) -> torch.Tensor:
        """Detach the tensor; hide the call where torch makes a parameter, which it does without detaching for a real device."""
        caller = sys._getframe().f_back  # None if compiled code calls from a thread of the autograd engine
        if caller is None or caller.f_globals.get("__name__") != "torch.nn.parameter":
            return super().detach()
        with without_function_modes():
            return super().detach()

    def tolist(self) -> Any:
        return self._raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self._raw.numpy(force=True)

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, NpuTensor):
            self._raw = value._raw


def is_installed() -> bool:
    """Tell whether this process has the emulated device."""
    return bool(_libraries)


def install(*, stand_in_torch_npu: bool = False) -> None:
    """Register the device `npu` with torch; faults and arithmetic of the environment apply from here on.

    With `stand_in_torch_npu`, `import torch_npu` finds a small stand-in as well. Calling it again adds only what is missing.
    """
    if not is_installed():
        _check_torch()
        _register()
        _injections.extend(parse_injections(os.environ.get(FAULTS_VARIABLE, "")))
        if os.environ.get(ARITHMETIC_VARIABLE) == "reduced":
            _reduce_from_here(+1)
    if stand_in_torch_npu and "torch_npu" not in sys.modules:
        sys.modules["torch_npu"] = vendor_ops.build(sys.modules["torch.npu"])


@contextlib.contextmanager
def inject(
    op: str, fault: Fault | str, *, call: int | None = None, phase: Phase | None = None, value: float | None = None
) -> Iterator[Injection]:
    """Break one aten operation of the emulated device for a while.

    `fault` is a name of `FAULTS` (with `value` as its parameter) or a function `(op, args, kwargs) -> result` over CPU
    tensors. `call` counts from 0 among the calls of that operation in that phase; without it every call is broken.
    A call is in phase `backward` while the autograd engine runs, which includes what checkpointing computes again.
    """
    broken = named_fault(fault, value) if isinstance(fault, str) else fault
    injection = Injection(op=find_operation(op), fault=broken, call=call, phase=phase)
    _injections.append(injection)
    try:
        yield injection
    finally:
        _injections.remove(injection)


@contextlib.contextmanager
def reduced_precision() -> Iterator[None]:
    """Let matrix products and convolutions of the device round their operands to float16 (accumulation stays float32)."""
    _reduce_from_here(+1)
    try:
        yield
    finally:
        _reduce_from_here(-1)


def _reduce_from_here(change: int) -> None:
    global _reduced_depth
    _reduced_depth += change


def _check_torch() -> None:
    if missing := missing_for_emulation():
        raise UlpscopeError(
            f"the emulated npu needs {', '.join(missing)}, which torch {torch.__version__} does not have; "
            f"it is tested with torch {', '.join(TRIED)}"
        )
    if (taken := spare_device()) != "privateuseone":
        raise UlpscopeError(f"the emulated npu cannot be installed: this process has given torch's spare device to {taken!r} already")


def _register() -> None:
    module = device_module.build()
    set_up_spare_device("npu", backend_module=module)
    library: Any = torch.library.Library
    anything, aten = library("_", "IMPL"), library("aten", "IMPL")
    anything.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")
    for name in _RESIZING:
        aten.impl(name, functools.partial(_run_named, name), "PrivateUse1")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    autocast.register(aten, anything)
    _libraries.extend((anything, aten))


def _copy(*args: Any) -> Any:
    """Copy for `torch.tensor(..., device="npu")`, which copies with the dispatch to Python switched off and so calls this kernel."""
    return _run(torch.ops.aten.copy_.default, args, {})


# Torch makes these on an empty tensor that it then resizes, which a shell cannot follow.
_RESIZING = (
    *("arange", "arange.start", "arange.start_step", "range", "range.step", "linspace", "logspace", "eye", "eye.m"),
    *("randperm", "randperm.generator", "tril_indices", "triu_indices"),
)


def _run_named(name: str, *args: Any, **kwargs: Any) -> Any:
    return _run(find_operation(f"aten.{name}"), args, kwargs)


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any
) -> Any:
    """Compute attention by the kernel that the CPU would choose: torch asks the device for its choice."""
    chosen = torch.ops.aten._fused_sdp_choice.default(
        *(_shape_on_cpu(tensor) for tensor in (query, key, value, attn_mask)), dropout_p, is_causal, **kwargs
    )
    if chosen != _FLASH:
        result, _ = torch.ops.aten._scaled_dot_product_attention_math.default(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        return result
    if query.dim() == 3:  # torch 2.15 takes it for a batch of one
        mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        batch = [tensor.unsqueeze(0) for tensor in (query, key, value)]
        return _attention(batch[0], batch[1], batch[2], mask, dropout_p, is_causal, **kwargs).squeeze(0)
    kwargs.pop("enable_gqa", None)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, **kwargs
    )
    return result


_FLASH = 1


def _shape_on_cpu(tensor: Any) -> Any:
    if not isinstance(tensor, NpuTensor):
        return tensor
    return tensor._raw.detach().requires_grad_(tensor.requires_grad)


def _run_composite(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take composite operations apart as autograd would: where autograd is out of the way, as in inference mode, they arrive whole."""
    if op is torch.ops.aten.scaled_dot_product_attention.default:
        return _attention(*args, **kwargs)
    result = op.decompose(*args, **kwargs)
    return _run(op, args, kwargs) if result is NotImplemented else result


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten operation: unwrap, compute on the CPU, wrap."""
    _check_devices(op, args, kwargs)
    raw_args, raw_kwargs = tree_map_only(NpuTensor, lambda tensor: tensor._raw, (args, kwargs))
    target = raw_kwargs.get("device")
    stays = target is None or torch.device(target).type == "npu"
    if target is not None and stays:
        raw_kwargs["device"] = "cpu"
    raw_kwargs.pop("pin_memory", None)
    if op is torch.ops.aten._to_copy.default or op is torch.ops.aten.copy_.default:
        raw_kwargs.pop("non_blocking", None)
    result = _compute(op, raw_args, raw_kwargs)
    if stays and not _writes_to_cpu(op, args):
        with _shell_mode(op, args):
            result = tree_map_only(torch.Tensor, NpuTensor, result)
    _check_shells(op, args, kwargs)
    return correct_aliasing(op, args, kwargs, result)


def _check_shells(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
        return
    for tensor in _written(op, args, kwargs):
        if isinstance(tensor, NpuTensor) and tensor.shape != tensor._raw.shape:
            raise RuntimeError(f"the emulated npu cannot resize a tensor, as {op} did: give out= the shape {tuple(tensor._raw.shape)}")


def _writes_to_cpu(op: Any, args: tuple[Any, ...]) -> bool:
    return op is torch.ops.aten.copy_.default and not isinstance(args[0], NpuTensor)


def _shell_mode(op: Any, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
    """Leave inference mode for a view of an ordinary tensor, so that the view is an ordinary tensor too."""
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns)
    if torch.is_inference_mode_enabled() and is_view and not args[0].is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def _compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    phase: Phase = "forward" if current_graph_task() == -1 else "backward"
    striking = [injection for injection in _injections if injection.strikes(op, phase)]
    compute = (reduced(op) if _reduced_depth else None) or op
    for injection in striking:
        compute = _broken(op, compute, injection.fault)
    return compute(*args, **kwargs)


def _broken(op: Any, compute: Any, fault: Fault) -> Any:
    """Return `compute` with a fault; where the operation writes to its arguments, the fault works on copies that are written back."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not op._schema.is_mutable:
            return fault(_Operation(op, compute), args, kwargs)
        scratch, scratch_kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        result = fault(_Operation(op, compute), scratch, scratch_kwargs)
        written = _written(op, args, kwargs)
        values = tree_leaves(result) if result is not None else _written(op, scratch, scratch_kwargs)
        for tensor, value in zip(written, values, strict=True):
            tensor.copy_(value)
        return result

    return run


class _Operation:
    """The operation that a fault gets to call: its schema with the device's arithmetic."""

    def __init__(self, op: Any, compute: Any) -> None:
        self._schema, self._compute, self.name = op._schema, compute, str(op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the operation writes to, in the order of its schema."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    names = [argument.name for argument in op._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return [tensor for name in names for tensor in tree_leaves(given[name])]


_MAY_MIX = frozenset(
    {
        torch.ops.aten.copy_.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
        torch.ops.aten._unsafe_index.Tensor,
    }
)


def _check_devices(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a real accelerator refuses: tensors of two devices in one call (numbers in CPU tensors are welcome)."""
    if op in _MAY_MIX or op.namespace != "aten":
        return
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    foreign = [tensor for tensor in tensors if tensor.device.type != "npu" and tensor.dim()]
    if foreign and len(foreign) < len(tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {op} found at least two devices, npu:0 and {foreign[0].device}!"
        )
