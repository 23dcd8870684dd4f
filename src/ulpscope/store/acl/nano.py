# SPDX-License-Identifier: Apache-2.0
"""Read the header of an ACL dump in the form without protobuf: a magic number and a version, then parts with a tag and a length.

The inputs (tag 4) and the outputs (tag 5) each begin with their count. A tensor is a row of fixed fields followed by its own tagged parts:
the shape, the original shape, and the name of the original operator.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ulpscope.store.acl.wire import MAX_DIMS, MAX_ENTRIES, DumpMessage, TensorMessage, WireError

__all__ = ["NANO_MAGIC", "read_nano"]

NANO_MAGIC = b"\x5a\x5a\x5a\x5a"
_HEAD = struct.Struct("<4sI")
_PART = struct.Struct("<II")
_COUNT = struct.Struct("<I")
# dtype, format, kind of address, address, offset, size, length of the parts
_INPUT = struct.Struct("<iiiQQQI")
# the same with index, dtype and format of the original in between
_OUTPUT = struct.Struct("<iiiiiiQQQI")
_ROLES = {4: "input", 5: "output"}
_SHAPE, _ORIGINAL_SHAPE, _ORIGINAL_NAME = 0, 1, 2


def read_nano(data: memoryview) -> DumpMessage:
    """Decode a whole header, or raise WireError."""
    _, version = _unpacked(_HEAD, data, 0)
    message = DumpMessage(version=str(version))
    for tag, part in _parts(data[_HEAD.size :]):
        if tag in _ROLES:
            message.tensors[_ROLES[tag]] = list(_tensors(_ROLES[tag], part))
    return message


def _parts(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at < len(data):
        tag, length = _unpacked(_PART, data, at)
        at += _PART.size
        if length > len(data) - at:
            raise WireError(f"the part with tag {tag} claims {length} bytes where {len(data) - at} are left")
        yield tag, data[at : at + length]
        at += length


def _tensors(role: str, data: memoryview) -> Iterator[TensorMessage]:
    (count,) = _unpacked(_COUNT, data, 0)
    if count > MAX_ENTRIES:
        raise WireError(f"it claims {count} {role}s, more than {MAX_ENTRIES}")
    at = _COUNT.size
    for index in range(count):
        tensor, length, at = _described(role, index, data, at)
        if length > len(data) - at:
            raise WireError(f"{role} {index} claims {length} bytes where {len(data) - at} are left")
        for tag, part in _parts(data[at : at + length]):
            if tag == _SHAPE:
                tensor.shape = _dims(part)
            elif tag == _ORIGINAL_SHAPE:
                tensor.original_shape = _dims(part)
            elif tag == _ORIGINAL_NAME:
                tensor.original_name = bytes(part).rstrip(b"\0").decode("utf-8", errors="replace")
        yield tensor
        at += length


def _described(role: str, index: int, data: memoryview, at: int) -> tuple[TensorMessage, int, int]:
    """Read the fixed fields of a tensor, the length of its parts, and where these begin."""
    if role == "input":
        dtype, format, _, address, _, size, length = _unpacked(_INPUT, data, at)
        return TensorMessage(role, index, dtype=dtype, format=format, address=address, size=size), length, at + _INPUT.size
    dtype, format, _, _, _, original, address, _, size, length = _unpacked(_OUTPUT, data, at)
    tensor = TensorMessage(role, index, dtype=dtype, format=format, original_format=original, address=address, size=size)
    return tensor, length, at + _OUTPUT.size


def _dims(data: memoryview) -> tuple[int, ...]:
    if len(data) % 8 or len(data) // 8 > MAX_DIMS:
        raise WireError(f"a shape in it has {len(data)} bytes, and sizes have eight each")
    return struct.unpack(f"<{len(data) // 8}q", data)


def _unpacked(kind: struct.Struct, data: memoryview, at: int) -> tuple[int, ...]:
    if kind.size > len(data) - at:
        raise WireError("it ends in the middle of a part")
    return kind.unpack_from(data, at)
