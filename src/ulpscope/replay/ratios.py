# SPDX-License-Identifier: Apache-2.0
"""How far a recorded tensor is from the exact one, in units of what honest kernels err there. Pure arithmetic over tensors, in blocks.

    unit2   error per unit of relative input error, squared: the mean over probes, and at least exact^2
    pool(v) = v + mean over the last dimension / 16 + mean over the tensor / 16
    base    = u^2 pool(unit2) + quantum^2
    s^2     = base + pool(b^2) + min(pool(a^2), base + pool(b^2))
    ratio   = |recorded - exact| / s

with a the error of the native kernel and b that of the decomposed computation. The kernel's error counts as far as the other two support
it, so that no kernel is its own judge; where there is no b it counts in full.
Elements at a jump (a tie that noise decides) are not judged, and are kept out of the means so that they excuse nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ulpscope.model import DType
from ulpscope.replay.probes import JUMP

__all__ = ["Evidence", "Ratios", "ratios"]

POOL_ROW = 1 / 16
POOL_TENSOR = 1 / 16
OVERFLOW_UNITS = 32.0
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What honest computations of one result gave: all of the exact one's shape, as wide or narrow as they came.

    `moved2` is the mean square by which probes moved the result, over the square of their noise (`step`); `is_fragile` marks elements that
    a probe made finite or not. `kernel` and `decomposed` are results in the native precision; `rounded` that of a machine with narrower
    operands, where how far it is from exact counts as honest. What is None was not evaluated.
    """

    exact: torch.Tensor
    moved2: torch.Tensor | None = None
    step: float = 1.0
    is_fragile: torch.Tensor | None = None
    kernel: torch.Tensor | None = None
    decomposed: torch.Tensor | None = None
    rounded: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """`dispute` is the rms error of the decomposed computation over what conditioning and the native kernel support."""

    max_ratio: float
    rms_ratio: float
    num_nonfinite: int
    bias: float | None
    scale: float | None
    error: float | None
    honest_error: float | None
    native_ratio: float | None
    dispute: float
    worst: int | None
    worst_recorded: float | None
    worst_exact: float | None


def ratios(recorded: torch.Tensor, evidence: Evidence, coarsest: DType, finest_max: float) -> Ratios:
    """`coarsest` gives the unit of rounding; beyond `finest_max`, the largest number of the result's dtype, a value counts as infinite."""
    sheet = _Sheet(recorded, evidence, coarsest, finest_max)
    totals = _Totals()
    for block in sheet.blocks():
        totals.add(block)
    return totals.ratios()


@dataclass(slots=True)
class _Block:
    """Ratios of one block of elements, and what they were made of."""

    start: int
    recorded: torch.Tensor
    exact: torch.Tensor
    s2: torch.Tensor
    independent2: torch.Tensor
    supported2: torch.Tensor
    is_judged: torch.Tensor
    is_misplaced: torch.Tensor
    kernel_error: torch.Tensor | None
    decomposed_error: torch.Tensor | None
    is_kernel_alone: int


