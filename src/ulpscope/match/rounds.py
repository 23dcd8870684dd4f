# SPDX-License-Identifier: Apache-2.0
"""Pairing by keys in rounds: where a tool pairs calls by what they are called, and not by where they stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

__all__ = ["in_order", "pair_in_rounds"]

Keys = Sequence[Hashable | None]


def pair_in_rounds(rounds: Sequence[tuple[Keys, Keys]]) -> dict[int, int]:
    """Pair the places of two lists: in each round the first of a key with the first of that key, the second with the second.

    A round looks only at what the earlier ones left, and at nothing whose key is None.

    >>> pair_in_rounds([(["a.1", "b.1"], ["a.1", "b.7"]), (["a", "b"], ["a", "b"])])
    {0: 0, 1: 1}
    """
    partners: dict[int, int] = {}
    for left, right in rounds:
        taken = set(partners.values())
        waiting: defaultdict[Hashable, list[int]] = defaultdict(list)
        for place in reversed(range(len(right))):
            if place not in taken and right[place] is not None:
                waiting[right[place]].append(place)
        for place, key in enumerate(left):
            if key is not None and place not in partners and waiting.get(key):
                partners[place] = waiting[key].pop()
    return partners


def in_order(partners: Mapping[int, int], num_left: int, num_right: int) -> Iterator[tuple[int | None, int | None]]:
    """Places side by side; a lone place of the right side comes before the first partner that ran later."""
    taken = set(partners.values())
    told = 0
    for at in range(num_left):
        partner = partners.get(at)
        if partner is not None and partner >= told:
            yield from ((None, lone) for lone in range(told, partner) if lone not in taken)
            told = partner + 1
        yield at, partner
    yield from ((None, lone) for lone in range(told, num_right) if lone not in taken)
