# SPDX-License-Identifier: Apache-2.0
"""Measure how far a recorded tensor is from the exact one, in units of an honest kernel's error. Pure arithmetic over tensors, in blocks.

    unit2   error per unit of relative input error, squared: the mean over probes, and at least exact^2
    pool(v) = v + mean over the last dimension / 16 + mean over the tensor / 16
    base    = u^2 pool(unit2) + quantum^2
    s^2     = base + pool(b^2) + min(pool(a^2), base + pool(b^2))
    ratio   = |recorded - exact| / s

with a the error of the native kernel and b that of the decomposed computation. The kernel's error counts as far as the other two support
it, so that no kernel is its own judge; where there is no b it counts in full.
A result all of whose elements are the nearest numbers to the exact ones has no change of scale: one constant in many places (a mask of
-10000 in bfloat16) is rounded the same everywhere, and no kernel comes nearer.
Elements at a jump (a tie that noise decides) are not judged, and are kept out of the means so that they excuse no other element.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ulpscope.model import DType
from ulpscope.replay.yardstick.probes import JUMP

__all__ = ["Evidence", "Ratios", "ratios"]

Place = tuple[slice, slice]
POOL_ROW = 1 / 16
POOL_TENSOR = 1 / 16
OVERFLOW_UNITS = 32.0
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Results of honest computations of one call: all of the exact one's shape, in any precision.

    `moved2` is the mean square by which probes moved the result, over the square of their noise (`step`); `is_fragile` marks elements that
    a probe made finite or not. `kernel` and `decomposed` are results in the native precision; `rounded` is the result of a machine with
    narrower operands, whose distance from the exact one counts as honest. A field that is None was not evaluated.
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
    """Measure the recorded result against the evidence.

    `coarsest` gives the unit of rounding. A value beyond `finest_max`, the largest number of the result's dtype, counts as infinite.
    """
    if (found := _nothing_apart(recorded, evidence, coarsest)) is not None:
        return found
    sheet = _Sheet(recorded, evidence, coarsest, finest_max)
    totals = _Totals()
    for block in sheet.blocks():
        totals.add(block)
    found = totals.ratios()
    is_nearest = found.num_nonfinite == 0 and bool(found.bias) and torch.equal(recorded, evidence.exact.to(recorded.dtype))
    return replace(found, bias=0.0) if is_nearest else found


def _nothing_apart(recorded: torch.Tensor, evidence: Evidence, coarsest: DType) -> Ratios | None:
    """Return the ratios, all 0, of a result equal to the exact one that has no other evidence; None for any other."""
    exact = evidence.exact
    if any(one is not None for one in (evidence.moved2, evidence.kernel, evidence.decomposed, evidence.rounded)) or not exact.numel():
        return None
    if exact.dtype is not torch.float64 or not torch.equal(recorded.to(torch.float64), exact):
        return None
    flat, numel = exact.reshape(-1), exact.numel()
    exact2 = _dot(flat, flat)
    if not 0 < exact2 < math.inf:
        return None
    s2 = (coarsest.eps / 2) ** 2 * exact2 * (1 + POOL_ROW + POOL_TENSOR) + numel * _quantum(coarsest) ** 2
    first = float(flat[0])
    return Ratios(
        max_ratio=0.0,
        rms_ratio=0.0,
        num_nonfinite=0,
        bias=0.0,
        scale=0.0,
        error=0.0,
        honest_error=math.sqrt(s2 / exact2),
        native_ratio=None,
        dispute=0.0,
        worst=0,
        worst_recorded=first,
        worst_exact=first,
    )


class _Part:
    """One block of elements in float64, with the squares that are pooled; the square of a value not finite or beyond the range is 0."""

    __slots__ = ("_errors", "_sheet", "at", "exact", "exact2", "is_within", "jumps", "moved2")

    def __init__(self, sheet: _Sheet, at: Place) -> None:
        self._sheet, self.at = weakref.proxy(sheet), at  # a reference cycle would keep both, and their tensors, until the collector runs
        self.exact = sheet.taken(sheet.exact, at).to(torch.float64)
        self.is_within = _within(self.exact, sheet.largest)
        self.exact2 = self.exact.square()
        if self.is_within is not None:
            self.exact2.masked_fill_(~self.is_within, 0.0)
        self.moved2 = None if sheet.moved2 is None else sheet.taken(sheet.moved2, at)
        self.jumps: torch.Tensor | None = None
        self._errors: list[torch.Tensor | None] | None = None

    def errors(self) -> list[torch.Tensor | None]:
        """Return the errors of the native kernel and of the decomposition, and the change that rounded operands make."""
        if self._errors is None:
            sheet = self._sheet
            self._errors = [None if one is None else self._error(sheet.taken(one, self.at)) for one in sheet.others]
        return self._errors

    def _error(self, other: torch.Tensor) -> torch.Tensor:
        error = other.to(torch.float64) - self.exact
        if self.is_within is None:
            return error if math.isfinite(float(error.sum())) else error.masked_fill_(~torch.isfinite(error), 0.0)
        return error.masked_fill_(~(torch.isfinite(error) & self.is_within), 0.0)

    def look_for_jumps(self) -> int:
        """Count the elements that jump, and keep their places where there are any."""
        sheet = self._sheet
        assert self.moved2 is not None
        is_jump = self.moved2 * sheet.step2 > self.exact2.clamp(min=sheet.floor2 * POOL_TENSOR).mul_(JUMP**2)
        if sheet.fragile is not None:
            is_jump |= sheet.fragile[self.at]
        many = int(is_jump.sum())
        self.jumps = is_jump if many else None
        return many

    def squares(self, *, without_jumps: bool = False) -> list[torch.Tensor | None]:
        """Return unit^2 and the squared errors."""
        unit2 = self.exact2 if self.moved2 is None else torch.maximum(self.moved2, self.exact2)
        errors2 = [None if one is None else one.square() for one in self.errors()]
        if self.jumps is None or not without_jumps:
            return [unit2, *errors2]
        return [
            torch.where(self.jumps, self.exact2, unit2),
            *(None if one is None else one.masked_fill_(self.jumps, 0.0) for one in errors2),
        ]


@dataclass(slots=True)
class _Block:
    """The parts of the ratios of one block of elements; `is_judged` is None where all elements are."""

    start: int
    recorded: torch.Tensor
    exact: torch.Tensor
    error: torch.Tensor
    s2: torch.Tensor
    independent2: torch.Tensor
    supported2: torch.Tensor | None
    is_judged: torch.Tensor | None
    num_misplaced: int
    num_alone: int
    kernel_error: torch.Tensor | None
    decomposed_error: torch.Tensor | None


class _Sheet:
    """All tensors of one comparison as rows and columns, with the means that pooling needs."""

    def __init__(self, recorded: torch.Tensor, evidence: Evidence, coarsest: DType, finest_max: float) -> None:
        self._columns = max(1, evidence.exact.shape[-1]) if evidence.exact.dim() else 1
        self._rows = evidence.exact.numel() // self._columns
        self.recorded = self._flat(recorded)
        self.exact = self._flat(evidence.exact)
        self.moved2, self.fragile = (None if one is None else self._flat(one) for one in (evidence.moved2, evidence.is_fragile))
        self.others = [None if one is None else self._flat(one) for one in (evidence.kernel, evidence.decomposed, evidence.rounded)]
        self.step2 = evidence.step**2
        self.largest = finest_max
        self.floor2 = 0.0
        self._u2 = (coarsest.eps / 2) ** 2
        self._quantum2 = _quantum(coarsest) ** 2
        self._places = list(self._slices())
        self._lone = _Part(self, self._places[0]) if len(self._places) == 1 else None
        self._pools: list[torch.Tensor | None] = self._pooled()

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(self._rows, self._columns)

    def taken(self, rows: torch.Tensor, at: Place) -> torch.Tensor:
        return rows if len(self._places) == 1 else rows[at]

    def _slices(self) -> Iterator[Place]:
        tall = max(1, _BLOCK // self._columns)
        for top in range(0, self._rows, tall):
            for left in range(0, self._columns, _BLOCK):
                yield slice(top, min(top + tall, self._rows)), slice(left, min(left + _BLOCK, self._columns))

    def _parts(self) -> Iterator[_Part]:
        """Yield block after block: a single block is made once and kept, several are made anew in every pass."""
        return iter((self._lone,)) if self._lone is not None else (_Part(self, at) for at in self._places)

    def _pooled(self) -> list[torch.Tensor | None]:
        """Compute what pooling adds to each element of a row: one pass for the result's size and the share of jumps, one for the means."""
        numel = max(1, self._rows * self._columns)
        without_jumps = False
        if self.moved2 is not None:
            self.floor2 = sum(float(part.exact2.sum()) for part in self._parts()) / numel
            without_jumps = 0 < sum(part.look_for_jumps() for part in self._parts()) <= numel / 2
        if self._lone is not None:
            found = self._lone.squares(without_jumps=without_jumps)
            return [None if one is None else self._pool(one.sum(1), numel) for one in found]
        sums = [None if one is None else torch.zeros(self._rows, dtype=torch.float64) for one in (self.exact, *self.others)]
        for part in self._parts():
            if without_jumps:
                part.look_for_jumps()
            for total, values in zip(sums, part.squares(without_jumps=without_jumps), strict=True):
                if total is not None and values is not None:
                    total[part.at[0]] += values.sum(1)
        return [None if one is None else self._pool(one, numel) for one in sums]

    def _pool(self, sums: torch.Tensor, numel: int) -> torch.Tensor:
        whole = float(sums.sum()) / numel
        return (sums / self._columns).mul_(POOL_ROW).add_(whole * POOL_TENSOR)[:, None]

    def _beside(self, pool: torch.Tensor, at: Place) -> torch.Tensor:
        return pool if self._lone is not None else pool[at[0]]

    def blocks(self) -> Iterator[_Block]:
        return map(self._block, self._parts())

    def _block(self, part: _Part) -> _Block:
        squares = zip(part.squares(), self._pools, strict=True)
        unit2, kernel2, decomposed2, rounded2 = (
            None if one is None or pool is None else one + self._beside(pool, part.at) for one, pool in squares
        )
        assert unit2 is not None
        base = unit2.mul_(self._u2).add_(self._quantum2)
        if rounded2 is not None:
            base += rounded2
        s2, independent2 = _combined(base, kernel2, decomposed2)
        recorded = self.taken(self.recorded, part.at).to(torch.float64)
        error = recorded - part.exact
        is_plain = part.is_within is None and math.isfinite(float(error.sum()))
        num_misplaced, num_alone = (0, 0) if is_plain else self._misplaced(part, recorded, s2)
        kernel_error, decomposed_error, _ = part.errors()
        return _Block(
            start=part.at[0].start * self._columns + part.at[1].start,
            recorded=recorded,
            exact=part.exact,
            error=error,
            s2=s2,
            independent2=independent2,
            supported2=None if decomposed2 is None else base if kernel2 is None else base + kernel2,
            is_judged=None if is_plain else (part.exact.abs() <= self.largest) & torch.isfinite(recorded),
            num_misplaced=num_misplaced,
            num_alone=num_alone,
            kernel_error=kernel_error,
            decomposed_error=decomposed_error,
        )

    def _misplaced(self, part: _Part, recorded: torch.Tensor, s2: torch.Tensor) -> tuple[int, int]:
        """Count NaN and infinities that no honest computation gives or that are missing, and those that only the native kernel gives."""
        ours, theirs = _kind(recorded, math.inf), _kind(part.exact, self.largest)
        is_misplaced = ours != theirs
        if not bool(is_misplaced.any()):
            return 0, 0
        kernel, decomposed, _ = (None if one is None else _kind(one[part.at].to(torch.float64), math.inf) for one in self.others)
        is_near_max = (part.exact.abs() - self.largest).abs() <= OVERFLOW_UNITS * s2.sqrt()
        excused = is_near_max & (ours != _NAN)
        if self.fragile is not None:
            excused |= self.fragile[part.at]
        if decomposed is not None:
            excused |= decomposed == ours
        num_alone = 0
        if kernel is not None:
            num_alone = int(((kernel != theirs) & ~excused & (kernel == ours)).sum()) if decomposed is not None else 0
            excused = excused | (kernel == ours)
        return int((is_misplaced & ~excused).sum()), num_alone


