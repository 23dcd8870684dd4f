# SPDX-License-Identifier: Apache-2.0
"""Sequence alignment of two lists of calls: anchors first, scores between them, never crosswise.

An anchor is a key that occurs equally often on both sides of a block; its occurrences pair one by one, and the longest run
of them that keeps the order stays. Keys go from strict to loose, so long runs with few differences cost
one pass. What remains between anchors is small as a rule and is aligned by score; a large rest goes through the
standard library's matcher where that is cheap, and through a band along the diagonal where it is not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeAlias

from ulpscope.match.likeness import PAIRABLE, Sketch

__all__ = ["align"]

Block: TypeAlias = tuple[int, int, int, int]
Match: TypeAlias = tuple[int, int]

_SCORED_CELLS = 1 << 14
_DIFFLIB_CELLS = 1 << 22
_BAND = 48
_PASSES = 4


def align(left: Sequence[Sketch], right: Sequence[Sketch]) -> list[Match]:
    """Positions that belong together, ascending on both sides; the same whichever side is called left."""
    if (len(left), [one.place for one in left]) > (len(right), [one.place for one in right]):
        return [(i, j) for j, i in _align(right, left)]
    return _align(left, right)


def _align(left: Sequence[Sketch], right: Sequence[Sketch]) -> list[Match]:
    matches: list[Match] = []
    blocks: list[Block] = [(0, len(left), 0, len(right))]
    keys = [(list(a), list(b)) for a, b in zip(_columns(left), _columns(right), strict=True)]
    for left_keys, right_keys in keys:
        blocks = _anchor(left_keys, right_keys, blocks, matches)
    for block in blocks:
        matches += _resolve(left, right, keys[1], block)
    return sorted(matches)


def _columns(sketches: Sequence[Sketch]) -> list[Sequence[Hashable]]:
    return list(zip(*(sketch.keys() for sketch in sketches), strict=True)) or [()] * 4


def _anchor(left: list[Hashable], right: list[Hashable], blocks: list[Block], matches: list[Match]) -> list[Block]:
    """Match anchors until no block yields another; the blocks that remain."""
    settled: list[Block] = []
    for _ in range(_PASSES):
        open_blocks: list[Block] = []
        for block in blocks:
            anchors = _anchors(left, right, block)
            matches += anchors
            (open_blocks if anchors else settled).extend(_gaps(block, anchors))
        blocks = open_blocks
        if not blocks:
            break
    return settled + blocks


def _anchors(left: list[Hashable], right: list[Hashable], block: Block) -> list[Match]:
    a0, a1, b0, b1 = block
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for j in range(b0, b1):
        places[right[j]].append(j)
    counts = Counter(left[a0:a1])
    used: Counter[Hashable] = Counter()
    candidates: list[Match] = []
    for i in range(a0, a1):
        key = left[i]
        if key in places and len(places[key]) == counts[key]:
            candidates.append((i, places[key][used[key]]))
            used[key] += 1
    return _longest_increasing(candidates)


def _longest_increasing(candidates: list[Match]) -> list[Match]:
    """The longest subsequence that ascends on the right as it does on the left."""
    tails: list[int] = []
    tops: list[int] = []
    previous: list[int] = []
    for index, (_, j) in enumerate(candidates):
        at = bisect_left(tails, j)
        previous.append(tops[at - 1] if at else -1)
        if at == len(tails):
            tails.append(j)
            tops.append(index)
        else:
            tails[at], tops[at] = j, index
    chain: list[Match] = []
    index = tops[-1] if tops else -1
    while index >= 0:
        chain.append(candidates[index])
        index = previous[index]
    return chain[::-1]


def _gaps(block: Block, matches: Sequence[Match]) -> Iterator[Block]:
    """What lies between matches and has something on both sides."""
    i, last_i, j, last_j = block
    for a, b in [*matches, (last_i, last_j)]:
        if a > i and b > j:
            yield i, a, j, b
        i, j = a + 1, b + 1


def _resolve(left: Sequence[Sketch], right: Sequence[Sketch], keys: tuple[list[Hashable], list[Hashable]], block: Block) -> list[Match]:
    a0, a1, b0, b1 = block
    if (a1 - a0) * (b1 - b0) <= _SCORED_CELLS:
        return _by_score(left, right, block)
    found = _by_matcher(*keys, block)
    matches = list(found)
    for gap in _gaps(block, found):
        matches += _by_score(left, right, gap)
    return matches


def _by_matcher(left: list[Hashable], right: list[Hashable], block: Block) -> list[Match]:
    a0, a1, b0, b1 = block
    a, b = left[a0:a1], right[b0:b1]
    head = _common_length(a, b)
    tail = _common_length(a[head:][::-1], b[head:][::-1])
    matches = [(a0 + k, b0 + k) for k in range(head)] + [(a1 - k, b1 - k) for k in range(tail, 0, -1)]
    a, b = a[head : len(a) - tail], b[head : len(b) - tail]
    counts_a, counts_b = Counter(a), Counter(b)
    if sum(count * counts_b[key] for key, count in counts_a.items()) <= _DIFFLIB_CELLS:
        from difflib import SequenceMatcher  # only where calls have no partner

        for i, j, size in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
            matches += [(a0 + head + i + k, b0 + head + j + k) for k in range(size)]
    return sorted(matches)


def _common_length(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _by_score(left: Sequence[Sketch], right: Sequence[Sketch], block: Block) -> list[Match]:
    """The order-keeping pairing of the highest total score, within a band along the diagonal when the block is large."""
    a0, a1, b0, b1 = block
    n, m = a1 - a0, b1 - b0
    is_small = n * m <= _SCORED_CELLS
    width = m if is_small else max(_BAND, m // n + 1)
    kinds: dict[Sketch, int] = {}
    rows = [kinds.setdefault(one if is_small else one.without_values(), len(kinds)) for one in left[a0:a1]]
    columns = [kinds.setdefault(one if is_small else one.without_values(), len(kinds)) for one in right[b0:b1]]
    gains = _Gains(list(kinds))
    best: list[float] = [0.0] * (m + 1)
    moves: list[tuple[int, bytearray]] = []
    for i in range(n):
        center = i * m // n
        low, high = max(0, center - width), min(m, center + width + 1)
        best, move = _row(gains, rows[i], columns, low, high, best)
        moves.append((low, move))
    return _walk_back(moves, a0, b0, m)


class _Gains(dict[tuple[int, int], float]):
    """What pairing two kinds of call is worth, computed when first asked for."""

    def __init__(self, kinds: list[Sketch]) -> None:
        self.kinds = kinds

    def __missing__(self, key: tuple[int, int]) -> float:
        self[key] = gain = self.kinds[key[0]].score(self.kinds[key[1]]) - PAIRABLE
        return gain


def _row(gains: _Gains, kind: int, columns: list[int], low: int, high: int, above: list[float]) -> tuple[list[float], bytearray]:
    """One row of the table: `best[j]` is the score of what pairs with the first j on the right. Moves: 0 up, 1 left, 2 pair."""
    best = above[:]
    move = bytearray(high - low)
    for j in range(low, high):
        gain = gains[kind, columns[j]]
        value, step = above[j + 1], 0
        if best[j] > value:
            value, step = best[j], 1
        if gain > 0 and above[j] + gain > value:
            value, step = above[j] + gain, 2
        best[j + 1] = value
        move[j - low] = step
    if best[high] > best[-1]:
        best[high + 1 :] = [best[high]] * (len(best) - high - 1)
    return best, move


def _walk_back(moves: list[tuple[int, bytearray]], a0: int, b0: int, m: int) -> list[Match]:
    matches: list[Match] = []
    i, j = len(moves) - 1, m - 1
    while i >= 0 and j >= 0:
        low, move = moves[i]
        if j >= low + len(move):
            j = low + len(move) - 1
            continue
        step = move[j - low] if j >= low else 0
        if step == 2:
            matches.append((a0 + i, b0 + j))
        i, j = i - (step != 1), j - (step != 0)
    return matches[::-1]
