# SPDX-License-Identifier: Apache-2.0
"""Write `.pt` files as torch.save does, at the speed of the disk: a zip archive of one plain tensor, with valid checksums.

torch.save takes its checksums with a slow loop of its own. Here zlib takes them, six to eight times as fast. torch.save still writes
tensors that are not plain, have a dtype without a storage class in torch, or are too large for a plain archive.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["save_pt"]

_STORAGES = {
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "int16": "ShortStorage",
}
_LARGEST = (1 << 32) - (1 << 16)
_ALIGNMENT = 64
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_VERSION, _UTF8, _FIRST_OF_1980 = 20, 0x800, 0x21


def save_pt(file: Path, dtype: str, shape: tuple[int, ...], buffer: Any) -> None:
    """Write one tensor; `buffer` holds its bytes, C-contiguous."""
    data = memoryview(buffer).cast("B")
    if dtype not in _STORAGES or len(data) > _LARGEST or not len(data):
        _save_by_torch(file, dtype, shape, buffer)
        return
    entries = [("data.pkl", _description(dtype, shape)), ("byteorder", b"little"), ("data/0", data), ("version", b"3\n")]
    with file.open("wb") as stream:
        stream.writelines(_archive(entries))


def _save_by_torch(file: Path, dtype: str, shape: tuple[int, ...], buffer: Any) -> None:
    import torch

    data = torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if len(memoryview(buffer)) else torch.empty(0, dtype=torch.uint8)
    torch.save(data.view(getattr(torch, dtype)).reshape(shape), file)


def _archive(entries: Iterable[tuple[str, Any]]) -> Iterable[Any]:
    """Yield the pieces of a zip archive whose entries are stored uncompressed, each on a boundary of 64 bytes."""
    position, index = 0, []
    for name, data in entries:
        path = f"archive/{name}".encode()
        padding = _padding(position + _LOCAL.size + len(path))
        fields = (_UTF8, 0, 0, _FIRST_OF_1980, zlib.crc32(data), len(data), len(data), len(path))
        yield _LOCAL.pack(b"PK\3\4", _VERSION, *fields, len(padding)) + path + padding
        yield data
        index.append(_CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, *fields, 0, 0, 0, 0, 0, position) + path)
        position += _LOCAL.size + len(path) + len(padding) + len(data)
    directory = b"".join(index)
    yield directory + _END.pack(b"PK\5\6", 0, 0, len(index), len(index), len(directory), position, 0)


def _padding(position: int) -> bytes:
    """Return an extra field, marked as torch marks its own, that brings the next byte onto a boundary."""
    length = (-position - 4) % _ALIGNMENT
    return struct.pack("<2sH", b"FB", length) + bytes(length)


class _Tensor:
    """Stands for a tensor whose storage is elsewhere."""

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.storage = _Storage()
        self.numel = 1
        strides = []
        for size in reversed(shape):
            strides.append(self.numel)
            self.numel *= size
        self.strides = tuple(reversed(strides))


class _Storage:
    """Stands for the entry `data/0`."""


class _Pickler(pickle.Pickler):
    """Writes a plain tensor as torch.save does."""

    def __init__(self, stream: io.BytesIO, tensor: _Tensor) -> None:
        super().__init__(stream, protocol=2)
        self._tensor = tensor

    def persistent_id(self, value: Any) -> Any:
        import torch

        if isinstance(value, _Storage):
            return ("storage", getattr(torch, _STORAGES[self._tensor.dtype]), "0", "cpu", self._tensor.numel)
        return None

    def reducer_override(self, value: Any) -> Any:
        from ulpscope._torch_private import rebuild_tensor

        if isinstance(value, _Tensor):
            return rebuild_tensor, (value.storage, 0, value.shape, value.strides, False, OrderedDict())
        return NotImplemented


@lru_cache(maxsize=4096)
def _description(dtype: str, shape: tuple[int, ...]) -> bytes:
    tensor, stream = _Tensor(dtype, shape), io.BytesIO()
    _Pickler(stream, tensor).dump(tensor)
    return stream.getvalue()
