# SPDX-License-Identifier: Apache-2.0
"""Turn raw bytes into NumPy values without a framework.

NumPy has no bfloat16 and no float8, so a tensor travels in a *carrier*: an array whose elements hold the same bits (uint16 for bfloat16,
uint8 for float8). `widen` turns a block of a carrier into float64 values; a complex number becomes two reals, a bool 0 or 1. Widening is
exact for everything but 64-bit integers beyond 2**53.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ulpscope.model import TensorData
from ulpscope.numerics.buffers import code_values, flat_view, real_dtype

__all__ = ["as_array", "as_bytes", "byte_values", "bytes_at", "real_dtype", "reals", "widen"]

Float64Array = npt.NDArray[np.float64]

_CARRIERS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "complex128": "<c16",
    "complex64": "<c8",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "u1",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
    "float8_e4m3fnuz": "u1",
    "float8_e5m2fnuz": "u1",
    "float8_e8m0fnu": "u1",
}


def as_bytes(data: TensorData) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor as a flat array, without a copy; refuse a number of bytes that does not fit the shape."""
    return np.frombuffer(flat_view(data), np.uint8)


class _Memory:
    """Bytes at an address, in the form that NumPy reads."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {"data": (address, True), "shape": (size_bytes,), "typestr": "|u1", "version": 3}


def bytes_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """View memory that the caller keeps alive."""
    return np.asarray(_Memory(address, size_bytes)) if size_bytes else np.empty(0, np.uint8)


def as_array(data: TensorData) -> npt.NDArray[Any]:
    """Return the tensor in its carrier dtype and shape, without a copy; complex32 gets a last axis for its two parts."""
    if data.dtype == "complex32":
        return as_bytes(data).view("<f2").reshape(*data.shape, 2)
    return as_bytes(data).view(_CARRIERS[data.dtype]).reshape(data.shape)


def reals(name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """View raw bytes as a flat carrier of reals."""
    return raw.view(_CARRIERS[real_dtype(name)])


def widen(name: str, carrier: npt.NDArray[Any]) -> Float64Array:
    """Widen a block to float64; complex values become a flat array of parts."""
    if carrier.dtype.kind == "c":
        carrier = np.ascontiguousarray(carrier).reshape(-1).view(f"<f{carrier.dtype.itemsize // 2}")
    if name == "bfloat16":
        carrier = (carrier.astype("<u4") << 16).view("<f4")
    elif carrier.dtype.itemsize == 1:
        values: Float64Array = byte_values(name)[carrier.view(np.uint8)]
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        widened: Float64Array = carrier.astype(np.float64)
    return widened


@cache
def byte_values(name: str) -> Float64Array:
    """Return the value of each of the 256 codes of a one-byte dtype."""
    values: Float64Array = np.array(code_values(name))
    values.flags.writeable = False
    return values
