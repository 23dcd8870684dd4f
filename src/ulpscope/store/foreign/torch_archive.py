# SPDX-License-Identifier: Apache-2.0
"""Find a tensor in a `.pt` file without torch, and without running the pickle in it.

`torch.save` writes a zip archive: `data.pkl` says how the tensor lies in its storage, `data/0` is the storage. Until torch 1.6 it wrote
several pickles and then the storage. A pickle is read as a list of opcodes and has to describe one dense tensor. Nothing is inflated, and
no allocation follows a size that the file claims: entries lie in the archive uncompressed, storages are mapped, and pickles and the list of
entries are read only up to a size that no tensor needs.
"""

from __future__ import annotations

import functools
import io
import math
import mmap
import os
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from ulpscope.errors import DamagedRunError
from ulpscope.model import DTYPES, TensorData
from ulpscope.numerics.gathering import gathered

__all__ = ["MAX_EXPANDED_BYTES", "open_plain_tensor", "open_unusual_tensor"]

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
_UNTYPED = "UntypedStorage"
_MAX_PICKLE_BYTES = 1 << 16  # one plain tensor takes about 200
_MAX_DIRECTORY_BYTES = 1 << 20  # one tensor has about ten entries of 60 bytes
_LOCAL_HEADER_BYTES = 30
_MOST_KNOWN = 1 << 14
MAX_EXPANDED_BYTES = 1 << 28  # strides of 0 let a small file claim any size
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_MOST_DIMS = 64
_ORDERED = ("global", "collections OrderedDict")
_WRAPPERS = {"_rebuild_parameter", "_rebuild_parameter_with_state"}


class _Unreadable(ValueError):
    """Say why a file is no tensor that can be read, for a sentence about it."""


class _Placed(NamedTuple):
    """The place of a tensor in its file, in bytes, and its layout there, in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    begin: int
    length: int


_known: dict[tuple[int, int, int, int], _Placed] = {}  # files are opened more than once, and finding the tensor takes longest
_UNFIT = (zipfile.BadZipFile, ValueError, IndexError, KeyError, TypeError, AttributeError, NotImplementedError, EOFError)


def open_plain_tensor(file: Path) -> TensorData | None:
    """Map the one tensor in an archive; None if the archive holds something else."""
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
    except _UNFIT:
        return None


def open_unusual_tensor(file: Path) -> TensorData:
    """Open the one tensor in a file that is none of the plain ones: of another dtype, a view, with attributes, or of an old or foreign
    writer.

    Raises ValueError with the reason where there is none.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            placed, view = _place_unusual(file, stream, size)
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        found = _tensor(memoryview(mapping)[placed.begin : placed.begin + placed.length], placed)
    except (_Unreadable, DamagedRunError):
        raise
    except _UNFIT as error:
        raise _Unreadable(f"it is no file of torch.save, or is cut off: {_first_line(error)}") from None
    if found is None:
        if math.prod(placed.shape) * DTYPES[placed.dtype].size_bytes > MAX_EXPANDED_BYTES:
            raise DamagedRunError(f"'{file}' is a small file that claims a tensor of shape {list(placed.shape)}; dump this run again")
        raise _Unreadable(f"a tensor of shape {list(placed.shape)[:64]} does not fit the {placed.length} bytes of its storage")
    return _resolved(found, view)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _place(stream: BinaryIO, size: int) -> _Placed | None:
    entries = _entries(stream)
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


class _Sparing(io.RawIOBase):
    """A file that refuses to read a piece larger than the list of entries of any tensor."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_DIRECTORY_BYTES:
            raise _Unreadable(f"its list of entries takes {size} bytes, more than that of any tensor")
        return self._stream.read(size if size >= 0 else _MAX_DIRECTORY_BYTES)


def _entries(stream: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of an archive by their names inside its folder."""
    with zipfile.ZipFile(_Sparing(stream)) as archive:
        return {info.filename.partition("/")[2]: info for info in archive.infolist()}


def _content(stream: BinaryIO, info: zipfile.ZipInfo, size: int) -> bytes:
    stream.seek(_begin(stream, info, size))
    return stream.read(min(info.file_size, _MAX_PICKLE_BYTES))


