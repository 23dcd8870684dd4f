# SPDX-License-Identifier: Apache-2.0
"""Find machines that round the operands of matrix products to a narrower format in every call: a property of the machine, not a fault.

All products of a side together tell the format: the one whose rounding best explains what was recorded. A single wrong product cannot pass
for a machine, since the median over the family decides.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median

import torch

from ulpscope.model import OperandFormat, Slot
from ulpscope.replay.program import Program
from ulpscope.replay.yardstick.rounding import FORMATS
from ulpscope.replay.yardstick.yardstick import Yardstick

__all__ = ["effective_operands"]

SUSPICIOUS = 4.0
"""Median rms ratio of a family from which on its precision is asked for."""
EXPLAINED = 4.0
"""Times by which a format has to bring that median down to be the explanation."""
ALIKE = 1.1
"""Formats of the same precision have about the same median; calls at the end of a range tell them apart."""
Family = Sequence[tuple[Program, Mapping[Slot, torch.Tensor]]]


def effective_operands(programs_and_recorded: Family) -> OperandFormat | None:
    """Return the format to which one side rounds the operands of a family of matrix products; None where full precision explains them."""
    plain = median(_ratios(programs_and_recorded, None))
    if plain <= SUSPICIOUS:
        return None
    found = {one: _ratios(programs_and_recorded, one) for one in FORMATS}
    best = min(median(one) for one in found.values())
    if best * EXPLAINED > plain:
        return None
    alike = [one for one in FORMATS if median(found[one]) <= best * ALIKE]
    return min(alike, key=lambda one: geometric_mean(found[one]))


def _ratios(family: Family, operands: OperandFormat | None) -> list[float]:
    measured = (Yardstick(program, operands=operands).measure(recorded, enough=_unsuspicious) for program, recorded in family)
    found = [one.rms_ratio for some in measured for one in some if one.numel > 1]
    return [max(one, sys.float_info.min) for one in found] or [0.0]


def _unsuspicious(dtype: str) -> tuple[float, float]:
    return math.inf, 1.0
