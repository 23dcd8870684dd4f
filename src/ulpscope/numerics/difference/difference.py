# SPDX-License-Identifier: Apache-2.0
"""Compare two tensors in one pass over both: by the compiled kernel where the dtypes are equal and the kernel was built, else by NumPy.

Where float64 sums leave their range (float64 values beyond about 1e150 or below 1e-135) the pass is repeated with all values divided by a
power of two.
"""

from __future__ import annotations

import math
from typing import Any

from ulpscope.model import dtype
from ulpscope.numerics.buffers import real_dtype
from ulpscope.numerics.difference.difference_kernel import DifferencePass, differencing_with
from ulpscope.numerics.difference.pair_sums import LARGEST_SUM, SMALLEST_SUM, Difference
from ulpscope.numerics.kernel import KERNEL

__all__ = ["KERNEL_PASS", "Difference", "difference", "is_in_range"]

KERNEL_PASS = None if KERNEL is None else differencing_with(KERNEL)


def difference(
    subject_dtype: str, subject: Any, reference_dtype: str, reference: Any, kernel: DifferencePass | None = KERNEL_PASS
) -> Difference:
    """Compare raw bytes of the same number of elements, given as flat buffers; `kernel` None means NumPy."""
    if kernel is not None and subject_dtype == reference_dtype:
        result = kernel(subject_dtype, subject, reference)
    else:
        result = _by_numpy(subject_dtype, subject, reference_dtype, reference)
    return (
        result
        if is_in_range(result, subject_dtype, reference_dtype)
        else _scaled(result, subject_dtype, subject, reference_dtype, reference)
    )


def _by_numpy(subject_dtype: str, subject: Any, reference_dtype: str, reference: Any, exponent: int = 0) -> Difference:
    import numpy as np

    from ulpscope.numerics.difference.difference_numpy import difference_blocks

    left, right = np.frombuffer(subject, np.uint8), np.frombuffer(reference, np.uint8)
    return difference_blocks(subject_dtype, left, reference_dtype, right, exponent)


def _scaled(result: Difference, subject_dtype: str, subject: Any, reference_dtype: str, reference: Any) -> Difference:
    import numpy as np

    from ulpscope.numerics.difference.difference_numpy import largest_finite

    sides = ((subject_dtype, subject), (reference_dtype, reference))
    largest = max(largest_finite(name, np.frombuffer(raw, np.uint8)) for name, raw in sides)
    if largest == 0.0:
        return result
    return _by_numpy(subject_dtype, subject, reference_dtype, reference, math.frexp(largest)[1])


def is_in_range(result: Difference, *names: str) -> bool:
    """Tell whether the sums stayed in float64's range; those of anything narrower than float64 cannot leave it."""
    if all(dtype(real_dtype(name)).mantissa < 52 for name in names):
        return True
    sums = (result.sum_squares_subject, result.sum_squares_reference)
    return all(SMALLEST_SUM < value < LARGEST_SUM for value in sums) and result.max_abs < LARGEST_SUM
