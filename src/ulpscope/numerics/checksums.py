# SPDX-License-Identifier: Apache-2.0
"""CRC-32 for compiled code, as zlib has it: what the kernel's function wants, and where it is."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ulpscope.numerics.kernel import KERNEL

__all__ = ["checksum_addresses", "checksum_tables"]


@lru_cache(maxsize=1)
def checksum_tables() -> NDArray[np.uint32]:
    """What each byte adds to a checksum, and what it does so many bytes later."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, np.uint32(0xEDB88320), np.uint32(0)) ^ table >> np.uint32(1)
    tables = [table]
    for _ in range(7):
        tables.append(tables[-1] >> np.uint32(8) ^ table[tables[-1] & 0xFF])
    return np.array(tables)


def checksum_addresses() -> tuple[int, int]:
    """Where the kernel's function and its tables are, for as long as the process lives; zeros where there is none."""
    if KERNEL is None:
        return 0, 0
    return ctypes.cast(KERNEL.ulpscope_checksum, ctypes.c_void_p).value or 0, checksum_tables().ctypes.data
