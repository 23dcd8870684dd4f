# SPDX-License-Identifier: Apache-2.0
"""How much of what two runs recorded was compared, and what was not."""

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
    """So many parts of one kind that were recorded, and neither compared nor shown harmless, for one reason.

    `why` is a clause that follows "not compared:"; `places` are the first of them.
    """

    kind: PartKind
    why: str
    many: int = 1
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was compared of everything that either side recorded.

    `totals` says how many parts of a kind there are on either side; calls and slots are counted in steps that both sides have.
    `num_opaque` of the calls that were compared are regions into which no recording looks (compiled ones): their inputs
    and outputs were compared, and nothing inside. `is_partial`: whoever asked is content with an answer about what could be compared.
    """

    gaps: tuple[Gap, ...] = ()
    totals: dict[PartKind, int] = field(default_factory=dict)
    num_opaque: int = 0
    is_partial: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether everything that was recorded was compared or shown harmless."""
        return not self.gaps

    @property
    def leaves_doubt(self) -> bool:
        """Whether what was not compared forbids to say that nothing diverges."""
        return not (self.is_whole or self.is_partial)

    def missing(self, kind: PartKind) -> int:
        """How many parts of a kind were not compared."""
        return sum(gap.many for gap in self.gaps if gap.kind == kind)


def joined_gaps(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """One gap for each kind and reason, the largest parts first."""
    joined: dict[tuple[PartKind, str], Gap] = {}
    for gap in gaps:
        known = joined.get((gap.kind, gap.why))
        places = (*known.places, *gap.places)[:_MOST_PLACES] if known else gap.places[:_MOST_PLACES]
        joined[gap.kind, gap.why] = replace(gap, many=gap.many + (known.many if known else 0), places=places)
    return tuple(sorted(joined.values(), key=lambda gap: PART_KINDS.index(gap.kind)))
