# SPDX-License-Identifier: Apache-2.0
"""Know the dtypes of ACL dumps: their numbers, their layout in bytes, and their values.

Elements travel as *codes*, an array of the smallest NumPy dtype that holds their bits: the layout of a tensor is undone on codes, and
values are made afterwards. A dtype that NumPy lacks becomes float32 (bfloat16, the 8- and 4-bit floats) or int8 and uint8 (the narrow
integers), each value exactly.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ulpscope.errors import InputError
from ulpscope.model import DTYPES
from ulpscope.numerics.casting import byte_values

__all__ = ["GE_DTYPES", "PROTO_DTYPES", "bits_of", "carried_as", "codes_of", "element_bits", "num_bytes", "values_of"]

# By position. The message and Ascend's graph engine (GE) count differently.
PROTO_DTYPES: Final = tuple(
    """undefined float32 float16 int8 uint8 int16 uint16 int32 int64 uint32 uint64 bool float64 string dual_sub_int8 dual_sub_uint8
    complex64 complex128 qint8 qint16 qint32 quint8 quint16 resource string_ref dual variant bfloat16 int4 uint1 int2 uint2 complex32
    hifloat8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float6_e3m2fn float6_e2m3fn float4_e2m1fn float4_e1m2""".split()
)
GE_DTYPES: Final = tuple(
    """float32 float16 int8 int32 uint8 undefined int16 uint16 uint32 int64 uint64 float64 bool string dual_sub_int8 dual_sub_uint8
    complex64 complex128 qint8 qint16 qint32 quint8 quint16 resource string_ref dual variant bfloat16 undefined int4 uint1 int2 uint2
    complex32 hifloat8 float8_e5m2 float8_e4m3fn float8_e8m0fnu float6_e3m2fn float6_e2m3fn float4_e2m1fn float4_e1m2""".split()
)
_SAME_BITS = {
    "qint8": "int8",
    "qint16": "int16",
    "qint32": "int32",
    "quint8": "uint8",
    "quint16": "uint16",
    "dual_sub_int8": "int8",
    "dual_sub_uint8": "uint8",
}
_OPAQUE = frozenset({"undefined", "string", "resource", "string_ref", "dual", "variant"})
_NARROW = {
    "int4": 4,
    "int2": 2,
    "uint2": 2,
    "uint1": 1,
    "float6_e3m2fn": 6,
    "float6_e2m3fn": 6,
    "float4_e2m1fn": 4,
    "float4_e1m2": 4,
}
# exponent bits, fraction bits and exponent bias; neither has an infinity or a NaN
_SMALL_FLOATS = {"float4_e2m1fn": (2, 1, 1), "float4_e1m2": (1, 2, 1)}
_NUMPY = {name: name for name in DTYPES if not name.startswith(("bfloat", "float8", "complex32"))}
_NUMPY |= {"bfloat16": "uint16", "complex32": "uint32", "bool": "uint8"}


def bits_of(number: int, numbering: tuple[str, ...]) -> str:
    """Return the name of a dtype number. Quantised integers are integers; texts, handles and unknown numbers are plain bytes."""
    name = numbering[number] if 0 <= number < len(numbering) else "undefined"
    return "uint8" if name in _OPAQUE else _SAME_BITS.get(name, name)


def element_bits(dtype: str) -> int:
    """Return how many bits one element takes in a file."""
    return DTYPES[dtype].size_bytes * 8 if dtype in DTYPES else _NARROW.get(dtype, 8)


def num_bytes(dtype: str, numel: int) -> int:
    """Return how many bytes `numel` elements take at least."""
    return (numel * element_bits(dtype) + 7) // 8


def carried_as(dtype: str) -> str:
    """Return the dtype of ours that holds every value exactly; of the floats the coarsest, since values are judged by their dtype's
    step.
    """
    if dtype in DTYPES:
        return dtype
    return {"i": "int8", "u": "uint8"}.get(dtype[0], "bfloat16")


def codes_of(dtype: str, data: memoryview, numel: int) -> npt.NDArray[Any]:
    """Return the first `numel` elements as a flat array of codes, without a copy where a code has whole bytes."""
    raw = np.frombuffer(data, np.uint8)
    bits = element_bits(dtype)
    codes: npt.NDArray[Any]
    if bits >= 8:
        codes = raw[: numel * bits // 8].view(np.dtype(_NUMPY.get(dtype, "uint8")).newbyteorder("<"))
        return codes
    if dtype == "uint1":
        return np.unpackbits(raw[: num_bytes(dtype, numel)], count=numel)
    if 8 % bits:
        raise InputError(f"how {dtype} values are packed into bytes is not known, so they cannot be read; dump the tensor in another dtype")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed = raw[: num_bytes(dtype, numel), None] >> shifts
    codes = (packed & np.uint8((1 << bits) - 1)).reshape(-1)[:numel]
    return codes


def values_of(dtype: str, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Turn codes into numbers in a dtype of NumPy."""
    values: npt.NDArray[Any] = codes
    if dtype == "bfloat16":
        values = (codes.astype("<u4") << 16).view("<f4")
    elif dtype == "complex32":
        values = np.ascontiguousarray(codes)[..., None].view("<f2").astype("<f4").view("<c8")[..., 0]
    elif dtype == "bool":
        values = codes != 0
    elif dtype in ("int4", "int2"):
        half = 1 << (element_bits(dtype) - 1)
        values = (codes ^ np.uint8(half)).astype(np.int8) - np.int8(half)
    elif dtype in _SMALL_FLOATS or dtype == "hifloat8" or dtype.startswith("float8"):
        values = _table(dtype)[codes]
    return values


