# SPDX-License-Identifier: Apache-2.0
"""Count the parts of two recorded runs that were compared, and those that were not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from typing import Literal, TypeAlias, get_args

from ulpscope.model.nouns import dataclass

__all__ = ["PART_KINDS", "Coverage", "Gap", "PartKind", "joined_gaps"]

PartKind: TypeAlias = Literal["rank", "step", "phase", "file", "call", "slot"]
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)
"""From the largest part of a run to the smallest."""
_MOST_PLACES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Recorded parts of one kind, `many` of them, that were neither compared nor shown harmless, all for one reason.

    `why` is a clause that follows "not compared:"; `places` are the first few parts.
    """

    kind: PartKind
    why: str
    many: int = 1
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The share of the recorded parts that was compared.

    `totals` counts the parts of a kind that either side has; calls and slots are counted in steps that both sides have. `num_opaque` of the
    compared calls are regions that no recording looks into (compiled ones): their inputs and outputs were compared, and nothing inside.
    With `is_partial` the user asked for an answer about the comparable parts alone.
    """

    gaps: tuple[Gap, ...] = ()
    totals: dict[PartKind, int] = field(default_factory=dict)
    num_opaque: int = 0
    is_partial: bool = False

    @property
    def is_whole(self) -> bool:
        """Tell whether every recorded part was compared or shown harmless."""
        return not self.gaps

    @property
    def leaves_doubt(self) -> bool:
        """Tell whether parts that were not compared forbid the answer that nothing diverges."""
        return not (self.is_whole or self.is_partial)

    def missing(self, kind: PartKind) -> int:
        """Count the parts of a kind that were not compared."""
        return sum(gap.many for gap in self.gaps if gap.kind == kind)


def joined_gaps(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Merge gaps of the same kind and reason, the largest parts first."""
    joined: dict[tuple[PartKind, str], Gap] = {}
    for gap in gaps:
        known = joined.get((gap.kind, gap.why))
        places = (*known.places, *gap.places)[:_MOST_PLACES] if known else gap.places[:_MOST_PLACES]
        joined[gap.kind, gap.why] = replace(gap, many=gap.many + (known.many if known else 0), places=places)
    return tuple(sorted(joined.values(), key=lambda gap: PART_KINDS.index(gap.kind)))
