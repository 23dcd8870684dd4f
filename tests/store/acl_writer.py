# SPDX-License-Identifier: Apache-2.0
"""Write dump files of Ascend for the tests, from the description of the format alone.

Nothing here is shared with the reader: each layout is written element by element, from the sentence that says where an element lies.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Numbers of dtypes and formats in the message, and of dtypes in the graph engine.
DTYPE = {
    "float32": 1, "float16": 2, "int8": 3, "uint8": 4, "int16": 5, "uint16": 6, "int32": 7, "int64": 8, "uint32": 9, "uint64": 10,
    "bool": 11, "float64": 12, "string": 13, "complex64": 16, "complex128": 17, "qint8": 18, "bfloat16": 27, "int4": 28, "uint1": 29,
    "int2": 30, "uint2": 31, "complex32": 32, "hifloat8": 33, "float8_e5m2": 34, "float8_e4m3fn": 35,
    "float8_e8m0fnu": 36, "float6_e3m2fn": 37, "float6_e2m3fn": 38,
    "float4_e2m1fn": 39, "float4_e1m2": 40, "undefined": 0,
}  # fmt: skip
GE_DTYPE = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int16": 6, "int64": 9, "bool": 12, "bfloat16": 27, "int4": 29}
FORMAT = {
    "NCHW": 0, "NHWC": 1, "ND": 2, "NC1HWC0": 3, "FRACTAL_Z": 4, "NHWC1C0": 6, "C1HWNC0": 9, "NC1HWC0_C04": 12, "FRACTAL_Z_C04": 13,
    "HWCN": 16, "NC1KHKWHWC0": 17, "C1HWNCoC0": 25, "NDHWC": 27, "FRACTAL_ZZ": 28, "FRACTAL_NZ": 29, "NCDHW": 30, "DHWCN": 31,
    "NDC1HWC0": 32,
    "FRACTAL_Z_3D": 33, "DHWNC": 36, "FRACTAL_Z_3D_TRANSPOSE": 37, "FRACTAL_ZN_LSTM": 38, "C1HWC0": 49, "FRACTAL_NZ_C0_16": 50,
}  # fmt: skip


@dataclass(frozen=True)
class Described:
    """One tensor as a header describes it; `claimed` and `left_out` make the header lie."""

    data: bytes
    dtype: str = "float32"
    format: str = "ND"
    shape: Sequence[int] = ()
    original_shape: Sequence[int] = ()
    original_format: str = ""
    groups: int = 0
    address: int = 0x1000
    claimed: int | None = None
    left_out: bool = False
    input_type: int = 0

    @property
    def size(self) -> int:
        return len(self.data) if self.claimed is None else self.claimed


def described(array: Array, **options: Any) -> Described:
    """Describe a NumPy array as it is."""
    settings: dict[str, Any] = {"dtype": array.dtype.name, "shape": array.shape, "original_shape": array.shape} | options
    return Described(np.ascontiguousarray(array).tobytes(), **settings)


# The message.


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def number(field: int, value: int) -> bytes:
    """Write a field of proto3: the default is not written."""
    return varint(field << 3) + varint(value) if value else b""


def text(field: int, value: bytes | str) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(content)) + content if content else b""


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def shape_message(dims: Iterable[int], packed: bool = True) -> bytes:
    if packed:
        return text(1, b"".join(map(varint, dims)))
    return b"".join(varint(1 << 3) + varint(size) for size in dims)


def input_message(tensor: Described, *, with_data: bool = False) -> bytes:
    return (
        number(1, DTYPE[tensor.dtype])
        + number(2, FORMAT[tensor.format])
        + message(3, shape_message(tensor.shape))
        + text(4, tensor.data if with_data else b"")
        + number(5, tensor.size)
        + message(6, shape_message(tensor.original_shape, packed=False))
        + number(7, tensor.groups)
        + number(8, tensor.address)
        + number(11, tensor.input_type)
    )


def output_message(tensor: Described, *, with_data: bool = False) -> bytes:
    original = text(1, "original") + number(2, 0) + number(4, FORMAT[tensor.original_format]) if tensor.original_format else b""
    return (
        number(1, DTYPE[tensor.dtype])
        + number(2, FORMAT[tensor.format])
        + message(3, shape_message(tensor.shape))
        + (message(4, original) if original else b"")
        + text(5, tensor.data if with_data else b"")
        + number(6, tensor.size)
        + message(7, shape_message(tensor.original_shape))
        + number(8, tensor.groups)
        + number(9, tensor.address)
        + message(10, number(1, 1) + number(2, 4))
    )


def header(
    inputs: Sequence[Described] = (),
    outputs: Sequence[Described] = (),
    *,
    op_name: str = "layer/MatMul",
    buffers: Sequence[bytes] = (),
    spaces: Sequence[bytes] = (),
    attributes: dict[str, str] | None = None,
    with_data: bool = False,
) -> bytes:
    """Write the header; outputs stand before inputs, as the message numbers them."""
    return (
        text(1, "2.0")
        + number(2, 1675157077183551)
        + b"".join(message(3, output_message(tensor, with_data=with_data)) for tensor in outputs)
        + b"".join(message(4, input_message(tensor, with_data=with_data)) for tensor in inputs)
        + b"".join(message(5, text(2, data if with_data else b"") + number(3, len(data))) for data in buffers)
        + text(6, op_name)
        + b"".join(message(7, text(1, name) + text(2, value)) for name, value in (attributes or {}).items())
        + b"".join(message(8, number(3, len(data))) for data in spaces)
        + text(9, "")
    )


def dump_bytes(inputs: Sequence[Described] = (), outputs: Sequence[Described] = (), **options: Any) -> bytes:
    """Write a whole file: length, header, inputs, outputs, buffers, workspaces; last the arguments of a failed kernel, which are inputs
    too.
    """
    head = header(inputs, outputs, **options)
    content = b"".join(tensor.data for tensor in (*inputs, *outputs) if not (tensor.left_out or tensor.input_type == 1))
    extra = b"".join((*options.get("buffers", ()), *options.get("spaces", ())))
    arguments = b"".join(tensor.data for tensor in inputs if tensor.input_type == 1)
    return struct.pack("<Q", len(head)) + head + content + extra + arguments


def old_bytes(inputs: Sequence[Described] = (), outputs: Sequence[Described] = (), **options: Any) -> bytes:
    """Write the form without a length, with the values inside the message."""
    return header(inputs, outputs, with_data=True, **options)


def tagged(tag: int, content: bytes) -> bytes:
    return struct.pack("<II", tag, len(content)) + content


def nano_bytes(inputs: Sequence[Described] = (), outputs: Sequence[Described] = (), *, name: str = "original") -> bytes:
    """Write the form without protobuf."""

    def shapes(tensor: Described) -> bytes:
        dims = (struct.pack(f"<{len(sizes)}Q", *sizes) for sizes in (tensor.shape, tensor.original_shape))
        return b"".join(tagged(tag, content) for tag, content in enumerate(dims))

    def input_row(tensor: Described) -> bytes:
        parts = shapes(tensor)
        row = struct.pack("<iii", GE_DTYPE[tensor.dtype], FORMAT[tensor.format], 0) + struct.pack("<QQQ", tensor.address, 0, tensor.size)
        return row + struct.pack("<I", len(parts)) + parts

    def output_row(tensor: Described) -> bytes:
        parts = shapes(tensor) + tagged(2, name.encode())
        original = FORMAT[tensor.original_format or "ND"]
        row = struct.pack("<iiiiii", GE_DTYPE[tensor.dtype], FORMAT[tensor.format], 0, 0, GE_DTYPE[tensor.dtype], original)
        return row + struct.pack("<QQQ", tensor.address, 0, tensor.size) + struct.pack("<I", len(parts)) + parts

    head = struct.pack("<II", 0x5A5A5A5A, 1)
    head += tagged(4, struct.pack("<I", len(inputs)) + b"".join(map(input_row, inputs)))
    head += tagged(5, struct.pack("<I", len(outputs)) + b"".join(map(output_row, outputs)))
    return struct.pack("<Q", len(head)) + head + b"".join(tensor.data for tensor in (*inputs, *outputs))


# Layouts: each says in which element of which shape a value lies.


def _up(size: int, block: int) -> int:
    return (size + block - 1) // block


def _laid(array: Array, shape: Sequence[int], index: Callable[..., int | None]) -> Array:
    """Lay values at the flat position that `index` gives for their coordinates; the rest is zero."""
    out = np.zeros(math.prod(shape), array.dtype)
    for at in np.ndindex(*array.shape):
        out[index(*at)] = array[at]
    return out.reshape(shape)


def _flat(shape: Sequence[int], *at: int) -> int:
    position = 0
    for size, coordinate in zip(shape, at, strict=True):
        assert 0 <= coordinate < size
        position = position * size + coordinate
    return position


def fractal_nz(array: Array, w0: int = 16) -> Array:
    """Put (h, w) of the last two axes at [w//W0, h//16, h%16, w%W0]; a row is a matrix of height 1."""
    matrix = array.reshape(1, -1) if array.ndim == 1 else array
    *lead, height, width = matrix.shape
    shape = (*lead, _up(width, w0), _up(height, 16), 16, w0)
    return _laid(matrix, shape, lambda *at: _flat(shape, *at[:-2], at[-1] // w0, at[-2] // 16, at[-2] % 16, at[-1] % w0))


def fractal_zz(array: Array) -> Array:
    matrix = array.reshape(1, -1) if array.ndim == 1 else array
    *lead, height, width = matrix.shape
    shape = (*lead, _up(height, 16), _up(width, 16), 16, 16)
    return _laid(matrix, shape, lambda *at: _flat(shape, *at[:-2], at[-2] // 16, at[-1] // 16, at[-2] % 16, at[-1] % 16))


def nc1hwc0(nchw: Array, c0: int = 16) -> Array:
    n, c, h, w = nchw.shape
    shape = (n, _up(c, c0), h, w, c0)
    return _laid(nchw, shape, lambda n, c, h, w: _flat(shape, n, c // c0, h, w, c % c0))


def nhwc1c0(nchw: Array, c0: int = 16) -> Array:
    n, c, h, w = nchw.shape
    shape = (n, h, w, _up(c, c0), c0)
    return _laid(nchw, shape, lambda n, c, h, w: _flat(shape, n, h, w, c // c0, c % c0))


def c1hwnc0(nchw: Array, c0: int = 16) -> Array:
    n, c, h, w = nchw.shape
    shape = (_up(c, c0), h, w, n, c0)
    return _laid(nchw, shape, lambda n, c, h, w: _flat(shape, c // c0, h, w, n, c % c0))


def c1hwncoc0(nchw: Array, c0: int = 16) -> Array:
    """Put values only where the last two coordinates are equal."""
    n, c, h, w = nchw.shape
    shape = (_up(c, c0), h, w, n, c0, c0)
    return _laid(nchw, shape, lambda n, c, h, w: _flat(shape, c // c0, h, w, n, c % c0, c % c0))


def ndc1hwc0(ncdhw: Array, c0: int = 16) -> Array:
    n, c, d, h, w = ncdhw.shape
    shape = (n, d, _up(c, c0), h, w, c0)
    return _laid(ncdhw, shape, lambda n, c, d, h, w: _flat(shape, n, d, c // c0, h, w, c % c0))


def fractal_z(nchw: Array, c0: int = 16) -> Array:
    n, c, h, w = nchw.shape
    blocks = (_up(c, c0), h, w, _up(n, 16), 16, c0)
    stored = _laid(nchw, blocks, lambda n, c, h, w: _flat(blocks, c // c0, h, w, n // 16, n % 16, c % c0))
    return stored.reshape(-1, *blocks[3:])


def fractal_z_3d(ncdhw: Array, c0: int = 16) -> Array:
    n, c, d, h, w = ncdhw.shape
    blocks = (d, _up(c, c0), h, w, _up(n, 16), 16, c0)
    stored = _laid(ncdhw, blocks, lambda n, c, d, h, w: _flat(blocks, d, c // c0, h, w, n // 16, n % 16, c % c0))
    return stored.reshape(-1, *blocks[4:])


def fractal_z_c04(nchw: Array, c0: int = 16) -> Array:
    """Put up to four channels, padded to four, in a row of H, W and C, where they run fastest."""
    n, _, h, w = nchw.shape
    shape = (_up(4 * h * w, c0), _up(n, 16), 16, c0)

    def index(n: int, c: int, y: int, x: int) -> int:
        k = (y * w + x) * 4 + c
        return _flat(shape, k // c0, n // 16, n % 16, k % c0)

    return _laid(nchw, shape, index)


def grouped_fractal_z(nchw: Array, groups: int, c0: int = 16) -> Array:
    """Lay weights of a grouped convolution: as many groups as fill whole blocks lie in one block, along its diagonal."""
    return grouped_fractal_z_3d(nchw[:, :, None], groups, c0)


def grouped_fractal_z_3d(ncdhw: Array, groups: int, c0: int = 16) -> Array:
    total, c, d, h, w = ncdhw.shape
    co = total // groups
    e = min(math.lcm(math.lcm(c, c0) // c, math.lcm(co, 16) // co), groups)
    c1, co_padded = _up(e * c, c0), _up(e * co, 16) * 16
    num_blocks = _up(groups, e)

    def index(n: int, channel: int, z: int, y: int, x: int) -> int:
        group, o = divmod(n, co)
        ci = group % e * c + channel
        row = (((group // e * d + z) * c1 + ci // c0) * h + y) * w + x
        return row * co_padded * c0 + (group % e * co + o) * c0 + ci % c0

    return _laid(ncdhw, (num_blocks * d * c1 * h * w, co_padded // 16, 16, c0), index)


# Values of dtypes that NumPy lacks.


def bfloat16_bits(values: Array) -> Array:
    """Return the upper half of float32; the values have to be representable."""
    bits = values.astype("<f4").view("<u4")
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype("<u2")


def packed(codes: Sequence[int], bits: int) -> bytes:
    """Pack codes of less than a byte, the first in the lowest bits."""
    out = bytearray(_up(len(codes) * bits, 8))
    for at, code in enumerate(codes):
        out[at * bits // 8] |= (code & (1 << bits) - 1) << at * bits % 8
    return bytes(out)


# Overflows, as the device writes them.


def overflow_output(unit: int, words: Sequence[int], version: int = 0, valid: int = 1) -> bytes:
    """Write the newer form: six 32-bit numbers, then 64-bit ones."""
    return struct.pack("<IIIIII", 0x5A5A5A5A, version, valid, unit, 0, 8 * len(words)) + struct.pack(f"<{len(words)}Q", *words)


def old_overflow_output(
    *, dha: Sequence[int] = (), l2: Sequence[int] = (), core: Sequence[int] = (), statuses: Sequence[int] = (0, 0, 0)
) -> bytes:
    """Write the older form, 2048 bytes: the task of each of three units, then the status of each; a core's status behind its code and
    block.
    """
    out = bytearray(2048)
    for at, words in ((0, dha), (128, l2), (256, core)):
        struct.pack_into(f"<{len(words)}Q", out, at, *words)
    struct.pack_into("<Q", out, 512, statuses[0])
    struct.pack_into("<Q", out, 768, statuses[1])
    struct.pack_into("<QQQ", out, 1024, 0xC0DE, 5, statuses[2])
    return bytes(out)


def overflow_bytes(data: bytes) -> bytes:
    """Write an Opdebug file: an ordinary dump whose output describes the overflow."""
    return dump_bytes(outputs=[Described(data, dtype="uint8", shape=(len(data),))], op_name="Node_OpDebug")


STATISTICS_HEADINGS = (
    "Input/Output,Index,Data Size,Data Type,Format,Shape,Max Value,Min Value,Avg Value,"
    "Count,Nan Count,Negative Inf Count,Positive Inf Count\n"
)
