# SPDX-License-Identifier: Apache-2.0
"""Define pairs: a call or a slot of one run beside its partner in the other."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ulpscope.model.names import Slot
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import CallRecord, TensorRecord

__all__ = ["MatchedBy", "Pair", "SlotPair"]

MatchedBy: TypeAlias = Literal["name", "alignment", "mapping", "nothing"]


@dataclass(frozen=True, slots=True)
class SlotPair:
    """One slot on both sides; None where a side lacks it."""

    slot: Slot
    subject: TensorRecord | None
    reference: TensorRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One call (in one phase) on both sides; None where a side lacks it."""

    subject: CallRecord | None
    reference: CallRecord | None
    matched_by: MatchedBy
    slots: tuple[SlotPair, ...] = ()

    @property
    def record(self) -> CallRecord:
        """Return the subject's record, or the reference's where the subject has none."""
        record = self.subject or self.reference
        assert record is not None, "a pair has at least one side"
        return record
