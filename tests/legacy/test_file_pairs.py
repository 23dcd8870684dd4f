# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from ulpscope.measure.written import zeros_and_finite as _details
from ulpscope.measure.written import zeros_and_finite_by_numpy as _details_by_numpy
from ulpscope.model import TensorData


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 10_007])
def test_compiled_and_numpy_tell_the_same(dtype: str, size: int) -> None:
    """Both agree on which values are finite, and on their size where the reference is zero, be the zero positive or negative."""
    rng = np.random.default_rng(size)
    ours, theirs = (rng.standard_normal(size).astype(dtype) for _ in range(2))
    for values, value in ((ours, np.nan), (ours, -np.inf), (theirs, 0.0), (theirs, -0.0), (theirs, np.nan)):
        values[rng.random(size) < 0.1] = value
    sides = [TensorData(dtype, (size,), memoryview(values.tobytes())) for values in (ours, theirs)]
    at_zeros, num_finite = _details(*sides)
    assert (at_zeros, num_finite) == _details_by_numpy(*sides)
    assert num_finite == np.isfinite(ours).sum()
