# SPDX-License-Identifier: Apache-2.0
"""Measure how small a fault still shows: damaged results, scored in multiples of the limit. Above 1 a fault is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench.zoo.inputs import CALIBRATION
from bench.zoo.limits import FEW, OF_RECORD
from bench.zoo.operations import OPERATIONS
from bench.zoo.rows import Case, cases

from ulpscope.model import OperandFormat, SlotReplay
from ulpscope.replay.yardstick.rounding import ROUNDINGS, RoundedOperands
from ulpscope.replay.yardstick.yardstick import Yardstick

SUBJECTS = ("linear", "softmax", "layer_norm", "gelu", "sdpa", "cross_entropy", "embedding", "conv2d", "batch_norm")
Fault = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """One call: the origin of its results, and how it is measured."""

    title: str
    case: Case
    operands: OperandFormat | None = None


def _scaled(by: float) -> Fault:
    return lambda value: (value.double() * by).to(value.dtype)


def _one_row_lost(value: torch.Tensor) -> torch.Tensor:
    damaged = value.clone().contiguous()
    damaged.view(-1, damaged.shape[-1] if damaged.dim() else 1)[-1] = 0
    return damaged


def _bit_flipped(below_exponent: int) -> Fault:
    """Flip one bit of the element nearest to the rms: the lowest of the exponent (0), or the mantissa's so many below."""

    def flip(value: torch.Tensor) -> torch.Tensor:
        damaged = value.clone().contiguous()
        flat = damaged.view(-1)
        place = int((flat.double().abs() - flat.double().square().mean().sqrt()).abs().argmin())
        digits = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[value.dtype]
        bits = flat.view(torch.int32 if value.dtype == torch.float32 else torch.int16)
        bits[place] ^= 1 << max(0, digits - below_exponent)
        return damaged

    return flip


FAULTS: dict[str, Fault] = {
    "x 1.01": _scaled(1.01),
    "x 1.001": _scaled(1.001),
    "x 1.0001": _scaled(1.0001),
    "x (1 + 1e-5)": _scaled(1 + 1e-5),
    "one row zeroed": _one_row_lost,
    "exponent bit": _bit_flipped(0),
    "mantissa bit 2^-4": _bit_flipped(4),
    "mantissa bit 2^-8": _bit_flipped(8),
}


def score(found: SlotReplay) -> float:
    """Return the worst statistic, in multiples of its limit."""
    limits = OF_RECORD[found.dtype]
    scores = [found.max_ratio / limits["max_ratio"]]
    if found.numel >= FEW:
        scores.append(found.rms_ratio / limits["rms_ratio"])
        scores.append((found.bias or 0.0) / math.sqrt(found.numel) / limits["bias"])
    return max(scores)


def sensitivity_table() -> str:
    lines = [f"| injected into | {' | '.join(FAULTS)} |", "|" + "---|" * (len(FAULTS) + 1)]
    for title, group in _groups():
        found = [_scores(subject) for subject in group]
        cells = [_range([one[fault] for one in found]) for fault in FAULTS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _scores(subject: Subject) -> dict[str, float]:
    program = subject.case.program
    yardstick = Yardstick(program, operands=subject.operands)
    recorded = _recorded(subject)
    return {
        name: min(score(one) for one in yardstick.measure({s: fault(v) for s, v in recorded.items()})) for name, fault in FAULTS.items()
    }


def _recorded(subject: Subject) -> dict[Any, torch.Tensor]:
    program = subject.case.program
    if subject.operands is None:
        return program(program.inputs)
    with RoundedOperands(ROUNDINGS[subject.operands][0]):
        return program(program.inputs)


def _groups() -> Iterator[tuple[str, list[Subject]]]:
    plain = [name for name in SUBJECTS if name != "batch_norm"]
    for dtype in OF_RECORD:
        for phase in ("forward", "backward"):
            yield f"{dtype}: {', '.join(plain)}; {phase}", [_subject(name, dtype, "normal", phase) for name in plain]
            yield f"{dtype}: batch_norm on mean 100, {phase}", [_subject("batch_norm", dtype, "mean 100", phase)]
    for operands in ROUNDINGS:
        subjects = [_subject("linear", "float32", "normal", phase, operands) for phase in ("forward", "backward")]
        yield f"float32: linear on a machine with {operands} operands", subjects
        yield f"float32: sdpa on a machine with {operands} operands", [_subject("sdpa", "float32", "normal", "forward", operands)]


def _subject(name: str, dtype: str, distribution: str, phase: str, operands: OperandFormat | None = None) -> Subject:
    operation = OPERATIONS[name]
    found = cases("calibration", operation, dtype, distribution, CALIBRATION[distribution], operation.sizes[0], 7)
    return Subject(name, next(case for case in found if case.phase == phase), operands)


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2g}" if len(values) == 1 else f"{low:.2g} to {high:.2g}"
