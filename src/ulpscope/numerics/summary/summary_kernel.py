# SPDX-License-Identifier: Apache-2.0
"""Take statistics and fingerprint of a tensor by the compiled kernel: a few microseconds of Python for each tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from math import prod, sqrt
from struct import Struct
from typing import Any

from ulpscope.model import Summary
from ulpscope.model import dtype as model_dtype
from ulpscope.numerics.casting import byte_values, bytes_at, real_dtype
from ulpscope.numerics.difference.pair_sums import LARGEST_SUM, SMALLEST_SUM
from ulpscope.numerics.gathering import pieces
from ulpscope.numerics.kernel import BEST_TARGET, CODES, KINDS, SummaryOut
from ulpscope.numerics.layouts import MOST_DIMS
from ulpscope.numerics.summary.lent_threads import shared_threads
from ulpscope.numerics.summary.moments import Moments, summary_of

__all__ = ["PreparedView", "addresses_of", "fingerprinting_with", "summarizing_views_with", "summarizing_with"]

_SUMMARY_FIELDS = Struct("=2Q4d5Q").unpack
_SUMS = ctypes.c_uint64 * 2
_LARGE = 1 << 20  # waking threads costs as much as a few hundred KB
_ALONE = (None, 0)
_SMALLEST_PIECE = 64  # torch copies smaller ones faster


def addresses_of(library: ctypes.CDLL) -> tuple[Any, ...]:
    """Return what compiled code needs to call the kernel itself: the addresses of its functions for summaries and fingerprints, the
    instruction set, the functions that give the arguments for a dtype and the threads for large tensors, the range in which sums of squares
    are exact, and the size from which a tensor is large.
    """
    functions = (library.ulpscope_summarize, library.ulpscope_fingerprint)
    summarize, fingerprint = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return summarize, fingerprint, BEST_TARGET, _arguments, shared_threads, SMALLEST_SUM, LARGEST_SUM, _LARGE


def fingerprinting_with(library: ctypes.CDLL, target: int = BEST_TARGET) -> Callable[[int, int], str]:
    """Return a function that takes the fingerprint of memory; `target` chooses the instruction set."""
    call = library.ulpscope_fingerprint

    def fingerprint_address(address: int, size_bytes: int) -> str:
        sums = _SUMS()
        call(address, size_bytes, ctypes.addressof(sums), target)
        return f"u1:{sums[1]:016x}{sums[0]:016x}"

    return fingerprint_address


def summarizing_with(library: ctypes.CDLL, target: int = BEST_TARGET) -> Callable[[str, int, int], tuple[Summary, str]]:
    """Return a function that summarises memory; `target` chooses the instruction set."""
    call = library.ulpscope_summarize
    addressof = ctypes.addressof

    def summarize_address(dtype: str, address: int, size_bytes: int) -> tuple[Summary, str]:
        kind, size, values, tiny = _arguments(dtype)
        out = SummaryOut()
        parallel, threads = shared_threads() if size_bytes >= _LARGE else _ALONE
        if call(kind, address, size_bytes, 0, 0, None, None, values, tiny, addressof(out), target, parallel, threads):
            raise ValueError(f"{size_bytes} bytes are no whole number of {dtype} elements")
        s0, s1, *fields = _SUMMARY_FIELDS(out)
        return _summary(dtype, address, size_bytes, size_bytes // size, fields), f"u1:{s1:016x}{s0:016x}"

    return summarize_address


class PreparedView:
    """The layout of a tensor that is not one piece of memory; summarising it as it lies is worthwhile where the pieces are not tiny."""

    def __init__(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> None:
        piece, extents, steps = pieces(model_dtype(dtype).size_bytes, shape, strides)
        numbers = ctypes.c_size_t * len(extents)
        self.is_worthwhile = piece >= _SMALLEST_PIECE and 0 < len(extents) <= MOST_DIMS
        self.size_bytes = piece * prod(extents)
        self.dtype = dtype
        self._extents, self._steps = numbers(*extents), numbers(*steps)
        self.layout = (piece, len(extents), ctypes.addressof(self._extents), ctypes.addressof(self._steps))


def summarizing_views_with(library: ctypes.CDLL, target: int = BEST_TARGET) -> Callable[[PreparedView, int], tuple[Summary, str] | None]:
    """Return a function that summarises a view at an address; it gives None where a number is not finite, or squares leave float64's
    range.
    """
    call = library.ulpscope_summarize
    addressof = ctypes.addressof

    def summarize_view(view: PreparedView, address: int) -> tuple[Summary, str] | None:
        kind, size, values, tiny = _arguments(view.dtype)
        out = SummaryOut()
        parallel, threads = shared_threads() if view.size_bytes >= _LARGE else _ALONE
        call(kind, address, view.size_bytes, *view.layout, values, tiny, addressof(out), target, parallel, threads)
        s0, s1, *fields = _SUMMARY_FIELDS(out)
        summary = _plain_summary(view.size_bytes // size, fields)
        return None if summary is None else (summary, f"u1:{s1:016x}{s0:016x}")

    return summarize_view


@cache
def _arguments(name: str) -> tuple[int, int, int | None, float]:
    """Return kind, element size, address of the table of values (kept alive by its own cache) and smallest normal number."""
    name = real_dtype(name)
    entry = model_dtype(name)
    if entry.size_bytes > 1:
        return KINDS[name], entry.size_bytes, None, entry.tiny
    return CODES, 1, byte_values(name).ctypes.data, entry.tiny


def _summary(name: str, address: int, size_bytes: int, numel: int, fields: list[Any]) -> Summary:
    return _plain_summary(numel, fields) or summary_of(name, bytes_at(address, size_bytes), Moments(*fields))


def _plain_summary(numel: int, fields: list[Any]) -> Summary | None:
    """Make the summary of finite numbers whose squares can be added; None for others."""
    low, high, total, squares, nan, posinf, neginf, zero, subnormal = fields
    if nan + posinf + neginf or not SMALLEST_SUM < squares < LARGEST_SUM:
        return None
    return Summary(numel, low + 0.0, high + 0.0, total / numel, sqrt(squares / numel), 0, 0, 0, zero, subnormal)
