# SPDX-License-Identifier: Apache-2.0
"""Compute the figures of the published standards: one result against the same result in a higher precision, in blocks, summed in float64.

A relative error is |error| / (|exact| + eps), eps being that of the dtype in which the exact result was computed. A standard for finite
elements takes those that are finite on both sides, the exact side after rounding to the dtype of the result. A complex number counts as two
reals. The cosine is that of the two vectors; it is 0 where just one of them is zero. It is undefined where both are, and for a single
number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ulpscope.model import DTYPES, DType, Metric, TensorData, Undefined
from ulpscope.model.check.standards import STANDARD_METRICS, StandardLimits, StandardMeasurement
from ulpscope.numerics.casting import as_bytes, real_dtype, reals, widen
from ulpscope.numerics.narrowing import narrow, units

__all__ = ["measure_standard"]

Float64Array = npt.NDArray[np.float64]
_BLOCK = 1 << 18
_NEARLY_ZERO = 2.0**-52
_EXACT_ONLY = Undefined("integers and booleans have to be equal")
_NO_ELEMENTS = Undefined("it has no elements")
_NO_LIMITS = Undefined("the standard has no limits for this dtype")
_NOTHING_FINITE = Undefined("no position is finite on both sides")
_ONE_DIRECTION = Undefined("one number has no direction")
_NO_DIRECTION = Undefined("both sides are zero")


def measure_standard(subject: TensorData, golden: TensorData, limits: StandardLimits | None) -> StandardMeasurement:
    """Measure a result against a more precise one of the same shape; `limits` are those of the subject's dtype."""
    known = DTYPES[real_dtype(subject.dtype)]
    numel = math.prod(subject.shape) * (2 if subject.dtype != known.name else 1)
    if not numel:
        return _without(_NO_ELEMENTS, numel, mismatch=0.0)
    left, right = reals(subject.dtype, as_bytes(subject)), reals(golden.dtype, as_bytes(golden))
    if not known.is_floating:
        return _without(_EXACT_ONLY, numel, mismatch=float(np.count_nonzero(left != right)) / numel)
    sums = _Sums(known, DTYPES[real_dtype(golden.dtype)].eps, limits)
    for start in range(0, numel, _BLOCK):
        here = slice(start, start + _BLOCK)
        sums.add(widen(real_dtype(subject.dtype), left[here]), widen(real_dtype(golden.dtype), right[here]))
    return sums.measurement()


def _without(reason: Undefined, numel: int, *, mismatch: float) -> StandardMeasurement:
    found: dict[str, Metric] = dict.fromkeys(STANDARD_METRICS, reason)
    return StandardMeasurement(numel=numel, **(found | {"mismatch": mismatch}))


