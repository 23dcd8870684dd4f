# SPDX-License-Identifier: Apache-2.0
"""Declare the constants and structures that Python shares with `_kernel.c`."""

from __future__ import annotations

import ctypes

__all__ = [
    "BUCKETS",
    "BYTES_OF_PARTS",
    "CODES",
    "KINDS",
    "MOST_DIMS",
    "RESULT_BYTES",
    "RESULT_FORMAT",
    "UNIT_WORDS",
    "VERSION",
    "DifferenceOut",
    "SummaryOut",
    "Units",
]

# begin of layouts: tools/layouts.py writes it
VERSION = 7
KINDS = {
    "float64": 0,
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "int64": 4,
    "int32": 5,
    "int16": 6,
    "uint64": 7,
    "uint32": 8,
    "uint16": 9,
}
CODES = 10
BUCKETS = 496
MOST_DIMS = 16  # of a view that is read as it lies
BYTES_OF_PARTS = 524416  # room for a chunk of both sides
UNIT_WORDS = 14  # of `struct unit`, the last of which is its state
RESULT_BYTES = 176
RESULT_FORMAT = "=dddddddQQQQQQQQqqQQQ8s8s"  # of `struct result`


class SummaryOut(ctypes.Structure):
    """`struct summary` of _kernel.c."""

    _fields_ = [
        ("s0", ctypes.c_uint64),
        ("s1", ctypes.c_uint64),
        ("min", ctypes.c_double),
        ("max", ctypes.c_double),
        ("sum", ctypes.c_double),
        ("sum_squares", ctypes.c_double),
        ("nan", ctypes.c_uint64),
        ("posinf", ctypes.c_uint64),
        ("neginf", ctypes.c_uint64),
        ("zero", ctypes.c_uint64),
        ("subnormal", ctypes.c_uint64),
    ]


class DifferenceOut(ctypes.Structure):
    """`struct difference` of _kernel.c."""

    _fields_ = [
        ("max_abs", ctypes.c_double),
        ("max_rel", ctypes.c_double),
        ("sum_abs", ctypes.c_double),
        ("sum_squares", ctypes.c_double),
        ("sum_squares_subject", ctypes.c_double),
        ("sum_squares_reference", ctypes.c_double),
        ("sum_products", ctypes.c_double),
        ("within_1e4", ctypes.c_uint64),
        ("within_1e3", ctypes.c_uint64),
        ("within_5e3", ctypes.c_uint64),
        ("different", ctypes.c_uint64),
        ("sign_flips", ctypes.c_uint64),
        ("nan_disagree", ctypes.c_uint64),
        ("inf_disagree", ctypes.c_uint64),
        ("nonfinite", ctypes.c_uint64),
        ("worst", ctypes.c_int64),
        ("first_disagree", ctypes.c_int64),
        ("ulp_max", ctypes.c_uint64),
        ("ulp_counts", ctypes.c_uint64 * 496),
    ]


class Units(ctypes.Structure):
    """`struct units` of _kernel.c."""

    _fields_ = [
        ("units", ctypes.c_void_p),
        ("views", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
    ]


# end of layouts: tools/layouts.py writes it
