# SPDX-License-Identifier: Apache-2.0
"""Read the dump files of Ascend's runtime (ACL) without CANN: the header, and each tensor on demand.

Three forms exist: a length, a protobuf header and the raw bytes; the same with a header of tags and lengths ("nano"); and, older than both,
a bare protobuf message with the bytes inside. The file is mapped, never read whole, and no claim of the header is used before it is held
against the size of the file.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.model import TensorData
from ulpscope.store.acl.acl_dtypes import GE_DTYPES, PROTO_DTYPES, bits_of, carried_as, codes_of, element_bits, num_bytes, values_of
from ulpscope.store.acl.blocked_formats import convert, format_name
from ulpscope.store.acl.file_names import AclName, match_acl_name, parse_acl_name
from ulpscope.store.acl.nano import NANO_MAGIC, read_nano
from ulpscope.store.acl.slices import slice_shape
from ulpscope.store.acl.wire import DumpMessage, TensorMessage, WireError, read_message

__all__ = ["AclDump", "AclName", "AclTensor", "is_acl_file", "parse_acl_name", "read_acl_file"]

_MAX_HEADER_BYTES = 64 << 20
# The order of the bytes behind the header. The header lists the outputs first, and the arguments of a failed kernel among the inputs.
_DATA_ORDER = ("input", "output", "buffer", "workspace", "argument")
_ARGUMENT = 1  # as the type of an input


@dataclass(frozen=True, slots=True, eq=False)
class AclTensor:
    """One tensor of a dump. `format` and `shape` describe how it is stored, `original_shape` how it was before."""

    role: str
    index: int
    dtype: str
    format: str
    shape: tuple[int, ...]
    original_shape: tuple[int, ...]
    original_format: str
    groups: int
    size_bytes: int
    path: Path
    _bytes: memoryview | None = field(repr=False)

    @property
    def is_kept(self) -> bool:
        """Tell whether the file has the values. The writer leaves out tensors without memory on the device."""
        return self._bytes is not None

    @property
    def place(self) -> str:
        return f"{self.role} {self.index} of '{self.path}'"

    def array(self, format: str | None = None) -> npt.NDArray[Any]:
        """Return the values, as stored or in another format; `ND` is the original shape.

        Dtypes that NumPy lacks become float32, narrow integers int8 or uint8.
        """
        return values_of(self.dtype, self._codes(format))

    def data(self, format: str | None = None) -> TensorData:
        """Return the tensor for the other stages; a dtype that they do not know becomes one that holds its values exactly."""
        codes, name = self._codes(format), carried_as(self.dtype)
        if name == "bfloat16" and self.dtype != name:
            codes = (values_of(self.dtype, codes).view("<u4") >> 16).astype("<u2")
        elif name != self.dtype:
            codes = values_of(self.dtype, codes)
        return TensorData(name, codes.shape, np.ascontiguousarray(codes).reshape(-1).view(np.uint8).data)

    def raw(self) -> memoryview:
        """Return the bytes as they lie in the file; none where the values were left out."""
        return self._bytes if self._bytes is not None else memoryview(b"")

    def _codes(self, format: str | None) -> npt.NDArray[Any]:
        shape = self._stored_shape()
        codes = codes_of(self.dtype, self._data(shape), math.prod(shape)).reshape(shape)
        if format is None:
            return codes
        return convert(
            codes,
            self.format,
            format,
            original=self.original_shape,
            original_format=self.original_format,
            groups=self.groups,
            place=self.place,
        )

    def _data(self, shape: tuple[int, ...]) -> memoryview:
        if self._bytes is None:
            raise InputError(f"{self.place} has no values in the file: it had no memory on the device when the dump was written")
        needed = num_bytes(self.dtype, math.prod(shape))
        if needed > len(self._bytes):
            raise DamagedRunError(
                f"{self.place} should hold {self.dtype} values of shape {list(shape)}, {needed} bytes, but has {len(self._bytes)}; "
                "copy the file again, or dump again"
            )
        return self._bytes

    def _stored_shape(self) -> tuple[int, ...]:
        """Return the shape in the header; a tensor without one is a single value, or a row of all values in its bytes."""
        if any(size < 0 for size in self.shape):
            raise DamagedRunError(f"{self.place} has the shape {list(self.shape)}, which no tensor has; dump again")
        if self.shape or self._bytes is None or len(self._bytes) * 8 < 2 * element_bits(self.dtype):
            return self.shape
        return (len(self._bytes) * 8 // element_bits(self.dtype),)


@dataclass(frozen=True, slots=True, eq=False)
class AclDump:
    """One dump file. `form` is protobuf, nano or old; `op_name` is empty where the form has none."""

    path: Path
    form: str
    version: str
    op_name: str
    time: int
    note: str
    attributes: dict[str, str]
    tensors: tuple[AclTensor, ...]

    def of(self, role: str) -> tuple[AclTensor, ...]:
        """Return the tensors of one role."""
        return tuple(tensor for tensor in self.tensors if tensor.role == role)


def is_acl_file(path: Path) -> bool:
    """Tell whether the file has a header that describes at least one tensor or names its operator."""
    try:
        dump = read_acl_file(path) if Path(path).is_file() else None
    except (InputError, OSError):
        return False
    return dump is not None and bool(dump.tensors or (dump.op_name and dump.version))


def read_acl_file(path: Path) -> AclDump:
    """Read the header of a dump file; its tensors are views of the mapped file."""
    path = Path(path)
    view = _mapped(path)
    form, header = _header(path, view)
    try:
        message = read_nano(header) if form == "nano" else read_message(header)
    except WireError as error:
        raise NotARunError(f"'{path}' is no dump file of Ascend, or is damaged: {error}; give the file that the runtime wrote") from None
    content = view[8 + len(header) :] if form != "old" else None
    return AclDump(
        path=path,
        form=form,
        version=message.version,
        op_name=message.op_name,
        time=message.time,
        note=message.note,
        attributes=message.attributes,
        tensors=tuple(_tensors(path, form, message, content)),
    )


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as stream:
            return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise NotARunError(f"'{path}' is an empty file, and no dump; see whether the disk was full when it was written") from None
    except OSError as error:
        raise NotARunError(f"'{path}' cannot be opened ({error.strerror}); see whether it is there and may be read") from None


def _header(path: Path, view: memoryview) -> tuple[str, memoryview]:
    """Return the form of the file and its header. If the first number exceeds the file, it is no length: the file has the old form, a bare
    message.
    """
    length = struct.unpack_from("<Q", view)[0] if len(view) >= 8 else 0
    if 0 < length <= len(view) - 8:
        if length > _MAX_HEADER_BYTES:
            raise NotARunError(f"'{path}' claims a header of {length} bytes, larger than any; it is no dump file of Ascend")
        header = view[8 : 8 + length]
        return ("nano" if bytes(header[:4]) == NANO_MAGIC else "protobuf"), header
    if view[0] != 0x0A:  # the tag of the version, with which the message begins
        raise NotARunError(
            f"'{path}' is no dump file of Ascend, or is cut off: it claims a header of {length} bytes in a file of {len(view)}; "
            "copy it again, or give another"
        )
    return "old", view


def _tensors(path: Path, form: str, message: DumpMessage, content: memoryview | None) -> Iterator[AclTensor]:
    listed = (tensor for tensors in message.tensors.values() for tensor in tensors)
    described = sorted(listed, key=lambda tensor: _DATA_ORDER.index(_role(tensor)))
    if content is not None:
        _check_sizes(path, form, described, content)
        _place(described, content)
    numbering = GE_DTYPES if form == "nano" else PROTO_DTYPES
    name = match_acl_name(path.name)
    for tensor in described:
        if name is not None and name.thread is not None:
            _cut(tensor, message, name.thread)
        role = _role(tensor)
        is_opaque = role not in ("input", "output")
        yield AclTensor(
            role=role,
            index=tensor.index,
            dtype="uint8" if is_opaque else bits_of(tensor.dtype, numbering),
            format=format_name(tensor.format),
            shape=(len(tensor.data),) if is_opaque else tensor.shape,
            original_shape=tensor.original_shape,
            original_format=format_name(tensor.original_format) if tensor.original_format is not None else "",
            groups=tensor.sub_format if 1 < tensor.sub_format < 1 << 31 else 1,
            size_bytes=tensor.size,
            path=path,
            _bytes=tensor.data if len(tensor.data) or not tensor.size else None,
        )


def _role(tensor: TensorMessage) -> str:
    """Return the role of a tensor: an exception dump has the memory of a kernel's arguments as inputs without a dtype and a shape."""
    return "argument" if tensor.input_type == _ARGUMENT and not (tensor.dtype or tensor.shape) else tensor.role


def _cut(tensor: TensorMessage, message: DumpMessage, thread: int) -> None:
    """Give the tensor the shape of one thread's part of it."""
    shape = slice_shape(message.attributes.values(), thread, tensor.role, tensor.index)
    if shape is not None:
        tensor.shape, tensor.original_shape = shape, ()


def _check_sizes(path: Path, form: str, described: list[TensorMessage], content: memoryview) -> None:
    """Hold the sizes against the file. If they do not fit, tensors without an address were left out of it."""
    total = sum(tensor.size for tensor in described)
    if total <= len(content):
        return
    if form != "nano":
        for tensor in described:
            tensor.is_left_out = tensor.address == 0
        total = sum(tensor.size for tensor in described if not tensor.is_left_out)
    if total > len(content):
        raise DamagedRunError(
            f"'{path}' claims tensors of {total} bytes, but {len(content)} follow its header: it is cut off or damaged; "
            "copy it again, or dump again"
        )


def _place(described: list[TensorMessage], content: memoryview) -> None:
    at = 0
    for tensor in described:
        if not tensor.is_left_out:
            tensor.data = content[at : at + tensor.size]
            at += tensor.size
