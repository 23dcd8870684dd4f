# SPDX-License-Identifier: Apache-2.0
"""Define what a measurement means: the verdict of a slot and of a call."""

from __future__ import annotations

from math import inf
from typing import Literal, TypeAlias

from ulpscope.model.comparison.measurements import FingerprintMeasurement, Measurement, SummaryMeasurement
from ulpscope.model.comparison.pairs import Pair, SlotPair
from ulpscope.model.comparison.replays import SlotReplay
from ulpscope.model.dtypes import DTYPES
from ulpscope.model.nouns import dataclass

__all__ = [
    "RULE_NAMES",
    "Amplification",
    "ArgumentDifference",
    "Behind",
    "Contribution",
    "JudgedCall",
    "JudgedSlot",
    "Side",
    "Verdict",
    "VerdictLevel",
]

RULE_NAMES = ("derived", "ptdbg")
"""The names of the rule sets that can judge a comparison, the default first."""
Side: TypeAlias = Literal["subject", "reference"]
VerdictLevel: TypeAlias = Literal["same", "rounding", "differs", "unmatched", "unmeasured"]
Contribution: TypeAlias = Literal["clean", "contributed", "inherited", "amplified", "masked", "unmatched", "unknown"]
Behind: TypeAlias = Literal["fork", "choice", "random", "unwritten"]
"""Why two honest runs need not share a value: a decision that fell the other way, a free choice, other random numbers, memory that was
never written."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict, the rule that gave it, and its reason in one clause. `multiple` is the distance over what the rule allows.

    `side` is the side that errs, where replay can tell.
    """

    level: VerdictLevel
    rule: str
    reason: str
    multiple: float | None = None
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class JudgedSlot:
    """A slot with its verdict; `subject` and `reference` hold what replay found on each side's own inputs.

    `behind` says why the two sides need not agree here, where they do not.
    """

    pair: SlotPair
    measurement: Measurement
    verdict: Verdict
    subject: SlotReplay | None = None
    reference: SlotReplay | None = None
    behind: Behind | None = None

    @property
    def differs_by_unknown(self) -> bool:
        """Tell whether the bits are known to differ by an unknown distance: no kept value or statistic tells it."""
        found = self.measurement
        is_bitwise = isinstance(found, (FingerprintMeasurement, SummaryMeasurement)) and found.equal is False
        return is_bitwise and self.verdict.level == "unmeasured"


@dataclass(frozen=True, slots=True)
class Amplification:
    """A relative difference that a call made larger: from `before` among its inputs to `after` in a result.

    It exists only where both are known and the difference grew: a difference that was absent, unknown or shrank was not magnified.
    """

    before: float
    after: float

    def __post_init__(self) -> None:
        if not 0 < self.before < self.after < inf:
            raise ValueError(f"a difference of {self.before} that becomes {self.after} is not magnified")

    @property
    def factor(self) -> float:
        return self.after / self.before

    @classmethod
    def of(cls, before: float, after: float | None) -> Amplification | None:
        """Return the amplification, or None where the difference did not grow or is not known."""
        return cls(before, after) if after is not None and 0 < before < after < inf else None


@dataclass(frozen=True, slots=True)
class ArgumentDifference:
    """One non-tensor argument, dtype, shape, stride or mode that differs; the values are shortened texts."""

    what: str
    subject: str
    reference: str

    @property
    def is_of_dtypes(self) -> bool:
        """Tell whether both sides name a dtype."""
        return self.subject.strip("'") in DTYPES and self.reference.strip("'") in DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCall:
    """A pair of calls with its judged slots and argument differences; explain sets `contribution`.

    `drift` is how far apart its results honestly are, as far as that is not mere cancellation.
    """

    pair: Pair
    slots: tuple[JudgedSlot, ...] = ()
    differences: tuple[ArgumentDifference, ...] = ()
    contribution: Contribution = "unknown"
    multiple: float | None = None
    drift: float = 0.0

    @property
    def level(self) -> VerdictLevel:
        """Return the worst verdict among the slots."""
        if self.pair.subject is None or self.pair.reference is None:
            return "unmatched"
        ranking: tuple[VerdictLevel, ...] = ("same", "unmeasured", "rounding", "unmatched", "differs")
        return max((slot.verdict.level for slot in self.slots), key=ranking.index, default="same")
