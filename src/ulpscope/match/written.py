# SPDX-License-Identifier: Apache-2.0
"""Calls of two dumps in the words of the dumps become pairs, by the names that a door gives them.

By name: equal names in their order, then what is left by looser names. In order: the calls are aligned as those of two runs are, and are
partners where their looser names agree. Within a call values are partners by their place in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ulpscope.match.alignment import align
from ulpscope.match.likeness import Sketch
from ulpscope.match.rounds import in_order, pair_in_rounds
from ulpscope.model.written import WrittenCall, WrittenCallPair, WrittenPair, WrittenValue

__all__ = ["CallNames", "pair_written"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CallNames:
    """What a call is looked for by: its name, the name for what is left over (None: never), and the name without its count."""

    full: list[str] = field(default_factory=list)
    looser: list[str | None] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)


def pair_written(
    subject: Sequence[WrittenCall],
    reference: Sequence[WrittenCall],
    names: tuple[CallNames, CallNames],
    *,
    aligned: bool = False,
    rows: Mapping[str, str] | None = None,
) -> list[WrittenCallPair]:
    """Pair all calls, in the subject's order; `rows` names values of the reference that are partners whatever they are called."""
    ours, theirs = names
    if aligned:
        partners = _aligned(subject, reference, ours.uncounted, theirs.uncounted)
    else:
        partners = pair_in_rounds([(ours.full, theirs.full), (ours.looser, theirs.looser)])
    mapped = _mapped(subject, reference, rows or {})
    taken = frozenset(value.name for value in mapped.values())
    return [
        pair
        for at, partner in in_order(partners, len(subject), len(reference))
        if (pair := _call_pair(_at(subject, at), _at(reference, partner), mapped, taken)).values
    ]


def _at(calls: Sequence[_T], place: int | None) -> _T | None:
    return None if place is None else calls[place]


def _aligned(
    subject: Sequence[WrittenCall], reference: Sequence[WrittenCall], names: Sequence[str], others: Sequence[str]
) -> dict[int, int]:
    found = align(list(map(_sketch, subject, names)), list(map(_sketch, reference, others)))
    return {at: partner for at, partner in found if names[at] == others[partner]}


def _sketch(call: WrittenCall, name: str) -> Sketch:
    def shapes(role: str) -> tuple[tuple[int, ...], ...]:
        texts = (value.shape.strip("[]") for value in call.values if value.is_tensor and value.role == role)
        return tuple(tuple(int(size) for size in text.split(", ") if size.isdecimal()) for text in texts)

    dtypes = tuple(value.dtype for value in call.values if value.is_tensor)
    return Sketch("api", "", "", name, name, shapes("input"), shapes("output"), dtypes, ("", ""), (None, None))


def _mapped(subject: Sequence[WrittenCall], reference: Sequence[WrittenCall], rows: Mapping[str, str]) -> dict[str, WrittenValue]:
    """The reference's value for each of the subject's that a mapping names, where both are there."""
    if not rows:
        return {}
    ours = {value.name for call in subject for value in call.values}
    theirs = {value.name: value for call in reference for value in call.values}
    return {one: theirs[other] for one, other in rows.items() if one in ours and other in theirs}


def _call_pair(
    subject: WrittenCall | None, reference: WrittenCall | None, mapped: Mapping[str, WrittenValue], taken: frozenset[str]
) -> WrittenCallPair:
    others = {value.name[len(reference.name) :]: value for value in reference.values if value.name not in taken} if reference else {}
    pairs = []
    for value in subject.values if subject else ():
        assert subject is not None
        partner = mapped.get(value.name)
        pairs.append(WrittenPair(value, partner if partner is not None else others.pop(value.name[len(subject.name) :], None)))
    return WrittenCallPair(subject, reference, (*pairs, *(WrittenPair(None, value) for value in others.values())))
