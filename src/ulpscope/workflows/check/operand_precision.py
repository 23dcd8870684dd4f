# SPDX-License-Identifier: Apache-2.0
"""Tell whether narrower operands explain why products err: for a whole family first, then for its erring calls alone.

A machine chooses kernels by size, so one product of a family may round its operands while no other does. It is recognised alone where its
result is that of rounded operands. Where a call computes more than products, it is open what is rounded on the way, and any error below
that rounding would pass for it. So the error also has to be as large as that rounding is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from statistics import median

import torch

from ulpscope.judge import threshold
from ulpscope.judge.checks import check_limits, check_multiple, with_own_leeway
from ulpscope.model import CallName, OperandFormat, Slot
from ulpscope.replay import Program, Yardstick, effective_operands
from ulpscope.replay.yardstick.honest import Evaluations
from ulpscope.replay.yardstick.rounding import FORMATS, ROUNDINGS

__all__ = ["recognised_operands"]

Results = Sequence[tuple[Program, Mapping[Slot, torch.Tensor]]]
_ALIKE = 1.1


def recognised_operands(family: Sequence[tuple[CallName, Program, Mapping[Slot, torch.Tensor]]]) -> OperandFormat | None:
    """Return the format to which a device rounds the operands of some or all of a family; None where that explains nothing."""
    beyond = [(program, errant) for call, program, made in family if (errant := _beyond(call, program, made))]
    groups: tuple[Results, ...] = ([(program, made) for _, program, made in family], beyond)
    for group in groups:
        found = effective_operands(group) if beyond else None
        if found is not None:
            return _of_that_size(found, beyond)
    return None


def _beyond(call: CallName, program: Program, made: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
    """Return the results of a call that err beyond their limits."""
    found = (with_own_leeway(one, call) for one in Yardstick(program).measure(made, enough=check_limits))
    return {one.slot: made[one.slot] for one in found if check_multiple(one, "forward") > 1}


def _of_that_size(found: OperandFormat, beyond: Results) -> OperandFormat | None:
    """Choose the format whose rounding is as large as the errors are: the one that was found, unless another is nearer.

    float16 differs from TF32 in its range alone. Where no operand is small enough to tell them apart, the format is TF32, which machines
    use for float32.
    """
    sizes = {one: size for one in FORMATS if (size := _size(one, beyond)) is not None}
    if not sizes:
        return None
    nearest = min(sizes, key=lambda one: abs(log(sizes[one])))
    alike = [one for one in sizes if abs(log(sizes[one] / sizes[nearest])) <= log(_ALIKE)]
    chosen: OperandFormat = "tf32" if "tf32" in alike else found if found in alike else nearest
    return chosen if abs(log(sizes[chosen])) <= log(threshold("check_rounding")) else None


def _size(operands: OperandFormat, beyond: Results) -> float | None:
    """Return the median error, over the change that rounding the operands makes; None where it changes nothing."""
    ratios = []
    for program, made in beyond:
        exact = Evaluations(program).exact
        rounded = [Evaluations(program, one).exact for one in ROUNDINGS[operands]]
        for slot, value in made.items():
            error, *changes = (_rms(one.to(torch.float64) - exact[slot]) for one in (value, *(some[slot] for some in rounded)))
            near = sorted((error / change for change in changes if change > 0 and error > 0), key=lambda ratio: abs(log(ratio)))
            ratios += near[:1]
    return median(ratios) if ratios else None


def _rms(difference: torch.Tensor) -> float:
    return float(torch.nan_to_num(difference, nan=0.0, posinf=0.0, neginf=0.0).abs().square().mean().sqrt())
