# SPDX-License-Identifier: Apache-2.0
"""Measure by the definitions of the older tools: statistics as they stand in two dumps, and two tensors.

Their definitions differ from ours in two points: the relative error where the reference is zero, and a Euclidean distance that grows with
the number of elements. All else comes from our own measurement of two tensors.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import replace

from ulpscope.measure.tensors import measure_tensors
from ulpscope.model import Metric, TensorData, TensorMeasurement
from ulpscope.model.written import MeasuredPair, OldNumbers, WrittenPair
from ulpscope.numerics.buffers import address_of, flat_view
from ulpscope.numerics.kernel import KERNEL, KINDS

__all__ = ["difference_of", "measure_statistics", "measure_two", "zeros_and_finite", "zeros_and_finite_by_numpy"]

_BLOCK = 1 << 16
_EPS = sys.float_info.epsilon
_DECIMALS = 12
_NEARLY_ONE, _FEWER_DECIMALS = 0.9999, 6  # of cosines in 26.x
_SAME_DIRECTION = 0.99999  # of the older ones
_ZERO_LENGTH = 2.220446049250313e-16
_NUMBER = (bool, int, float)
_NOTHING = (None, None, None, None)
_ZEROS = (0.0, 0.0, 0.0, 0.0)


# --- statistics


def measure_statistics(pair: WrittenPair, numbers: OldNumbers | None = None) -> MeasuredPair:
    """Subtract the statistics of two values, and keep the numbers of their tensors beside the differences."""
    subject, reference = (value.statistics if value else _NOTHING for value in (pair.subject, pair.reference))
    statistics = tuple(zip(subject, reference, strict=True))
    if subject == reference and None not in subject and not pair.value.is_plain:
        return MeasuredPair(pair, numbers, statistics, _ZEROS, _ZEROS)
    differences = tuple(0.0 if _are_equal(*both) else difference_of(*both) for both in statistics)
    relative = tuple(_relative(difference, other) for difference, other in zip(differences, reference, strict=True))
    return MeasuredPair(pair, numbers, statistics, differences, relative)


def _are_equal(subject: object, reference: object) -> bool:
    return isinstance(subject, _NUMBER) and isinstance(reference, _NUMBER) and subject == reference


def difference_of(subject: object, reference: object) -> float | None:
    """Subtract two numbers; None where one is no number, or the difference has no value."""
    if not isinstance(subject, _NUMBER) or not isinstance(reference, _NUMBER):
        return None
    try:
        difference = float(subject) - float(reference)
    except OverflowError:
        return None
    return None if math.isnan(difference) else difference


def _relative(difference: float | None, reference: float) -> float | None:
    if not difference:
        return difference
    return abs(difference / reference) if reference else math.inf


# --- tensors


def measure_two(subject: TensorData, reference: TensorData, measured: TensorMeasurement | None = None) -> OldNumbers:
    """Measure two tensors; `measured` is their measurement from a comparison of the same dumps, if there was one."""
    shapes = subject.shape, reference.shape
    if subject.shape != reference.shape:
        return OldNumbers(shapes=shapes)
    if subject.dtype.startswith("complex") != reference.dtype.startswith("complex"):
        return OldNumbers(shapes=shapes, failure=f"One side is complex: {subject.dtype} and {reference.dtype}.")
    found = measured or measure_tensors(subject, reference)
    disagreeing = found.num_nan_disagree + found.num_inf_disagree
    if disagreeing:
        return OldNumbers(shapes=shapes, numel=found.numel, disagreeing=disagreeing)
    at_zeros, num_finite = (0.0, found.numel) if found.equal else zeros_and_finite(subject, reference)
    errors = OldNumbers(
        shapes=shapes,
        numel=found.numel,
        max_abs=_rounded(_or_zero(found.max_abs)),
        max_rel=_rounded(max(_or_zero(found.max_rel), at_zeros)),
    )
    return errors if found.numel < 2 else _with_directions(errors, found, num_finite)


def _with_directions(errors: OldNumbers, found: TensorMeasurement, num_finite: int) -> OldNumbers:
    """Add the figures that a single number does not have: cosine, Euclidean distance and shares."""
    root = math.sqrt(found.numel)
    zeros = found.rms_subject * root <= _ZERO_LENGTH, found.rms_reference * root <= _ZERO_LENGTH
    own = found.cosine if isinstance(found.cosine, float) else None
    full = (1.0 if all(zeros) else None) if any(zeros) else own
    return replace(
        errors,
        zeros=zeros,
        no_cosine="" if isinstance(found.cosine, float) else found.cosine.reason,
        old_cosine=1.0 if full is not None and full > _SAME_DIRECTION else _rounded(full),
        cosine=round(own, _FEWER_DECIMALS) if own is not None and own > _NEARLY_ONE else _rounded(full),
        euclidean=_or_zero(found.rms_error) * math.sqrt(num_finite),
        within_1e3=_share(found.within_1e3, found),
        within_5e3=_share(found.within_5e3, found),
    )


def _share(share: Metric, found: TensorMeasurement) -> float | None:
    return _rounded(share) if isinstance(share, float) else 1.0 if found.equal else None


def _or_zero(metric: Metric) -> float:
    return metric if isinstance(metric, float) else 0.0


def _rounded(value: float | None) -> float | None:
    """Round to twelve decimals; None for NaN."""
    return None if value is None or math.isnan(value) else float(f"{value:.{_DECIMALS}f}")


def zeros_and_finite(subject: TensorData, reference: TensorData) -> tuple[float, int]:
    """Return the largest relative error at zeros of the reference, and count the finite elements of the subject."""
    if KERNEL is not None and subject.dtype == reference.dtype and subject.dtype in ("float64", "float32"):
        ours, theirs, largest = flat_view(subject), flat_view(reference), ctypes.c_double()
        sides = KINDS[subject.dtype], address_of(ours), address_of(theirs), math.prod(subject.shape)
        num_finite = KERNEL.ulpscope_at_zeros(*sides, ctypes.addressof(largest))
        return largest.value / _EPS, num_finite
    return zeros_and_finite_by_numpy(subject, reference)


def zeros_and_finite_by_numpy(subject: TensorData, reference: TensorData) -> tuple[float, int]:
    """Return the same with NumPy, in blocks, for any dtype."""
    import numpy as np

    from ulpscope.numerics.casting import as_bytes, real_dtype, reals, widen

    ours, theirs = (reals(data.dtype, as_bytes(data)) for data in (subject, reference))
    kinds = real_dtype(subject.dtype), real_dtype(reference.dtype)
    largest, num_finite = 0.0, 0
    for start in range(0, theirs.size, _BLOCK):
        blocks = zip(kinds, (ours[start : start + _BLOCK], theirs[start : start + _BLOCK]), strict=True)
        left, right = (block if block.dtype.name == kind else widen(kind, block) for kind, block in blocks)
        finite, zeros = np.isfinite(left), right == 0
        num_finite += int(np.count_nonzero(finite))
        if zeros.any():
            largest = max(largest, float(np.abs(left[finite & zeros].astype(np.float64)).max(initial=0.0)))
    return largest / _EPS, num_finite
