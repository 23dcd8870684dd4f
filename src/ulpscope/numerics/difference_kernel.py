# SPDX-License-Identifier: Apache-2.0
"""The difference of two tensors of one dtype by the compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ulpscope.model import dtype
from ulpscope.numerics.casting import byte_values, real_dtype
from ulpscope.numerics.difference_numpy import Difference
from ulpscope.numerics.kernel import BEST_TARGET, CODES, KINDS, DifferenceOut
from ulpscope.numerics.ulp import code_places

__all__ = ["DifferencePass", "differencing_with"]

DifferencePass = Callable[[str, npt.NDArray[np.uint8], npt.NDArray[np.uint8]], Difference]


def differencing_with(library: ctypes.CDLL, target: int = BEST_TARGET) -> DifferencePass:
    """A function that compares raw bytes of one dtype; `target` chooses the instruction set."""

    def difference_kernel(name: str, subject: npt.NDArray[np.uint8], reference: npt.NDArray[np.uint8]) -> Difference:
        name = real_dtype(name)
        size, out = dtype(name).size_bytes, DifferenceOut()
        kind, values, order = KINDS.get(name, CODES), None, None
        if kind == CODES:
            values, order = byte_values(name).ctypes.data, code_places(name).ctypes.data
        library.ulpscope_difference(
            kind, _address(subject), _address(reference), subject.size // size, values, order, ctypes.addressof(out), target
        )
        return _difference(subject.size // size, out)

    return difference_kernel


def _address(raw: npt.NDArray[np.uint8]) -> int:
    address: int = raw.__array_interface__["data"][0]
    return address


def _difference(numel: int, out: DifferenceOut) -> Difference:
    return Difference(
        numel=numel,
        max_abs=out.max_abs,
        max_rel=out.max_rel,
        sum_abs=out.sum_abs,
        sum_squares=out.sum_squares,
        sum_squares_subject=out.sum_squares_subject,
        sum_squares_reference=out.sum_squares_reference,
        sum_products=out.sum_products,
        within=[out.within_1e4, out.within_1e3, out.within_5e3],
        different=out.different,
        sign_flips=out.sign_flips,
        nan_disagree=out.nan_disagree,
        inf_disagree=out.inf_disagree,
        nonfinite=out.nonfinite,
        worst=out.worst if out.worst >= 0 else None,
        first_disagree=out.first_disagree if out.first_disagree >= 0 else None,
        ulp_max=out.ulp_max,
        ulp_counts=np.array(out.ulp_counts, np.int64),
    )
