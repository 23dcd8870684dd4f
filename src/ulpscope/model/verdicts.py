# SPDX-License-Identifier: Apache-2.0
"""What a measurement means."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ulpscope.model.measurements import FingerprintMeasurement, Measurement, SummaryMeasurement
from ulpscope.model.nouns import dataclass
from ulpscope.model.pairs import Pair, SlotPair
from ulpscope.model.replays import SlotReplay

__all__ = ["ArgumentDifference", "Contribution", "JudgedCall", "JudgedSlot", "Side", "Verdict", "VerdictLevel"]

Side: TypeAlias = Literal["subject", "reference"]
VerdictLevel: TypeAlias = Literal["same", "rounding", "differs", "unmatched", "unmeasured"]
Contribution: TypeAlias = Literal["clean", "contributed", "inherited", "amplified", "masked", "unmatched", "unknown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The rule that decided, and its reason in one clause. `multiple` is the distance over what the rule allows.

    `side` is the side that errs, where replay can tell.
    """

    level: VerdictLevel
    rule: str
    reason: str
    multiple: float | None = None
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class JudgedSlot:
    """A slot with its verdict; `subject` and `reference` are what replay found out about each side by its own inputs."""

    pair: SlotPair
    measurement: Measurement
    verdict: Verdict
    subject: SlotReplay | None = None
    reference: SlotReplay | None = None

    @property
    def differs_by_unknown(self) -> bool:
        """Whether the bits are known to differ, and nothing that was kept tells by how much."""
        found = self.measurement
        is_bitwise = isinstance(found, (FingerprintMeasurement, SummaryMeasurement)) and found.equal is False
        return is_bitwise and self.verdict.level == "unmeasured"


@dataclass(frozen=True, slots=True)
class ArgumentDifference:
    """One non-tensor argument, dtype, shape, stride or mode that differs; the values are shortened texts."""

    what: str
    subject: str
    reference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCall:
    """A pair with everything that was found out about it; `contribution` is set by explain."""

    pair: Pair
    slots: tuple[JudgedSlot, ...] = ()
    differences: tuple[ArgumentDifference, ...] = ()
    contribution: Contribution = "unknown"
    multiple: float | None = None

    @property
    def level(self) -> VerdictLevel:
        """The worst verdict among its slots."""
        if self.pair.subject is None or self.pair.reference is None:
            return "unmatched"
        ranking: tuple[VerdictLevel, ...] = ("same", "unmeasured", "rounding", "unmatched", "differs")
        return max((slot.verdict.level for slot in self.slots), key=ranking.index, default="same")