def _within(values: torch.Tensor, largest: float) -> torch.Tensor | None:
    """Mark the values that are finite numbers within the range; None where all are."""
    low, high = (float(one) for one in torch.aminmax(values)) if values.numel() else (0.0, 0.0)
    return None if -largest <= low and high <= largest else values.abs() <= largest


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.dot(one, other))


_FINITE, _PLUS, _MINUS, _NAN = 0, 1, 2, 3


def _kind(values: torch.Tensor, largest: float) -> torch.Tensor:
    kind = torch.zeros(values.shape, dtype=torch.uint8)
    kind.masked_fill_(values > min(largest, 1.7976931348623157e308), _PLUS)
    kind.masked_fill_(values < -min(largest, 1.7976931348623157e308), _MINUS)
    return kind.masked_fill_(torch.isnan(values), _NAN)


def _quantum(coarsest: DType) -> float:
    """Return the error below which nothing is judged: half a subnormal in float16, otherwise what flushing subnormals to zero costs."""
    return coarsest.eps / 2 * coarsest.tiny if coarsest.tiny > 1e-30 else coarsest.tiny


def _combined(base: torch.Tensor, kernel2: torch.Tensor | None, decomposed2: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s^2, and the same without the native kernel."""
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
        self.num_nonfinite += block.num_misplaced
        self.num_alone += block.num_alone
        error, exact, s2 = block.error, block.exact, block.s2
        self.count += error.numel() if block.is_judged is None else int(block.is_judged.sum())
        if block.is_judged is not None:
            error, exact = (one.masked_fill(~block.is_judged, 0.0) for one in (error, exact))
        ratio2 = error.square().div_(s2)
        self._keep_worst(block, ratio2)
        errors, values, weighted = (one.reshape(-1) for one in (error, exact, exact / s2))
        self.ratio2 += float(ratio2.sum())
        self.error2 += _dot(errors, errors)
        self.exact2 += _dot(values, values)
        self.s2 += float((s2 if block.is_judged is None else s2.masked_fill(~block.is_judged, 0.0)).sum())
        self.projection += _dot(errors, weighted)
        self.weight += _dot(values, weighted)
        for place, one in enumerate((block.kernel_error, block.decomposed_error)):
            if one is not None:
                self.projected[place] += _dot(one.reshape(-1), weighted)
        self._judge_natives(block)

    def _judge_natives(self, block: _Block) -> None:
        if block.kernel_error is not None:
            self.has_kernel = True
            self.kernel2 += float((block.kernel_error.square() / block.independent2).sum())
        if block.decomposed_error is not None and block.supported2 is not None:
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
