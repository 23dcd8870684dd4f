# SPDX-License-Identifier: Apache-2.0
"""Pair the operators of the NPU file with those of the bench file, by the rules of the old guide. Operators are partners when

    exact   all names are equal, tensor counts and shapes are equal, and types are equal or both floating
    fuzzy   the same, but for the number of the call in the names
    aten    one side is an aten operator and the other a function that it comes from; names alone decide

Both files are read side by side. Every operator of the NPU file is in the result, with its partner or without.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ulpscope.compat.ptdbg.compare.aten_names import calls_of_aten, is_aten, plain_name
from ulpscope.match.queues import QueueKeys, pair_in_queues
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
    """Yield all operators of the NPU file in order, each with its partner."""
    ours, theirs = ([_keys(operator, fuzzy) for operator in side] for side in (npu, bench))
    done = 0
    for at, partner in pair_in_queues(ours, theirs):
        yield from map(Match, npu[done:at])
        yield Match(npu[at], bench[partner], _rule(npu[at], bench[partner]))
        done = at + 1
    yield from map(Match, npu[done:])


def _rule(npu: WrittenCall, bench: WrittenCall) -> Literal["exact", "fuzzy", "aten"]:
    if is_aten(npu.name) != is_aten(bench.name):
        return "aten"
    return "exact" if npu.name == bench.name else "fuzzy"


def _keys(operator: WrittenCall, fuzzy: bool) -> QueueKeys:
    """Return the key that exact or fuzzy partners share, and the functions that tie an aten operator to its caller."""
    likeness = tuple(
        (_COUNT.sub(r"_\1", value.name, count=1) if fuzzy else value.name, value.shape, _kind(value)) for value in operator.values
    )
    phase, aten = operator.name.rpartition("_")[2], is_aten(operator.name)
    calls = sorted(calls_of_aten(operator.name) if aten else {plain_name(operator.name)} - {""})
    own, wanted = ([likeness, *_ties(kind, calls, phase)] for kind in (aten, not aten))
    return QueueKeys(own, wanted)


def _ties(aten: bool, calls: Sequence[str], phase: str) -> list[Hashable]:
    return [(aten, call, phase) for call in calls]


def _kind(value: WrittenValue) -> str:
    return "floating" if value.dtype in _FLOATING else value.dtype