def _begin(stream: BinaryIO, info: zipfile.ZipInfo, size: int) -> int:
    """Return where the bytes of an entry begin: behind its local header, whose name and padding have their own lengths."""
    stream.seek(info.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    if info.compress_type != zipfile.ZIP_STORED or header[8:10] not in (b"\0\0", b""):
        raise _Unreadable("it is a compressed archive, which torch.save never writes; unpack it and zip it again without compression")
    if header[:4] != b"PK\x03\x04":
        raise _Unreadable("an entry does not begin where its archive says")
    begin = info.header_offset + _LOCAL_HEADER_BYTES + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if begin + info.file_size > size:
        raise _Unreadable("it is cut off")
    return begin


# ---- what a pickle says


class _Described(NamedTuple):
    """A tensor as a pickle describes it: the name of its storage, the size of the storage's unit, and the kind of view."""

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    view: frozenset[str]
    unit_bytes: int


@functools.lru_cache(maxsize=4096)
def _described(data: bytes) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]] | None:
    """Return dtype, name of the storage, offset, shape and strides; None if the pickle describes no plain tensor."""
    value = _value(io.BytesIO(data))
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


def _described_unusual(file: Path, value: Any) -> _Described:
    """Read the tensor that a pickle describes in one of the other ways that torch knows."""
    for _ in range(4):  # a parameter of a subclass with attributes
        match value:
            case ("call", ("global", str(name)), (("call", *_) as inner, *_)) if name.rpartition(" ")[2] in _WRAPPERS:
                value = inner
            case ("call", ("global", "torch._tensor _rebuild_from_type_v2"), (function, _, arguments, _)):
                value = "call", function, arguments
            case _:
                break
    match value:
        case ("call", ("global", "torch._utils _rebuild_tensor"), (storage, offset, shape, strides)):
            rest: tuple[Any, ...] = ()
        case ("call", ("global", "torch._utils _rebuild_tensor_v2"), (storage, offset, shape, strides, _, _, *metadata)):
            rest = tuple(metadata)
        case ("call", ("global", "torch._utils _rebuild_tensor_v3"), (storage, offset, shape, strides, _, _, dtype, *metadata)):
            rest = (dtype, *metadata)
        case _:
            _refuse(file, value)
    kind, key = _storage(storage)
    is_typed = kind != _UNTYPED
    if not is_typed:
        match rest:
            case (("global", str(named)), *_):
                kind, rest = named.removeprefix("torch "), rest[1:]
    if kind not in DTYPES:
        raise DamagedRunError(f"'{file}' holds values of type '{kind[:40]}', which ulpscope cannot compare; leave this call out")
    sizes = (shape, strides)
    if not all(isinstance(one, tuple) and len(one) <= _MOST_DIMS and all(type(size) is int for size in one) for one in sizes):
        raise _Unreadable("its shape or its strides are none")
    if type(offset) is not int or len(shape) != len(strides):
        raise _Unreadable("its strides do not fit its shape")
    pairs = rest[0].pairs if rest and isinstance(rest[0], _Pairs) else []
    view = frozenset(name for name, is_set in pairs if is_set is True and name in ("conj", "neg"))
    return _Described(kind, key, offset, shape, strides, view, DTYPES[kind].size_bytes if is_typed else 1)


def _storage(value: Any) -> tuple[str, str]:
    """Return the dtype of a storage, and its name in the file."""
    match value:
        case ("storage", ("storage", ("global", str(kind)), str(key), _, int(), *view)) if view in ([], [None]):
            name = kind.rpartition(" ")[2]
            return (name if name == _UNTYPED else _STORAGES.get(name, name)), key
    raise _Unreadable("it says of no storage that the tensor lies in it")


def _refuse(file: Path, value: Any) -> NoReturn:
    match value:
        case ("call", function, _):
            named = function[1].replace(" ", ".")[:80] if function[:1] == ("global",) else "something"
            raise _Unreadable(f"it asks for a call of '{named}', which no dense tensor needs and which was not made")
        case _Pairs():
            kind = "dict"
        case (("global" | "call" | "storage") as word, *_):
            kind = word
        case _:
            kind = "NoneType" if value is None else type(value).__name__
    raise DamagedRunError(f"'{file}' holds a {kind}, not a dense tensor; dump this run again")