@dataclass(slots=True)
class _Sums:
    """Sums over the blocks of two tensors so far."""

    dtype: DType
    eps: float
    limits: StandardLimits | None
    numel: int = 0
    finite: int = 0
    different: int = 0
    larger: int = 0
    smaller: int = 0
    num_small: int = 0
    small_wrong: int = 0
    small_beyond: int = 0
    rel_wrong: int = 0
    nonfinite_wrong: int = 0
    ulp_beyond: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    sum_rel: float = 0.0
    sum_square: float = 0.0
    max_ulp: float = 0.0
    sum_ulp: float = 0.0
    subject_max: float = 0.0
    golden_max: float = 0.0
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    exponent: int = 0
    within: tuple[int, int, int] = (0, 0, 0)

    def add(self, subject: Float64Array, golden: Float64Array) -> None:
        rounded = narrow(self.dtype, golden)
        self.numel += subject.size
        is_same = (subject == rounded) | (np.isnan(subject) & np.isnan(rounded))
        self.different += int(np.count_nonzero(~is_same))
        self.larger += int(np.count_nonzero(subject > rounded))
        self.smaller += int(np.count_nonzero(subject < rounded))
        finite = np.isfinite(subject) & np.isfinite(rounded)
        if not finite.all():
            self._add_nonfinite(subject[~finite], rounded[~finite])
            self.within = _plus(self.within, [int(np.count_nonzero(is_same & ~finite))] * 3)
            subject, golden = subject[finite], golden[finite]
        if subject.size:
            self._add_finite(subject, golden)

    def _add_nonfinite(self, subject: Float64Array, rounded: Float64Array) -> None:
        """Count disagreements among non-finite elements: an infinity equals the largest number of the dtype, NaN equals only NaN."""
        left, right = (np.clip(each, -self.dtype.max, self.dtype.max) for each in (subject, rounded))
        rtol = self.limits.rtol if self.limits else self.dtype.eps
        agrees = (np.abs(left - right) <= rtol * np.abs(right)) | (np.isnan(left) & np.isnan(right))
        self.nonfinite_wrong += int(np.count_nonzero(~agrees))

    def _add_finite(self, subject: Float64Array, golden: Float64Array) -> None:
        size, error = np.abs(golden), np.abs(subject - golden)
        relative = error / (size + self.eps)
        self.finite += subject.size
        self.max_abs = max(self.max_abs, float(error.max()))
        self.within = _plus(self.within, [int(np.count_nonzero(relative < share)) for share in (1e-2, 1e-3, 1e-4)])
        self._add_products(subject, golden)
        if self.limits is not None:
            self._add_limited(size, error, relative, self.limits)
            self._add_units(golden, error, self.limits.ulp)

    def _add_products(self, subject: Float64Array, golden: Float64Array) -> None:
        """Add up the products, scaled by the largest exponent so far, since squares of float64 overflow."""
        largest = float(np.abs(subject).max()), float(np.abs(golden).max())
        self.subject_max, self.golden_max = max(self.subject_max, largest[0]), max(self.golden_max, largest[1])
        exponent = max(self.exponent, math.frexp(max(largest))[1])
        if exponent > self.exponent:
            self.products = tuple(math.ldexp(each, 2 * (self.exponent - exponent)) for each in self.products)  # type: ignore[assignment]
            self.exponent = exponent
        left, right = np.ldexp(subject, -exponent), np.ldexp(golden, -exponent)
        here = float(left @ right), float(left @ left), float(right @ right)
        self.products = tuple(old + new for old, new in zip(self.products, here, strict=True))  # type: ignore[assignment]

    def _add_limited(self, size: Float64Array, error: Float64Array, relative: Float64Array, limits: StandardLimits) -> None:
        is_small = size <= limits.small_value
        small, normal = error[is_small], relative[~is_small]
        self.num_small += small.size
        self.small_wrong += int(np.count_nonzero(small > limits.small_error))
        self.small_beyond += int(np.count_nonzero(small > limits.small_atol))
        self.rel_wrong += int(np.count_nonzero(normal > limits.rtol))
        self.max_rel = max(self.max_rel, float(normal.max(initial=0.0)))
        self.sum_rel += float(normal.sum())
        self.sum_square += float(np.square(error[~is_small]).sum())

    def _add_units(self, golden: Float64Array, error: Float64Array, limit: float) -> None:
        distance = error / units(self.dtype, golden)
        self.max_ulp = max(self.max_ulp, float(distance.max()))
        self.sum_ulp += float(distance.sum())
        self.ulp_beyond += int(np.count_nonzero(distance > limit))

    def measurement(self) -> StandardMeasurement:
        nonfinite = self.numel - self.finite
        found: dict[str, Metric] = dict(self._of_finite()) if self.finite else dict.fromkeys(STANDARD_METRICS, _NOTHING_FINITE)
        found |= {name: count / self.numel for name, count in zip(("within_1e2", "within_1e3", "within_1e4"), self.within, strict=True)}
        found |= {
            "mismatch": self.different / self.numel,
            "balance": abs(self.larger - self.smaller) / self.numel,
            "nonfinite_errors": self.nonfinite_wrong / nonfinite if nonfinite else 0.0,
        }
        return StandardMeasurement(numel=self.numel, **found)

    def _of_finite(self) -> Iterator[tuple[str, Metric]]:
        yield "cosine", self._cosine()
        yield "max_abs", self.max_abs
        normal = self.finite - self.num_small
        limited: dict[str, float] = {
            "rms_error": math.sqrt(self.sum_square / normal) if normal else 0.0,
            "small_errors": self.small_wrong / self.num_small if self.num_small else 0.0,
            "max_rel": self.max_rel,
            "mean_rel": self.sum_rel / normal if normal else 0.0,
            "rel_errors": self.rel_wrong / normal if normal else 0.0,
            "abs_errors": self.small_beyond / self.num_small if self.num_small else 0.0,
            "ulp_max": self.max_ulp,
            "ulp_mean": self.sum_ulp / self.finite,
            "ulp_beyond": self.ulp_beyond / self.finite,
        }
        yield from ((name, _NO_LIMITS if self.limits is None else value) for name, value in limited.items())

    def _cosine(self) -> Metric:
        if self.numel == 1:
            return _ONE_DIRECTION
        is_zero = [largest <= _NEARLY_ZERO for largest in (self.subject_max, self.golden_max)]
        if all(is_zero):
            return _NO_DIRECTION
        product, subject, golden = self.products
        if any(is_zero) or not subject or not golden:
            return 0.0
        return max(-1.0, min(1.0, product / math.sqrt(subject) / math.sqrt(golden)))


def _plus(counts: tuple[int, int, int], more: list[int]) -> tuple[int, int, int]:
    first, second, third = (old + new for old, new in zip(counts, more, strict=True))
    return first, second, third
