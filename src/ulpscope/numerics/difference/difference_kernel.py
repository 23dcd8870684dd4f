# SPDX-License-Identifier: Apache-2.0
"""Compare two tensors of one dtype by the compiled kernel, without NumPy."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import Any

from ulpscope.model import dtype
from ulpscope.numerics.buffers import address_of, code_values, real_dtype
from ulpscope.numerics.difference.pair_sums import Difference
from ulpscope.numerics.kernel import BEST_TARGET, CODES, KINDS, DifferenceOut

__all__ = ["DifferencePass", "differencing_with", "kernel_arguments", "pair_sums"]

DifferencePass = Callable[[str, Any, Any], Difference]
_FIELDS = Struct("=7d8Q2qQ")
_unpack_fields = _FIELDS.unpack_from


def differencing_with(library: ctypes.CDLL, target: int = BEST_TARGET) -> DifferencePass:
    """Return a function that compares raw bytes of one dtype, given as flat buffers; `target` chooses the instruction set."""
    call = library.ulpscope_difference

    def difference_kernel(name: str, subject: Any, reference: Any) -> Difference:
        kind, size, values, order = kernel_arguments(real_dtype(name))
        out = DifferenceOut()
        numel = memoryview(subject).nbytes // size
        call(kind, address_of(subject), address_of(reference), numel, values, order, ctypes.addressof(out), target)
        return pair_sums(numel, _unpack_fields(out), memoryview(out).cast("B")[_FIELDS.size :].cast("Q").tolist())

    return difference_kernel


@cache
def kernel_arguments(name: str) -> tuple[int, int, int | None, int | None]:
    """Return kind, element size and the addresses of the tables of values and of places, which their own caches keep alive."""
    if name in KINDS:
        return KINDS[name], dtype(name).size_bytes, None, None
    return CODES, 1, code_values(name).buffer_info()[0], _code_places(name).buffer_info()[0]


@cache
def _code_places(name: str) -> array[int]:
    if not dtype(name).is_floating:
        return array("q", map(int, code_values(name)))
    from ulpscope.numerics.difference.ulp import code_places

    return array("q", code_places(name).tolist())


def pair_sums(numel: int, fields: Sequence[Any], counts: Sequence[int]) -> Difference:
    """Make a `Difference` from the fields of `struct difference` before its counts."""
    max_abs, max_rel, sum_abs, squares, subject, reference, products = fields[:7]
    different, flips, nan, inf, nonfinite, worst, first, ulp_max = fields[10:]
    return Difference(
        numel=numel,
        max_abs=max_abs,
        max_rel=max_rel,
        sum_abs=sum_abs,
        sum_squares=squares,
        sum_squares_subject=subject,
        sum_squares_reference=reference,
        sum_products=products,
        within=list(fields[7:10]),
        different=different,
        sign_flips=flips,
        nan_disagree=nan,
        inf_disagree=inf,
        nonfinite=nonfinite,
        worst=worst if worst >= 0 else None,
        first_disagree=first if first >= 0 else None,
        ulp_max=ulp_max,
        ulp_counts=counts,
    )
