# SPDX-License-Identifier: Apache-2.0
"""Derive limits from rows: the next power of two above the largest honest one of the calibration half. The other half only checks them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bench.zoo.rows import Row

from ulpscope.judge import threshold

STATISTICS = ("max_ratio", "rms_ratio", "bias")
FEW = 64
"""Over fewer elements the rms is no other statistic than the largest, and a projection is chance."""

_KINDS = {"max_ratio": "max", "rms_ratio": "rms", "bias": "bias"}
OF_RECORD = {
    dtype: {statistic: threshold(f"replay_{kind}{low}") for statistic, kind in _KINDS.items()}
    for dtype, low in (("float32", ""), ("bfloat16", "_low"), ("float16", "_low"))
}
"""The limits that the runs in docs/zoo.md led to; what faults are scored by."""


@dataclass(frozen=True)
class Limit:
    dtype: str
    statistic: str
    value: float
    largest: Row


def value_of(row: Row, statistic: str) -> float:
    """Return a statistic; the bias over the root of the number of elements, since rounding that all elements share makes it grow so."""
    value = getattr(row, statistic)
    if value is None or (statistic != "max_ratio" and row.numel < FEW):
        return 0.0
    return float(value) / math.sqrt(row.numel) if statistic == "bias" else float(value)


def limits_of(rows: Iterable[Row]) -> list[Limit]:
    kernels = [row for row in rows if row.kind == "kernel" and row.half == "calibration"]
    limits = []
    for dtype in dict.fromkeys(row.dtype for row in kernels):
        for statistic in STATISTICS:
            largest = max((row for row in kernels if row.dtype == dtype), key=lambda row: value_of(row, statistic))
            limits.append(Limit(dtype, statistic, _power_above(value_of(largest, statistic)), largest))
    return limits


def _power_above(value: float) -> float:
    return 2.0 ** math.ceil(math.log2(value)) if 0 < value < math.inf else value


def limits_table(rows: list[Row], limits: list[Limit]) -> str:
    lines = [
        "calibration half, kernels",
        "| dtype | statistic | rows | median | 99 % | largest | limit | what it is |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for limit in limits:
        values = sorted(value_of(row, limit.statistic) for row in rows if _counts(row, limit.dtype, "calibration", "kernel"))
        lines.append(
            f"| {limit.dtype} | {limit.statistic} | {len(values)} | {_share(values, 0.5):.2g} | {_share(values, 0.99):.3g} | "
            f"{values[-1]:.3g} | {limit.value:g} | {describe(limit.largest)} |"
        )
    return "\n".join(lines) + "\n"


def check_table(rows: list[Row], limits: list[Limit]) -> str:
    lines = [
        "held-back half",
        "| dtype | kind | statistic | rows | median | largest | limit | above | what the largest is |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in ("kernel", "program"):
        for limit in limits:
            held = [row for row in rows if _counts(row, limit.dtype, "held", kind)]
            if held:
                lines.append(_check_line(held, limit, kind))
    misplaced = [row for row in rows if row.kind == "kernel" and (row.num_nonfinite or row.num_flipped)]
    lines.append(f"\nkernel rows with a misplaced NaN or infinity, or a flipped integer: {len(misplaced)}")
    return "\n".join(lines + [f"  {describe(row)}: {row.num_nonfinite}" for row in misplaced[:12]]) + "\n"


def _check_line(held: list[Row], limit: Limit, kind: str) -> str:
    values = sorted(value_of(row, limit.statistic) for row in held)
    worst = max(held, key=lambda row: value_of(row, limit.statistic))
    above = sum(value > limit.value for value in values)
    return (
        f"| {limit.dtype} | {kind} | {limit.statistic} | {len(held)} | {_share(values, 0.5):.2g} | "
        f"{values[-1]:.3g} | {limit.value:g} | {above} | {describe(worst)} |"
    )


def above_record(rows: Iterable[Row], half: str) -> list[tuple[Row, str]]:
    """Find the kernels of a half that the limits of record would blame, each with the statistic that does; a leeway widens them all."""
    kernels = [row for row in rows if row.kind == "kernel" and row.half == half]
    return [(row, one) for row in kernels for one in STATISTICS if value_of(row, one) > OF_RECORD[row.dtype][one] * row.leeway]


def record_table(rows: list[Row]) -> str:
    lines = []
    for half in ("calibration", "held"):
        above = above_record(rows, half)
        lines.append(f"{half} half, kernels above the limits of record: {len({row for row, _ in above})}")
        lines += [f"  {one} {value_of(row, one):.3g}, leeway {row.leeway:g}, {row.dtype}: {describe(row)}" for row, one in above[:24]]
    return "\n".join(lines) + "\n"


def worst_table(rows: list[Row], count: int = 12) -> str:
    lines = ["largest kernels of both halves by max_ratio", "| dtype | max | rms | bias | what |", "|---|---|---|---|---|"]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        kernels = [row for row in rows if row.kind == "kernel" and row.dtype == dtype]
        for row in sorted(kernels, key=lambda row: -row.max_ratio)[:count]:
            lines.append(f"| {dtype} | {row.max_ratio:.3g} | {row.rms_ratio:.3g} | {row.bias or 0:.3g} | {row.half}: {describe(row)} |")
    return "\n".join(lines) + "\n"


def describe(row: Row) -> str:
    return f"{row.op} {row.size} {row.phase} {row.slot}, {row.implementation}, {row.distribution}"


def _counts(row: Row, dtype: str, half: str, kind: str) -> bool:
    return row.dtype == dtype and row.half == half and row.kind == kind


def _share(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]