class _Pairs:
    """A dictionary of a pickle, kept as pairs: its keys may be unhashable."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


def _value(stream: BinaryIO) -> Any:
    """Build the value of the opcodes, with globals, calls and storages as tagged tuples: nothing is looked up and nothing is called."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickletools, about odd escapes in texts
        for opcode, argument, _ in pickletools.genops(stream):
            match opcode.name:
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case "GLOBAL":
                    stack.append(("global", argument))
                case "STACK_GLOBAL":
                    name, module = stack.pop(), stack.pop()
                    stack.append(("global", f"{module:s} {name:s}"))
                case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                    stack.append(argument)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(opcode.name == "NEWTRUE")
                case "NONE":
                    stack.append(None)
                case "MARK":
                    marks.append(len(stack))
                case "EMPTY_TUPLE":
                    stack.append(())
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append(_Pairs())
                case "TUPLE":
                    at = marks.pop()
                    stack[at:] = [tuple(stack[at:])]
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(opcode.name[-1])
                    if count > len(stack):
                        raise IndexError("too few values for a tuple")
                    stack[-count:] = [tuple(stack[-count:])]
                case "APPEND":
                    last = stack.pop()
                    stack[-1].append(last)
                case "APPENDS":
                    at = marks.pop()
                    stack[at - 1].extend(stack[at:])
                    del stack[at:]
                case "SETITEM":
                    last, key = stack.pop(), stack.pop()
                    stack[-1].pairs.append((key, last))
                case "SETITEMS":
                    at = marks.pop()
                    stack[at - 1].pairs.extend(zip(stack[at::2], stack[at + 1 :: 2], strict=True))
                    del stack[at:]
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "BINPERSID":
                    stack.append(("storage", stack.pop()))
                case "REDUCE":
                    arguments, function = stack.pop(), stack.pop()
                    stack.append(_Pairs() if function == _ORDERED else ("call", function, arguments))
                case "BUILD":
                    stack.pop()  # attributes, which say nothing of the values
                case _:
                    raise _Unreadable(f"its pickle has the opcode {opcode.name}, which no dense tensor needs")
    raise _Unreadable("its pickle has no end")


# ---- where the bytes are


def _place_unusual(file: Path, stream: BinaryIO, size: int) -> tuple[_Placed, frozenset[str]]:
    is_zip = stream.read(4) == b"PK\x03\x04"
    stream.seek(0)
    return _place_in_archive(file, stream, size) if is_zip else _place_behind_pickles(file, stream, size)


def _place_in_archive(file: Path, stream: BinaryIO, size: int) -> tuple[_Placed, frozenset[str]]:
    entries = _entries(stream)
    if "data.pkl" not in entries:
        raise _Unreadable("it is an archive without data.pkl, and none of torch.save")
    pickled = _content(stream, entries["data.pkl"], size)
    if entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
        raise _Unreadable(f"its pickle takes {entries['data.pkl'].file_size} bytes, more than that of any tensor")
    order = _content(stream, entries["byteorder"], size) if "byteorder" in entries else b"little"
    if order not in (b"little", b"big"):
        raise _Unreadable("it has an unknown order of bytes")
    found = _described_unusual(file, _value(io.BytesIO(pickled)))
    view = found.view | ({"big"} if order == b"big" else frozenset())
    if math.prod(found.shape) == 0:
        return _Placed(found.dtype, found.shape, found.strides, found.offset, 0, 0), view
    if f"data/{found.key}" not in entries:
        raise _Unreadable("it has no entry with the values")
    storage = entries[f"data/{found.key}"]
    return _Placed(found.dtype, found.shape, found.strides, found.offset, _begin(stream, storage, size), storage.file_size), view


def _place_behind_pickles(file: Path, stream: BinaryIO, size: int) -> tuple[_Placed, frozenset[str]]:
    """Place a tensor in the form before torch 1.6: four pickles of facts, one with the names of storages, then the length and the bytes of
    each.
    """
    head = io.BytesIO(stream.read(_MAX_PICKLE_BYTES))
    if head.getvalue()[:1] != b"\x80":
        raise _Unreadable("it does not begin as torch.save begins a file")
    magic = _value(head)
    if magic != _LEGACY_MAGIC:
        _refuse(file, magic)
    _value(head)
    facts = _value(head)
    is_big = isinstance(facts, _Pairs) and ("little_endian", False) in facts.pairs
    found = _described_unusual(file, _value(head))
    keys = _value(head)
    if keys != [found.key]:
        raise _Unreadable("it holds other than one storage")
    count = int.from_bytes(head.read(8), "big" if is_big else "little")
    begin = head.tell()
    length = min(count, size) * found.unit_bytes
    if begin + length > size:
        raise _Unreadable("it is cut off")
    return _Placed(found.dtype, found.shape, found.strides, found.offset, begin, length), found.view | ({"big"} if is_big else frozenset())


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


def _resolved(found: TensorData, view: frozenset[str]) -> TensorData:
    """Return the values of a tensor that its file holds in the other order of bytes, conjugated or negated."""
    if not view or not math.prod(found.shape):
        return found
    from ulpscope.numerics.casting import as_array

    values = as_array(found)
    if "big" in view:
        values = values.byteswap()
    if "conj" in view:
        if values.dtype.kind != "c":
            raise _Unreadable(f"it holds {found.dtype} values that are to be conjugated, which is not known here")
        values = values.conj()
    if "neg" in view:
        if values.dtype.kind not in "fci" or values.dtype.name != found.dtype:
            raise _Unreadable(f"it holds {found.dtype} values with their signs turned, which is not known here")
        values = -values
    return TensorData(found.dtype, found.shape, values.reshape(-1).view("u1").data)
