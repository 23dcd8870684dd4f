# SPDX-License-Identifier: Apache-2.0
"""Tell how far two runs of the same program on the same machine come apart, as measured between a reference and its repeat."""

from __future__ import annotations

from dataclasses import field
from math import inf, log, sqrt

from ulpscope.model.comparison.measurements import FingerprintMeasurement, Measurement, NotMeasured
from ulpscope.model.comparison.pairs import Pair, SlotPair
from ulpscope.model.names import CallName, Slot
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import CallRecord, Level, Phase

__all__ = ["BandKey", "Bands"]

_SMALLEST_SHARE = 8.0


@dataclass(frozen=True, slots=True)
class BandKey:
    """One call of a run, in one phase."""

    rank: int
    step: int
    phase: Phase
    level: Level
    module: str
    call: CallName
    recompute: bool = False

    @classmethod
    def of(cls, record: CallRecord) -> BandKey:
        return cls(record.rank, record.step, record.phase, record.level, record.module, record.call, record.recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """Distances between a reference and its repeat, by call and slot of the reference. A slot that is missing here agreed bitwise.

    A slot may be `factor` times as far apart as the repeat is: the largest of n normal errors is sqrt(2 ln 2n) standard deviations, and the
    one repeat may have shown as little as an eighth of one. `nondeterministic` are the calls that gave other bits on bitwise equal inputs.
    """

    slots: dict[tuple[BandKey, Slot], float] = field(default_factory=dict)
    calls: dict[BandKey, float] = field(default_factory=dict)
    nondeterministic: tuple[BandKey, ...] = ()
    num_slots: int = 0

    @property
    def factor(self) -> float:
        return _SMALLEST_SHARE * sqrt(2 * log(2 * max(self.num_slots, 1)))

    def band(self, pair: Pair, slot: SlotPair) -> float:
        """Return the distance of a slot in the repeat, or of its call's inputs if that is larger; 0 if all of them agreed."""
        if pair.reference is None or slot.reference is None:
            return 0.0
        key = BandKey.of(pair.reference)
        return max(self.slots.get((key, slot.reference.slot), 0.0), self.calls.get(key, 0.0))

    def allows(self, pair: Pair, slot: SlotPair, measurement: Measurement) -> bool:
        """Tell whether a slot is no farther apart than a repeat of the reference makes it."""
        band = self.band(pair, slot)
        if band == 0.0 or isinstance(measurement, NotMeasured):
            return False
        if isinstance(measurement, FingerprintMeasurement):
            return True
        return measurement.distance <= self.factor * band or band == inf
