# SPDX-License-Identifier: Apache-2.0
"""Read raw bytes of tensors without NumPy: their address, their number, and the value at one position."""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from functools import cache
from typing import Any

from ulpscope.errors import DamagedRunError
from ulpscope.model import TensorData, dtype

__all__ = ["address_of", "code_values", "flat_view", "real_dtype", "value_at"]

_REAL = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
_FORMATS = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "uint64": "<Q",
    "uint32": "<I",
    "uint16": "<H",
}
# exponent bits, stored fraction bits, exponent bias, and which codes are NaN or infinite
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}


class _Buffer(ctypes.Structure):
    """`Py_buffer` of CPython."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.c_void_p]
_release_buffer.restype = None


def address_of(buffer: Any) -> int:
    """Return the address of a contiguous buffer. It is good for as long as the caller keeps the buffer."""
    view = _Buffer()
    _get_buffer(buffer, ctypes.byref(view), 0)
    address: int = view.buf or 0
    _release_buffer(ctypes.byref(view))
    return address


def flat_view(data: TensorData) -> memoryview:
    """Return the bytes of a tensor, without a copy; refuse a number of bytes that does not fit the shape."""
    view = memoryview(data.buffer)
    expected = math.prod(data.shape) * dtype(data.dtype).size_bytes
    if view.nbytes != expected:
        raise DamagedRunError(
            f"a {data.dtype} tensor of shape {data.shape} has {expected} bytes, but {view.nbytes} were stored: "
            "the file is damaged or its index is wrong; record the run again"
        )
    if view.nbytes == 0:
        return memoryview(b"")
    if view.format == "B" and view.ndim == 1:
        return view
    try:
        return view.cast("B")
    except (TypeError, NotImplementedError):  # complex numbers have no format that memoryview can cast
        import numpy as np

        return np.frombuffer(view, np.uint8).data


def real_dtype(name: str) -> str:
    """Return the dtype of the reals in a tensor: that of one part for a complex dtype, else the dtype itself."""
    return _REAL.get(name, name)


def value_at(name: str, raw: memoryview, position: int) -> float:
    """Return one of the reals of a tensor, by its position among them."""
    name = real_dtype(name)
    if name == "bfloat16":
        (bits,) = struct.unpack_from("<H", raw, 2 * position)
        (value,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    elif name in _FORMATS:
        (value,) = struct.unpack_from(_FORMATS[name], raw, dtype(name).size_bytes * position)
    else:
        value = code_values(name)[raw[position]]
    return float(value)


@cache
def code_values(name: str) -> array[float]:
    """Return the value of each of the 256 codes of a one-byte dtype."""
    if name == "bool":
        return array("d", [0.0] + [1.0] * 255)
    if name in ("uint8", "int8"):
        return array("d", [code - 256 if name == "int8" and code > 127 else code for code in range(256)])
    if name == "float8_e8m0fnu":
        return array("d", [2.0 ** (code - 127) for code in range(255)] + [math.nan])
    return array("d", [_float8_value(code, *_FLOAT8[name]) for code in range(256)])


def _float8_value(code: int, exponent_bits: int, fraction_bits: int, bias: int, special: str) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code & 0x7F) >> fraction_bits, code & ((1 << fraction_bits) - 1)
    if special == "fnuz" and code == 0x80:
        return math.nan
    if special == "fn" and code & 0x7F == 0x7F:
        return math.nan
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - fraction_bits)
    return sign * math.ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits)
