# SPDX-License-Identifier: Apache-2.0
"""Round float64 values to a narrower floating dtype, and give the size of a unit in the last place of such a dtype. NumPy only."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ulpscope.model import DType

__all__ = ["narrow", "units"]

Float64Array = npt.NDArray[np.float64]
_WITHOUT_INFINITY = ("fn", "fnuz", "fnu")


def units(known: DType, values: Float64Array) -> Float64Array:
    """Return the distance between neighbouring numbers of the dtype at each finite value."""
    lowest = math.frexp(known.tiny)[1] - 1
    exponents = np.maximum(np.frexp(values)[1] - 1, lowest)
    found: Float64Array = np.ldexp(1.0, exponents - known.mantissa)
    return np.where(values == 0, math.ldexp(1.0, lowest - known.mantissa), found)


def narrow(known: DType, values: Float64Array) -> Float64Array:
    """Round to the nearest number of the dtype, ties to even; beyond the largest to infinity, or to NaN where the dtype has none.

    >>> from ulpscope.model import dtype
    >>> narrow(dtype("float16"), np.array([0.1, 70000.0])).tolist()
    [0.0999755859375, inf]
    """
    if known.mantissa == 52:
        return values
    finite = np.isfinite(values)
    plain = np.where(finite, values, 0.0)
    unit = units(known, plain)
    rounded = np.rint(plain / unit) * unit
    beyond = np.nan if known.name.endswith(_WITHOUT_INFINITY) else np.inf
    rounded = np.where(np.abs(rounded) > known.max, np.copysign(beyond, plain), rounded)
    return np.where(finite, rounded, values)