class _Sheet:
    """All tensors of one comparison as rows and columns, with the means that pooling needs."""

    def __init__(self, recorded: torch.Tensor, evidence: Evidence, coarsest: DType, finest_max: float) -> None:
        self._columns = max(1, evidence.exact.shape[-1]) if evidence.exact.dim() else 1
        self._rows = evidence.exact.numel() // self._columns
        self._recorded = self._flat(recorded)
        self._exact = self._flat(evidence.exact)
        self._moved2, self._fragile = (None if one is None else self._flat(one) for one in (evidence.moved2, evidence.is_fragile))
        self._kernel, self._decomposed, self._rounded = (
            None if one is None else self._flat(one) for one in (evidence.kernel, evidence.decomposed, evidence.rounded)
        )
        self._step2 = evidence.step**2
        self._u2 = (coarsest.eps / 2) ** 2
        self._quantum2 = _quantum(coarsest) ** 2
        self._max = finest_max
        self._floor2 = 0.0
        self._keeps_jumps = True
        self._means: list[tuple[torch.Tensor, float]] = []
        self._prepare()

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(self._rows, self._columns)

    def _slices(self) -> Iterator[tuple[slice, slice]]:
        tall = max(1, _BLOCK // self._columns)
        for top in range(0, self._rows, tall):
            for left in range(0, self._columns, _BLOCK):
                yield slice(top, min(top + tall, self._rows)), slice(left, min(left + _BLOCK, self._columns))

    def _prepare(self) -> None:
        """One pass for the size of the result and the share of jumps, one for the means of everything that is pooled."""
        numel = max(1, self._rows * self._columns)
        self._floor2 = sum(float(self._exact2(at).sum()) for at in self._slices()) / numel
        if self._moved2 is not None:
            jumps = sum(int(self._is_jump(at).sum()) for at in self._slices())
            self._keeps_jumps = jumps > numel / 2
        sums = [torch.zeros(self._rows, dtype=torch.float64) for _ in range(4)]
        for at in self._slices():
            for total, values in zip(sums, self._squares(at, pooling=True), strict=True):
                if values is not None:
                    total[at[0]] += values.sum(1)
        self._means = [((total / self._columns)[:, None], float(total.sum()) / numel) for total in sums]

    def _exact_in_range(self, at: tuple[slice, slice]) -> torch.Tensor:
        exact = self._exact[at].to(torch.float64)
        return exact.masked_fill(~(exact.abs() <= self._max), 0.0)

    def _exact2(self, at: tuple[slice, slice]) -> torch.Tensor:
        return self._exact_in_range(at).square_()

    def _is_jump(self, at: tuple[slice, slice]) -> torch.Tensor:
        assert self._moved2 is not None
        size2 = self._exact2(at).clamp_(min=self._floor2 * POOL_TENSOR)
        moved2 = self._moved2[at]
        is_jump = moved2 * self._step2 > size2 * JUMP**2
        return is_jump if self._fragile is None else is_jump | self._fragile[at]

    def _squares(self, at: tuple[slice, slice], *, pooling: bool) -> tuple[torch.Tensor | None, ...]:
        """unit^2 and the squared errors of kernel, decomposition and rounding; for the means, without the elements that jump."""
        exact2 = self._exact2(at)
        errors = [self._error(other, at) for other in (self._kernel, self._decomposed, self._rounded)]
        squares = [None if one is None else one.square_() for one in errors]
        if self._moved2 is None:
            return exact2, *squares
        unit2 = torch.maximum(self._moved2[at], exact2)
        if pooling and not self._keeps_jumps:
            is_jump = self._is_jump(at)
            unit2 = torch.where(is_jump, exact2, unit2)
            squares = [None if one is None else one.masked_fill_(is_jump, 0.0) for one in squares]
        return unit2, *squares

    def _error(self, other: torch.Tensor | None, at: tuple[slice, slice]) -> torch.Tensor | None:
        if other is None:
            return None
        error = other[at].to(torch.float64) - self._exact[at]
        return error.masked_fill_(~torch.isfinite(error) | ~(self._exact[at].abs() <= self._max), 0.0)

    def _pooled(self, which: int, values: torch.Tensor | None, at: tuple[slice, slice]) -> torch.Tensor | None:
        if values is None:
            return None
        row, whole = self._means[which]
        return values + (row[at[0]] * POOL_ROW + whole * POOL_TENSOR)

    def blocks(self) -> Iterator[_Block]:
        for at in self._slices():
            yield self._block(at)

    def _block(self, at: tuple[slice, slice]) -> _Block:
        unit2, kernel2, decomposed2, rounded2 = (self._pooled(i, one, at) for i, one in enumerate(self._squares(at, pooling=False)))
        assert unit2 is not None
        base = unit2.mul_(self._u2).add_(self._quantum2)
        if rounded2 is not None:
            base += rounded2
        s2, independent2 = _combined(base, kernel2, decomposed2)
        recorded, exact = self._recorded[at].to(torch.float64), self._exact[at].to(torch.float64)
        is_finite = exact.abs() <= self._max
        is_judged = is_finite & torch.isfinite(recorded)
        is_misplaced, alone = self._misplaced(at, recorded, exact, s2)
        return _Block(
            start=(at[0].start or 0) * self._columns + (at[1].start or 0),
            recorded=recorded,
            exact=exact,
            s2=s2,
            independent2=independent2,
            supported2=base if kernel2 is None else base + kernel2,
            is_judged=is_judged,
            is_misplaced=is_misplaced,
            kernel_error=self._error(self._kernel, at),
            decomposed_error=self._error(self._decomposed, at),
            is_kernel_alone=alone,
        )

    def _misplaced(
        self, at: tuple[slice, slice], recorded: torch.Tensor, exact: torch.Tensor, s2: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Where a NaN or an infinity stands that no honest computation gives, or is missing; and how many the native kernel has alone."""
        ours, theirs = _kind(recorded, math.inf), _kind(exact, self._max)
        is_misplaced = ours != theirs
        if self._kernel is None and not bool(is_misplaced.any()):
            return is_misplaced, 0
        is_near_max = (exact.abs() - self._max).abs() <= OVERFLOW_UNITS * s2.sqrt()
        excused = is_near_max & (ours != _NAN)
        if self._fragile is not None:
            excused |= self._fragile[at]
        if self._decomposed is not None:
            excused |= _kind(self._decomposed[at].to(torch.float64), math.inf) == ours
        alone = 0
        if self._kernel is not None:
            kernel = _kind(self._kernel[at].to(torch.float64), math.inf)
            alone = int(((kernel != theirs) & ~excused & (kernel == ours)).sum()) if self._decomposed is not None else 0
            excused = excused | (kernel == ours)
        return is_misplaced & ~excused, alone


_FINITE, _PLUS, _MINUS, _NAN = 0, 1, 2, 3


def _kind(values: torch.Tensor, largest: float) -> torch.Tensor:
    kind = torch.zeros(values.shape, dtype=torch.uint8)
    kind.masked_fill_(values > min(largest, 1.7976931348623157e308), _PLUS)
    kind.masked_fill_(values < -min(largest, 1.7976931348623157e308), _MINUS)
    return kind.masked_fill_(torch.isnan(values), _NAN)


def _quantum(coarsest: DType) -> float:
    """The error below which nothing is judged: half a subnormal where they matter (float16), else what flushing them to zero costs."""
    return coarsest.eps / 2 * coarsest.tiny if coarsest.tiny > 1e-30 else coarsest.tiny


def _combined(base: torch.Tensor, kernel2: torch.Tensor | None, decomposed2: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """s^2, and the same without the native kernel."""
    independent = base if decomposed2 is None else base + decomposed2
    if kernel2 is None:
        return independent, independent
    return independent + (kernel2 if decomposed2 is None else torch.minimum(kernel2, independent)), independent


class _Totals:
    """Sums over blocks, from which the statistics follow."""

    def __init__(self) -> None:
        self.count = self.num_nonfinite = self.num_alone = 0
        self.worst: tuple[float, int, float, float] | None = None
        self.ratio2 = self.error2 = self.exact2 = self.s2 = 0.0
        self.projection = self.weight = 0.0
        self.projected = [0.0, 0.0]
        self.has_kernel = self.has_decomposed = False
        self.kernel2 = self.decomposed2 = 0.0

    def add(self, block: _Block) -> None:
        judged = block.is_judged
        self.num_nonfinite += int(block.is_misplaced.sum())
        self.num_alone += block.is_kernel_alone
        self.count += int(judged.sum())
        error = (block.recorded - block.exact).masked_fill_(~judged, 0.0)
        exact = block.exact.masked_fill(~judged, 0.0)
        ratio2 = error.square().div_(block.s2)
        self._keep_worst(block, ratio2)
        weighted = exact / block.s2
        self.ratio2 += float(ratio2.sum())
        self.error2 += float(error.square().sum())
        self.exact2 += float(exact.square().sum())
        self.s2 += float(block.s2.masked_fill(~judged, 0.0).sum())
        self.projection += float((error * weighted).sum())
        self.weight += float((exact * weighted).sum())
        for place, one in enumerate((block.kernel_error, block.decomposed_error)):
            if one is not None:
                self.projected[place] += float((one * weighted).sum())
        self._judge_natives(block)

    def _judge_natives(self, block: _Block) -> None:
        self.has_kernel |= block.kernel_error is not None
        if block.kernel_error is not None:
            self.kernel2 += float((block.kernel_error.square() / block.independent2).sum())
        if block.decomposed_error is not None:
            self.has_decomposed = True
            self.decomposed2 += float((block.decomposed_error.square() / block.supported2).sum())

    def _keep_worst(self, block: _Block, ratio2: torch.Tensor) -> None:
        if not ratio2.numel():
            return
        place = int(ratio2.argmax())
        largest = float(ratio2.reshape(-1)[place])
        if self.worst is None or largest > self.worst[0]:
            recorded, exact = (float(one.reshape(-1)[place]) for one in (block.recorded, block.exact))
            self.worst = (largest, block.start + place, recorded, exact)

    def ratios(self) -> Ratios:
        count = max(1, self.count)
        largest, place, recorded, exact = self.worst or (0.0, None, None, None)
        return Ratios(
            max_ratio=math.sqrt(largest),
            rms_ratio=math.sqrt(self.ratio2 / count),
            num_nonfinite=self.num_nonfinite,
            bias=self._bias(),
            scale=self.projection / self.weight if self.weight > 0 else None,
            error=math.sqrt(self.error2 / self.exact2) if self.exact2 > 0 else None,
            honest_error=math.sqrt(self.s2 / self.exact2) if self.exact2 > 0 else None,
            native_ratio=self._native_ratio(count),
            dispute=math.sqrt(self.decomposed2 / count),
            worst=place,
            worst_recorded=recorded,
            worst_exact=exact,
        )

    def _bias(self) -> float | None:
        if self.weight <= 0:
            return None
        size = math.sqrt(self.weight)
        kernel, decomposed = (abs(one) / size for one in self.projected)
        honest = max(decomposed, min(kernel, 1 + decomposed)) if self.has_decomposed else kernel
        return abs(self.projection) / size / (1 + honest)

    def _native_ratio(self, count: int) -> float | None:
        if not (self.has_kernel and self.has_decomposed):
            return None
        return math.inf if self.num_alone else math.sqrt(self.kernel2 / count)
