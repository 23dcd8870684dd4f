# SPDX-License-Identifier: Apache-2.0
"""Live tensors to `TensorRecord`s.

A tensor seen again unchanged (same storage, version and view) is neither read nor stored again. Storages are told apart by a weak
reference that keeps their address from being reused; an address alone would credit a new tensor with an old one's values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from ulpscope.capture.torch_internals import blind, is_fake, is_traced, storage_identity
from ulpscope.model import DTYPES, Slot, Summary, TensorRecord
from ulpscope.numerics.summary import fingerprint_address, summarize_address

__all__ = ["Keep", "TensorReader"]

Keep: TypeAlias = Literal["fingerprint", "statistics", "tensors"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_STORAGES = 50_000


class _Values(NamedTuple):
    summary: Summary | None = None
    fingerprint: str | None = None
    content: str | None = None
    note: str = ""


_UNDEFINED = _Values(note="uninitialised memory: values are not read")


class TensorReader:
    """Reads tensors and remembers, within a step, what it has read."""

    def __init__(self, keep: Keep, store: Callable[[str, tuple[int, ...], Any], str | None]) -> None:
        self._keep = keep
        self._store = store
        self._seen: dict[int, tuple[StorageWeakRef, dict[Any, _Values]]] = {}
        self._dtypes: dict[torch.dtype, str] = {}
        self._devices: dict[torch.device, str] = {}

    def forget(self) -> None:
        """Forget every tensor, as at the end of a step: values may change unseen while nothing is recorded."""
        self._seen.clear()

    def forget_storage(self, tensor: torch.Tensor) -> None:
        """Forget all views of a storage that was written to, also through an alias with a version of its own."""
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            self._seen.pop(storage_identity(tensor), None)

    def mark_undefined(self, tensor: torch.Tensor) -> None:
        """Take the values of a tensor for undefined until somebody writes to it."""
        if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_inference():
            key = self._key(tensor, (tuple(tensor.shape), tensor.stride()))
            self._views(tensor)[key] = _UNDEFINED

    def record(self, slot: Slot, tensor: torch.Tensor, *, is_undefined: bool = False) -> TensorRecord:
        """Describe one tensor. Call it where no function mode is active."""
        dtype = self._dtypes.get(tensor.dtype) or self._dtypes.setdefault(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        device = self._devices.get(tensor.device) or self._devices.setdefault(tensor.device, str(tensor.device))
        is_plain = type(tensor) in _PLAIN
        if not is_plain and is_lazy(tensor):
            return TensorRecord(slot=slot, dtype=dtype, shape=(), device=device, note="a lazy parameter that has no shape yet")
        if tensor.is_nested:
            note = f"nested tensor of shape {tuple(tensor.shape) if tensor.layout is torch.jagged else '?'}: values are not read"
            return TensorRecord(slot=slot, dtype=dtype, shape=(), device=device, requires_grad=tensor.requires_grad, note=note)
        shape = tuple(tensor.shape) if is_plain else tuple(map(int, tensor.shape))
        strides = tensor.stride() if tensor.layout is torch.strided else None
        if is_undefined:
            values = _UNDEFINED
        elif strides is None:
            values = _Values(note=f"layout {tensor.layout}: values are not read")
        elif dtype not in DTYPES:
            values = _Values(note=f"dtype {dtype}: values are not read")
        elif is_plain:
            values = self._values(tensor, dtype, (shape, strides))
        else:
            values = self._values_of_subclass(tensor, dtype)
        return TensorRecord(
            slot=slot,
            dtype=dtype,
            shape=shape,
            strides=strides,
            device=device,
            requires_grad=tensor.requires_grad,
            summary=values.summary,
            fingerprint=values.fingerprint,
            content=values.content,
            note=values.note,
        )

    def _values(self, tensor: torch.Tensor, dtype: str, layout: Any) -> _Values:
        if tensor.device.type == "meta":
            return _Values(note="meta tensor: it has no values")
        if is_traced(tensor):
            return _Values(note="inside a torch.func transform: values are not read")
        if tensor.is_inference():
            return self._read(tensor, dtype)
        views = self._views(tensor)
        key = self._key(tensor, layout)
        values = views.get(key)
        if values is None:
            values = views[key] = self._read(tensor, dtype)
        return values

    @staticmethod
    def _key(tensor: torch.Tensor, layout: Any) -> Any:
        return tensor._version, tensor.storage_offset(), layout, tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def _views(self, tensor: torch.Tensor) -> dict[Any, _Values]:
        identity = storage_identity(tensor)
        entry = self._seen.get(identity)
        if entry is None:
            if len(self._seen) >= _MOST_STORAGES:
                self._seen.clear()
            entry = self._seen[identity] = (StorageWeakRef(tensor.untyped_storage()), {})  # type: ignore[no-untyped-call]
        return entry[1]

    def _values_of_subclass(self, tensor: torch.Tensor, dtype: str) -> _Values:
        if is_fake(tensor):
            return _Values(note="fake tensor: it has no values")
        to_local = getattr(tensor, "to_local", None)
        if to_local is None:
            return self._read(tensor, dtype)
        with blind():
            local = to_local()
        placements = getattr(tensor, "placements", None)
        return self._read(local, dtype)._replace(note=f"values of the local shard {tuple(local.shape)}, placements {placements}")

    def _read(self, tensor: torch.Tensor, dtype: str) -> _Values:
        plain = _on_cpu(tensor)
        size_bytes = plain.numel() * plain.element_size()
        address = _address(plain)
        if address == 0 and size_bytes:
            return _Values(note=f"{type(tensor).__name__} has no memory of its own: values are not read")
        content = self._store(dtype, tuple(plain.shape), _buffer(address, size_bytes)) if self._keep == "tensors" else None
        note = "values not kept: the size limit of this run is reached" if self._keep == "tensors" and content is None else ""
        if self._keep == "fingerprint":
            return _Values(fingerprint=fingerprint_address(address, size_bytes))
        summary, fingerprint = summarize_address(dtype, address, size_bytes)
        return _Values(summary, fingerprint, content, note)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous in the memory of the CPU; the tensor itself where it is that already."""
    if type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with blind():
        return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _address(tensor: torch.Tensor) -> int:
    """Where the values lie; 0 where they lie nowhere."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _buffer(address: int, size_bytes: int) -> Any:
    return (ctypes.c_char * size_bytes).from_address(address) if size_bytes else b""
