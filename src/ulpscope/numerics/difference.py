# SPDX-License-Identifier: Apache-2.0
"""The difference of two tensors, in one pass over both: compiled where the dtypes are equal and the kernel was built, else NumPy.

Where float64 sums leave their range (float64 values beyond about 1e150 or below 1e-135) the pass is repeated with all values
divided by a power of two.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ulpscope.model import dtype
from ulpscope.numerics.casting import real_dtype
from ulpscope.numerics.difference_kernel import DifferencePass, differencing_with
from ulpscope.numerics.difference_numpy import Difference, difference_blocks, largest_finite
from ulpscope.numerics.kernel import KERNEL
from ulpscope.numerics.moments import LARGEST_SUM, SMALLEST_SUM

__all__ = ["KERNEL_PASS", "Difference", "difference"]

KERNEL_PASS = None if KERNEL is None else differencing_with(KERNEL)


def difference(
    subject_dtype: str,
    subject: npt.NDArray[np.uint8],
    reference_dtype: str,
    reference: npt.NDArray[np.uint8],
    kernel: DifferencePass | None = KERNEL_PASS,
) -> Difference:
    """Compare raw bytes of the same number of elements; `kernel` None means NumPy."""
    if kernel is not None and subject_dtype == reference_dtype:
        result = kernel(subject_dtype, subject, reference)
    else:
        result = difference_blocks(subject_dtype, subject, reference_dtype, reference)
    if _is_in_range(result, subject_dtype, reference_dtype):
        return result
    largest = max(largest_finite(subject_dtype, subject), largest_finite(reference_dtype, reference))
    if largest == 0.0:
        return result
    return difference_blocks(subject_dtype, subject, reference_dtype, reference, exponent=math.frexp(largest)[1])


def _is_in_range(result: Difference, *names: str) -> bool:
    """Sums of squares of anything narrower than float64 cannot leave the range."""
    if all(dtype(real_dtype(name)).mantissa < 52 for name in names):
        return True
    sums = (result.sum_squares_subject, result.sum_squares_reference)
    return all(SMALLEST_SUM < value < LARGEST_SUM for value in sums) and result.max_abs < LARGEST_SUM
