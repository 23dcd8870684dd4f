# SPDX-License-Identifier: Apache-2.0
"""Read the header of an ACL dump: a protobuf message, decoded by the few rules of its wire format.

Only the fields that we use are decoded, to the depth that the message has; the rest is skipped by its length. So nesting cannot run away,
and a length beyond the bytes is refused. Bytes fields stay views.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["MAX_DIMS", "MAX_ENTRIES", "DumpMessage", "TensorMessage", "WireError", "read_message"]

_Value: TypeAlias = "int | memoryview"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
MAX_ENTRIES = 1 << 14  # tensors and attributes of one operator; fused optimizers have some thousand
MAX_DIMS = 64

# field numbers of an output and an input, which differ
_OUTPUT = {1: "dtype", 2: "format", 3: "shape", 4: "original_op", 5: "data", 6: "size", 7: "original_shape", 8: "sub_format", 9: "address"}
_INPUT = {1: "dtype", 2: "format", 3: "shape", 4: "data", 5: "size", 6: "original_shape", 7: "sub_format", 8: "address", 11: "input_type"}
_BUFFER = {2: "data", 3: "size"}
_ROLES = {3: ("output", _OUTPUT), 4: ("input", _INPUT), 5: ("buffer", _BUFFER), 8: ("workspace", _BUFFER)}


class WireError(ValueError):
    """Bytes that are no such message; the text is the reason, without a place."""


@dataclass(slots=True)
class TensorMessage:
    """One tensor as the header describes it, numbers not yet turned into names."""

    role: str
    index: int
    dtype: int = 0
    format: int = 2
    shape: tuple[int, ...] = ()
    original_shape: tuple[int, ...] = ()
    original_name: str = ""
    original_format: int | None = None
    size: int = 0
    sub_format: int = 0
    address: int = 0
    input_type: int = 0
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    is_left_out: bool = False


@dataclass(slots=True)
class DumpMessage:
    """The header of one file; tensors of each role in the order of the header."""

    version: str = ""
    time: int = 0
    op_name: str = ""
    note: str = ""
    tensors: dict[str, list[TensorMessage]] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)


def read_message(data: memoryview) -> DumpMessage:
    """Decode a whole header, or raise WireError."""
    message = DumpMessage()
    num_entries = 0
    for number, value in _fields(data):
        if number in (3, 4, 5, 7, 8):
            num_entries += 1
            if num_entries > MAX_ENTRIES:
                raise WireError(f"it lists more than {MAX_ENTRIES} tensors and attributes")
        if number in _ROLES:
            role, names = _ROLES[number]
            among = message.tensors.setdefault(role, [])
            among.append(_tensor(role, len(among), names, _part(value)))
        elif number == 1:
            message.version = _text(value)
        elif number == 2:
            message.time = _integer(value)
        elif number == 6:
            message.op_name = _text(value)
        elif number == 7:
            attribute = dict(_fields(_part(value)))
            message.attributes[_text(attribute.get(1, memoryview(b"")))] = _text(attribute.get(2, memoryview(b"")))
        elif number == 9:
            message.note = _text(value)
    return message


def _tensor(role: str, index: int, names: dict[int, str], data: memoryview) -> TensorMessage:
    tensor = TensorMessage(role, index, format=0 if role in ("input", "output") else 2)
    for number, value in _fields(data):
        name = names.get(number)
        if name in ("shape", "original_shape"):
            setattr(tensor, name, _dims(_part(value)))
        elif name == "original_op":
            original = dict(_fields(_part(value)))
            tensor.original_name = _text(original.get(1, memoryview(b"")))
            if tensor.original_name or 4 in original:
                tensor.original_format = _integer(original.get(4, 0))  # the number 0 is never written
        elif name == "data":
            tensor.data = _part(value)
        elif name is not None:
            setattr(tensor, name, _integer(value))
    return tensor


def _dims(data: memoryview) -> tuple[int, ...]:
    """Read sizes, packed into one field or one field each."""
    dims: list[int] = []
    for number, value in _fields(data):
        if number != 1:
            continue
        for size in [value] if isinstance(value, int) else _varints(value):
            dims.append(size)
            if len(dims) > MAX_DIMS:
                raise WireError(f"it gives a tensor more than {MAX_DIMS} dimensions")
    return tuple(size - (1 << 64) if size >= 1 << 63 else size for size in dims)


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _fields(data: memoryview) -> Iterator[tuple[int, _Value]]:
    """Iterate over the fields of a message in order: a number for the numeric wire types, a view for the others."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError("it has a field without a number")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        length, at = _varint(data, at) if kind == _BYTES else ({_FIXED64: 8, _FIXED32: 4}.get(kind, -1), at)
        if length < 0:
            raise WireError(f"field {number} has the unknown wire type {kind}")
        if length > len(data) - at:
            raise WireError(f"field {number} claims {length} bytes where {len(data) - at} are left")
        part = data[at : at + length]
        yield number, part if kind == _BYTES else int.from_bytes(part, "little")
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    for count in range(_MAX_VARINT_BYTES):
        if at + count >= len(data):
            raise WireError("a number in it has no end")
        byte = data[at + count]
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & (1 << 64) - 1, at + count + 1
    raise WireError("a number in it has no end")


def _part(value: _Value) -> memoryview:
    if isinstance(value, int):
        raise WireError("a number stands where a message or text belongs")
    return value


def _integer(value: _Value) -> int:
    """Return an integer; sint fields of the message are small, so negative ones come as 64-bit two's complement."""
    if not isinstance(value, int):
        raise WireError("a text stands where a number belongs")
    return value


def _text(value: _Value) -> str:
    return bytes(_part(value)[: 1 << 20]).decode("utf-8", errors="replace")
