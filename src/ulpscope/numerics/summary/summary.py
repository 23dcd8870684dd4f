# SPDX-License-Identifier: Apache-2.0
"""Take statistics and fingerprint of one tensor, in one pass over its bytes.

The compiled kernel does it where it was built, plain NumPy elsewhere or when ULPSCOPE_NO_KERNEL is set to 1. Both give the same answer. The
`_address` forms take memory that the caller keeps alive and unchanged during the call; no reference is kept.

A complex number counts as two reals everywhere, also in `Summary.numel`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ulpscope.format.fingerprint import fingerprint_blocks
from ulpscope.model import Summary
from ulpscope.numerics.casting import bytes_at
from ulpscope.numerics.kernel import KERNEL
from ulpscope.numerics.summary.summary_kernel import PreparedView, fingerprinting_with, summarizing_views_with, summarizing_with
from ulpscope.numerics.summary.summary_numpy import summarize_blocks

__all__ = ["PreparedView", "fingerprint", "fingerprint_address", "summarize", "summarize_address", "summarize_view"]


def _numpy_summarize_address(dtype: str, address: int, size_bytes: int) -> tuple[Summary, str]:
    return summarize_blocks(dtype, bytes_at(address, size_bytes))


def _numpy_fingerprint_address(address: int, size_bytes: int) -> str:
    return fingerprint_blocks(bytes_at(address, size_bytes))


def _no_summary(view: PreparedView, address: int) -> None:
    return None


summarize_address: Callable[[str, int, int], tuple[Summary, str]]
"""Take statistics and fingerprint of memory: dtype, address and size in bytes."""
summarize_address = _numpy_summarize_address if KERNEL is None else summarizing_with(KERNEL)

summarize_view: Callable[[PreparedView, int], tuple[Summary, str] | None]
"""Take statistics and fingerprint of a view at an address, as it lies; None where it has to be gathered first."""
summarize_view = _no_summary if KERNEL is None else summarizing_views_with(KERNEL)

fingerprint_address: Callable[[int, int], str]
"""Take the fingerprint of memory: address and size in bytes."""
fingerprint_address = _numpy_fingerprint_address if KERNEL is None else fingerprinting_with(KERNEL)


def summarize(dtype: str, data: npt.NDArray[np.uint8]) -> tuple[Summary, str]:
    """Take statistics and fingerprint of raw bytes, given as a flat contiguous array."""
    return summarize_address(dtype, _address(data), data.size)


def fingerprint(data: npt.NDArray[np.uint8]) -> str:
    """Take the fingerprint of raw bytes, given as a flat contiguous array."""
    return fingerprint_address(_address(data), data.size)


def _address(data: npt.NDArray[np.uint8]) -> int:
    if data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise ValueError(f"raw bytes are a contiguous uint8 array, not {data.dtype} with strides {data.strides}")
    address: int = data.__array_interface__["data"][0]
    return address
