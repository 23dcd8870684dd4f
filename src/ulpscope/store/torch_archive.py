# SPDX-License-Identifier: Apache-2.0
"""Finds a tensor in a `.pt` file without torch, and without running the pickle in it.

`torch.save` writes a zip archive: `data.pkl` says how the tensor lies in its storage, `data/0` is the storage. The pickle is read as a
list of opcodes and has to describe one dense tensor in the plain way; anything else gives None and is left to torch with weights_only.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ulpscope.model import DTYPES, TensorData
from ulpscope.numerics.gathering import gathered

__all__ = ["MAX_EXPANDED_BYTES", "open_plain_tensor"]

_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
_MAX_PICKLE_BYTES = 1 << 16  # one plain tensor takes about 200
_LOCAL_HEADER_BYTES = 30
_MOST_KNOWN = 1 << 14
MAX_EXPANDED_BYTES = 1 << 32  # strides of 0 let a small file claim any size
_MARK = object()


class _Placed(NamedTuple):
    """Where a tensor lies in its file, in bytes, and how it lies there, in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    begin: int
    length: int


_known: dict[tuple[int, int, int, int], _Placed] = {}  # files are opened more than once, and finding the tensor takes longest


def open_plain_tensor(file: Path) -> TensorData | None:
    """The one tensor in an archive, mapped; None where the archive holds something else."""
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            placed = _known.get(key) or _place(stream, status.st_size)
            if placed is None:
                return None
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = placed
        return _tensor(memoryview(mapping)[placed.begin : placed.begin + placed.length], placed)
    except (zipfile.BadZipFile, ValueError, IndexError, KeyError, TypeError, AttributeError, NotImplementedError, EOFError):
        return None


def _place(stream: BinaryIO, size: int) -> _Placed | None:
    with zipfile.ZipFile(stream) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
        return None
    if "byteorder" in entries and _content(stream, entries["byteorder"], size) != b"little":
        return None
    described = _described(_content(stream, entries["data.pkl"], size))
    if described is None:
        return None
    kind, key, offset, shape, strides = described
    if math.prod(shape) == 0:
        return _Placed(kind, shape, strides, offset, 0, 0)
    storage = entries[f"data/{key}"]
    return _Placed(kind, shape, strides, offset, _begin(stream, storage, size), storage.file_size)


def _content(stream: BinaryIO, info: zipfile.ZipInfo, size: int) -> bytes:
    stream.seek(_begin(stream, info, size))
    return stream.read(min(info.file_size, _MAX_PICKLE_BYTES))


def _begin(stream: BinaryIO, info: zipfile.ZipInfo, size: int) -> int:
    """Where the bytes of an entry begin: behind its local header, whose name and padding have their own lengths."""
    stream.seek(info.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    if header[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("not stored as it is")
    begin = info.header_offset + _LOCAL_HEADER_BYTES + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if begin + info.file_size > size:
        raise ValueError("cut off")
    return begin


@functools.lru_cache(maxsize=4096)
def _described(data: bytes) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]] | None:
    """Dtype, name of the storage, offset, shape and strides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickletools, about odd escapes in texts
        value = _value(data)
    match value:
        case ("call", ("global", "torch._utils _rebuild_parameter"), (("call", *_) as tensor, _, _)):
            value = tensor
    match value:
        case (
            "call",
            ("global", "torch._utils _rebuild_tensor_v2"),
            (("storage", ("storage", ("global", str(kind)), str(key), _, int())), int(offset), tuple(shape), tuple(strides), bool(), _),
        ) if len(shape) == len(strides) and all(type(size) is int for size in (*shape, *strides)):
            return _STORAGES[kind.removeprefix("torch ")], key, offset, shape, strides
    return None


def _value(data: bytes) -> Any:
    """What the opcodes build, with globals, calls and storages as tagged tuples: nothing is looked up and nothing is called."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                return stack.pop()
            case "GLOBAL":
                stack.append(("global", argument))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                at = len(stack) - 1 - stack[::-1].index(_MARK)
                stack[at:] = [tuple(stack[at + 1 :])]
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BINPERSID":
                stack.append(("storage", stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(("call", stack.pop(), arguments))
            case _:
                return None
    return None


def _tensor(storage: memoryview, placed: _Placed) -> TensorData | None:
    size, numel = DTYPES[placed.dtype].size_bytes, math.prod(placed.shape)
    if min((placed.offset, *placed.shape, *placed.strides)) < 0:
        return None
    if numel == 0:
        return TensorData(placed.dtype, placed.shape, memoryview(b""))
    last = placed.offset + sum((count - 1) * stride for count, stride in zip(placed.shape, placed.strides, strict=True))
    if (last + 1) * size > len(storage) or numel * size > max(MAX_EXPANDED_BYTES, len(storage)):
        return None
    return TensorData(placed.dtype, placed.shape, gathered(storage, size, placed.shape, placed.strides, placed.offset))
