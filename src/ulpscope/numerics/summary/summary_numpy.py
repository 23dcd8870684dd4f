# SPDX-License-Identifier: Apache-2.0
"""Take statistics and fingerprint of a tensor in plain NumPy: one pass in blocks that fit a core's cache.

This is the tested fallback of the compiled kernel; fingerprint, counts, minimum and maximum are the same bits, mean and rms agree to about
twelve digits. Stored bits decide what is zero or subnormal, so a process that flushes subnormals counts them too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ulpscope.format.fingerprint import BLOCK_WORDS, EMPTY, block_sums
from ulpscope.model import Summary, dtype
from ulpscope.numerics.casting import byte_values, real_dtype, reals, widen
from ulpscope.numerics.summary.moments import Moments, summary_of

__all__ = ["summarize_blocks"]


def summarize_blocks(name: str, raw: npt.NDArray[np.uint8]) -> tuple[Summary, str]:
    """Take statistics and fingerprint of raw bytes."""
    name = real_dtype(name)
    sums, moments, codes = EMPTY, Moments(), np.zeros(256, np.int64)
    is_coded = dtype(name).size_bytes == 1
    with np.errstate(all="ignore"):
        for start in range(0, raw.size, 8 * BLOCK_WORDS):
            block = raw[start : start + 8 * BLOCK_WORDS]
            sums += block_sums(block)
            if is_coded:
                codes += np.bincount(block, minlength=256)
            else:
                _add_block(moments, name, reals(name, block))
    if is_coded:
        _add_codes(moments, name, codes)
    return summary_of(name, raw, moments), str(sums)


def _add_block(moments: Moments, name: str, carrier: npt.NDArray[Any]) -> None:
    if dtype(name).kind != "float":
        moments.add_range(float(carrier.min()), float(carrier.max()))
        moments.zero += carrier.size - int(np.count_nonzero(carrier))
        _add_sums(moments, carrier.astype(np.float64))
        return
    _add_counts(moments, name, carrier)
    values = widen(name, carrier)
    lowest, highest = float(values.min()), float(values.max())
    if math.isfinite(lowest) and math.isfinite(highest):
        moments.add_range(lowest, highest)
        _add_sums(moments, values)
    else:
        _add_nonfinite_block(moments, values)


def _add_counts(moments: Moments, name: str, carrier: npt.NDArray[Any]) -> None:
    entry = dtype(name)
    unsigned = f"<u{entry.size_bytes}"
    magnitude = carrier.view(unsigned) & np.array((1 << (8 * entry.size_bytes - 1)) - 1, unsigned)
    zero = magnitude.size - int(np.count_nonzero(magnitude))
    moments.zero += zero
    moments.subnormal += int(np.count_nonzero(magnitude < np.array(1 << entry.mantissa, unsigned))) - zero


def _add_nonfinite_block(moments: Moments, values: npt.NDArray[np.float64]) -> None:
    moments.nan += int(np.count_nonzero(np.isnan(values)))
    moments.posinf += int(np.count_nonzero(values == np.inf))
    moments.neginf += int(np.count_nonzero(values == -np.inf))
    ordered = values[~np.isnan(values)]
    if ordered.size:
        moments.add_range(float(ordered.min()), float(ordered.max()))
    _add_sums(moments, values[np.isfinite(values)])


def _add_sums(moments: Moments, finite: npt.NDArray[np.float64]) -> None:
    """Add the sums of a block, and overwrite the block."""
    moments.sum += float(finite.sum())
    moments.sum_squares += float(np.square(finite, out=finite).sum())


def _add_codes(moments: Moments, name: str, codes: npt.NDArray[np.int64]) -> None:
    """Add the statistics of a one-byte dtype from how often each code occurs."""
    values = byte_values(name)
    present = codes > 0
    moments.nan = int(codes[np.isnan(values)].sum())
    moments.posinf = int(codes[values == np.inf].sum())
    moments.neginf = int(codes[values == -np.inf].sum())
    moments.zero = int(codes[values == 0].sum())
    moments.subnormal = int(codes[(values != 0) & (np.abs(values) < dtype(name).tiny)].sum())
    ordered = values[present & ~np.isnan(values)]
    if ordered.size:
        moments.add_range(float(ordered.min()), float(ordered.max()))
    finite = present & np.isfinite(values)
    moments.sum = float(np.dot(codes[finite], values[finite]))
    moments.sum_squares = float(np.dot(codes[finite], values[finite] ** 2))
