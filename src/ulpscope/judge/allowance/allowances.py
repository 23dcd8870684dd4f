# SPDX-License-Identifier: Apache-2.0
"""What a rule may look at besides the measurement of a slot."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeAlias

from ulpscope.judge.thresholds import threshold
from ulpscope.model import Measurement, SlotPair, Verdict
from ulpscope.model.nouns import dataclass

__all__ = ["Allowance", "Rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What an honest call may err by in one slot.

    `units` is the relative rounding error of the dtype, `entering` the worst distance of what enters the call, `drift` the largest
    distance that honest calls have reached so far. `error` is the absolute difference of the slot; `terms`, `carried`,
    `narrowed` (from operands that a machine rounds to a narrower format) and `jump` are absolute too (see conditioning). `is_step` is for
    results of an optimizer, whose elements jump by `jump`.
    `inputs_known` is False where something enters that only one side has, or that is laid out otherwise: it may be anything.
    """

    units: float = 0.0
    entering: float = 0.0
    error: float = inf
    terms: float = 0.0
    carried: float = 0.0
    narrowed: float = 0.0
    jump: float = 0.0
    drift: float = 0.0
    is_given: bool = False
    is_start: bool = False
    is_step: bool = False
    is_known_honest: bool = False
    can_flip: bool = False
    inputs_agree: bool = True
    inputs_known: bool = True
    inputs_scaled: bool = False

    @property
    def limit(self) -> float:
        """The absolute error that is explained."""
        return self.units * self.terms + threshold("amplification") * self.carried + self.narrowed


Rule: TypeAlias = Callable[[SlotPair, Measurement, Allowance], Verdict]
