# SPDX-License-Identifier: Apache-2.0
"""Which operator of the NPU file is compared with which of the bench file, by the rules of the old guide.

Both files are read side by side. The newest operator of each is looked for among those of the other side that still wait for a
partner; with a partner found, what waited before it on either side is given up. WrittenCalls are partners when

    exact   all names are equal, tensor counts and shapes are equal, and types are equal or both floating
    fuzzy   the same, but for the number of the call in the names
    aten    one side is an aten operator and the other a function that it comes from; names alone decide

Every operator of the NPU file is in the result, with its partner or without.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ulpscope.compat.ptdbg.compare.aten_names import calls_of_aten, is_aten, plain_name
from ulpscope.model.written import WrittenCall, WrittenValue

__all__ = ["Match", "match_operators"]

_FLOATING = frozenset({"torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"})
_COUNT = re.compile(r"_\d{1,9}_(forward|backward)")


@dataclass(frozen=True, slots=True)
class Match:
    """An operator of the NPU file, its partner, and which rule made them partners."""

    npu: WrittenCall
    bench: WrittenCall | None = None
    rule: Literal["exact", "fuzzy", "aten", "none"] = "none"


def match_operators(npu: Sequence[WrittenCall], bench: Sequence[WrittenCall], *, fuzzy: bool = False) -> Iterator[Match]:
    """All operators of the NPU file in order, each with its partner."""
    done = 0
    for at, partner in _partners(_Waiting(npu, fuzzy), _Waiting(bench, fuzzy)):
        yield from map(Match, npu[done:at])
        yield Match(npu[at], bench[partner], _rule(npu[at], bench[partner]))
        done = at + 1
    yield from map(Match, npu[done:])


def _rule(npu: WrittenCall, bench: WrittenCall) -> Literal["exact", "fuzzy", "aten"]:
    if is_aten(npu.name) != is_aten(bench.name):
        return "aten"
    return "exact" if npu.name == bench.name else "fuzzy"


def _partners(npu: _Waiting, bench: _Waiting) -> Iterator[tuple[int, int]]:
    for _ in range(max(len(npu.operators), len(bench.operators))):
        newest_npu, newest_bench = npu.read(), bench.read()
        if newest_npu is None or newest_bench is None:
            return
        at, partner = newest_npu, bench.oldest_partner(npu.operators[newest_npu])
        if partner is None:
            found = npu.oldest_partner(bench.operators[newest_bench])
            if found is None:
                continue
            at, partner = found, newest_bench
        yield at, partner
        npu.give_up(at)
        bench.give_up(partner)


class _Waiting:
    """The operators of one file that were read and have no partner yet, found by what a partner has to be like."""

    def __init__(self, operators: Sequence[WrittenCall], fuzzy: bool) -> None:
        self.operators = operators
        self._fuzzy = fuzzy
        self._begin = 0
        self._end = 0
        self._places: dict[Hashable, list[int]] = defaultdict(list)

    def read(self) -> int | None:
        """The newest operator's place: one more, or the last again at the end of the file; None where none waits."""
        if self._end < len(self.operators):
            operator = self.operators[self._end]
            for key in [_likeness(operator, self._fuzzy), *_functions(operator, is_aten(operator.name))]:
                self._places[key].append(self._end)
            self._end += 1
        return self._end - 1 if self._end > self._begin else None

    def give_up(self, upto: int) -> None:
        """Nothing up to this place waits any longer."""
        self._begin = upto + 1

    def oldest_partner(self, operator: WrittenCall) -> int | None:
        keys = [_likeness(operator, self._fuzzy), *_functions(operator, not is_aten(operator.name))]
        return min((place for key in keys if (place := self._oldest(key)) is not None), default=None)

    def _oldest(self, key: Hashable) -> int | None:
        places = self._places.get(key, [])
        at = bisect_left(places, self._begin)
        return places[at] if at < len(places) else None


def _likeness(operator: WrittenCall, fuzzy: bool) -> Hashable:
    """Names, counts, shapes and kinds of types: equal for operators that are exact or fuzzy partners."""
    return tuple((_COUNT.sub(r"_\1", line.name, count=1) if fuzzy else line.name, line.shape, _kind(line)) for line in operator.values)


def _kind(line: WrittenValue) -> str:
    return "floating" if line.dtype in _FLOATING else line.dtype


def _functions(operator: WrittenCall, aten: bool) -> list[Hashable]:
    """What ties an aten operator and a function together; `aten` tells which of the two is at hand or looked for."""
    phase = operator.name.rpartition("_")[2]
    calls = calls_of_aten(operator.name) if is_aten(operator.name) else {plain_name(operator.name)} - {""}
    return [(aten, call, phase) for call in sorted(calls)]