@cache
def _table(dtype: str) -> npt.NDArray[np.float32]:
    """Return the value of each code."""
    if dtype == "hifloat8":
        values = np.array([_hifloat8(code) for code in range(256)])
    elif dtype in _SMALL_FLOATS:
        values = np.array([_small_float(code, *_SMALL_FLOATS[dtype]) for code in range(16)])
    else:
        values = byte_values(dtype)
    table = values.astype(np.float32)
    table.flags.writeable = False
    return table


def _small_float(code: int, exponent_bits: int, fraction_bits: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent_bits + fraction_bits) else 1.0
    exponent = (code >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << fraction_bits) - 1)
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - fraction_bits)
    return sign * math.ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits)


def _hifloat8(code: int) -> float:
    """Decode a hifloat8: a sign, a prefix that gives the width of the exponent, the exponent as sign and size with a hidden leading one,
    the fraction.

    The prefixes 11, 10, 01, 001 and 0001 stand for exponents of 4, 3, 2, 1 and 0 bits; under 0000 lie the powers of two from -22 to -16.
    """
    special = {0x00: 0.0, 0x80: math.nan, 0x6F: math.inf, 0xEF: -math.inf}
    if code in special:
        return special[code]
    sign = -1.0 if code & 0x80 else 1.0
    if code & 0x78 == 0:
        return sign * math.ldexp(1.0, (code & 7) - 23)
    width, prefix_bits = _hifloat8_exponent(code)
    fraction_bits = 7 - prefix_bits - width
    exponent = 0
    if width:
        field = (code >> fraction_bits) & ((1 << width) - 1)
        size = 1 << (width - 1) | field & ((1 << (width - 1)) - 1)
        exponent = -size if field >> (width - 1) else size
    fraction = code & ((1 << fraction_bits) - 1)
    return sign * math.ldexp((1 << fraction_bits) + fraction, exponent - fraction_bits)


def _hifloat8_exponent(code: int) -> tuple[int, int]:
    """Return how many bits the exponent has, and how many the prefix before it."""
    if code & 0x60:
        return 1 + ((code >> 5) & 3), 2
    return (1, 3) if code & 0x10 else (0, 4)
