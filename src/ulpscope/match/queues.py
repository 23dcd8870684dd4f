# SPDX-License-Identifier: Apache-2.0
"""Pairing of two lists that are read side by side, as the guide of ptdbg describes it.

The newest item of each list is looked for among those of the other that still wait for a partner; with a partner found, what waited before
it on either side is given up. An item has keys that it is found by, and keys by which it finds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["QueueKeys", "pair_in_queues"]


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one item: `own` are those that it is found by, `wanted` those of a partner."""

    own: Sequence[Hashable]
    wanted: Sequence[Hashable]


def pair_in_queues(left: Sequence[QueueKeys], right: Sequence[QueueKeys]) -> Iterator[tuple[int, int]]:
    """The places of partners, ascending on both sides."""
    ours, theirs = _Queue(left), _Queue(right)
    for _ in range(max(len(left), len(right))):
        newest, other_newest = ours.read(), theirs.read()
        if newest is None or other_newest is None:
            return
        at, partner = newest, theirs.oldest_partner(left[newest])
        if partner is None:
            found = ours.oldest_partner(right[other_newest])
            if found is None:
                continue
            at, partner = found, other_newest
        yield at, partner
        ours.give_up(at)
        theirs.give_up(partner)


class _Queue:
    """The items of one list that were read and have no partner yet, found by what a partner has to be like."""

    def __init__(self, items: Sequence[QueueKeys]) -> None:
        self._items = items
        self._begin = 0
        self._end = 0
        self._places: dict[Hashable, list[int]] = defaultdict(list)

    def read(self) -> int | None:
        """The newest item's place: one more, or the last again at the end of the list; None where none waits."""
        if self._end < len(self._items):
            for key in self._items[self._end].own:
                self._places[key].append(self._end)
            self._end += 1
        return self._end - 1 if self._end > self._begin else None

    def give_up(self, upto: int) -> None:
        """Let nothing up to this place wait any longer."""
        self._begin = upto + 1

    def oldest_partner(self, item: QueueKeys) -> int | None:
        return min((place for key in item.wanted if (place := self._oldest(key)) is not None), default=None)

    def _oldest(self, key: Hashable) -> int | None:
        places = self._places.get(key, [])
        at = bisect_left(places, self._begin)
        return places[at] if at < len(places) else None
