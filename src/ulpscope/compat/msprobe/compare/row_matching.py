# SPDX-License-Identifier: Apache-2.0
"""Which row of the target dump is compared with which row of the golden one. What has no partner stays, on both sides.

Calls are partners when their names are equal. Backward calls that are left over are partners in the order in which they ran, which is what
a side that computes activations again needs: its calls have higher numbers. Fuzzy matching leaves the numbers of calls out and aligns what
ran in order. Within a call rows are partners by their place; a data mapping names rows that are partners whatever they are called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ulpscope.compat.msprobe.compare.dump_rows import DumpTable, Entry, Row
from ulpscope.match.alignment import align
from ulpscope.match.likeness import Sketch

__all__ = ["CallPair", "RowPair", "Translation", "match_tables"]

_API = re.compile(r"(?P<op>.+)\.\d{1,9}\.(?P<phase>forward|backward)")
_MODULE = re.compile(r"(?P<op>.+\.(?P<phase>forward|backward|parameters_grad))(?:\.\d{1,9})?")
_CELL = re.compile(r"(?:Module|Cell)\.(?P<place>.+)\.(?P<rest>(?:forward|backward|parameters_grad)(?:\.\d{1,9})?)")
_FRAMEWORKS = {"Cell": "Module", "Mint": "Torch", "MintFunctional": "Functional", "Primitive": "Torch"}
_SAME_WITH_MAPPING = ("Torch.", "Functional.", "Tensor.")


@dataclass(frozen=True, slots=True)
class RowPair:
    """A row with its partner; None where a side lacks it."""

    target: Row | None
    golden: Row | None

    @property
    def row(self) -> Row:
        """The target's row, or the golden one where the target has none."""
        row = self.target or self.golden
        assert row is not None, "a pair has at least one side"
        return row


@dataclass(frozen=True, slots=True)
class CallPair:
    """A call with its partner, and their rows."""

    target: Entry | None
    golden: Entry | None
    rows: tuple[RowPair, ...]

    @property
    def name(self) -> str:
        entry = self.target or self.golden
        assert entry is not None
        return entry.name


@dataclass(frozen=True, slots=True)
class Translation:
    """How names of the target read on the golden side. `rows` and `cells` come from mapping files.

    `frameworks` is for a MindSpore target and a PyTorch golden: prefixes of the one read as those of the other. With `apis` the prefix of a
    call does not matter at all: an operation may be a function here and a method there.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)
    frameworks: bool = False
    apis: bool = False

    def call(self, name: str) -> str:
        """The name of a target's call on the golden side."""
        prefix, dot, rest = name.partition(".")
        if self.frameworks:
            name = f"{_FRAMEWORKS.get(prefix, prefix)}{dot}{rest}"
        match = _CELL.fullmatch(name) if self.cells else None
        return f"{name.partition('.')[0]}.{self._cell(match['place'])}.{match['rest']}" if match else self.golden(name)

    def golden(self, name: str) -> str:
        """What a call of the golden side is looked for by."""
        if self.apis and name.startswith(_SAME_WITH_MAPPING):
            return f"api.{name.partition('.')[2]}"
        return f"{name}.0" if name.endswith(".parameters_grad") else name  # 1.x does not count these

    def _cell(self, place: str) -> str:
        if place in self.cells:
            return self.cells[place]
        for old, new in self.cells.items():
            if old in place:
                return place.replace(old, new, 1)
        return place


def match_tables(target: DumpTable, golden: DumpTable, translation: Translation, *, fuzzy: bool = False) -> list[CallPair]:
    """All calls of both dumps in the order of the target; what only the golden side has stands where it ran."""
    names = [translation.call(entry.name) for entry in target.entries], [translation.golden(entry.name) for entry in golden.entries]
    partners = _aligned(target.entries, golden.entries, *names) if fuzzy else _by_name(*names)
    mapped = _mapped_rows(target, golden, translation)
    taken = frozenset(row.name for row in mapped.values())
    return [
        pair
        for at, partner in _in_order(partners, len(target.entries), len(golden.entries))
        if (pair := _call_pair(_at(target.entries, at), _at(golden.entries, partner), mapped, taken)).rows
    ]


def _at(entries: Sequence[Entry], place: int | None) -> Entry | None:
    return None if place is None else entries[place]


def _by_name(target: Sequence[str], golden: Sequence[str]) -> dict[int, int]:
    places: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(golden):
        places[name].append(at)
    partners: dict[int, int] = {}
    for at, name in enumerate(target):
        if places.get(name):
            partners[at] = places[name].pop(0)
    rest = _backward_left(target, partners.keys().__contains__)
    others = _backward_left(golden, set(partners.values()).__contains__)
    for op, left in rest.items():
        partners.update(zip(left, others.get(op, ()), strict=False))
    return partners


def _backward_left(names: Sequence[str], is_taken: Callable[[int], bool]) -> dict[str, list[int]]:
    """The backward calls of each operation that have no partner yet, in the order in which they ran."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(names):
        if not is_taken(at) and (key := _without_count(name)).endswith("backward"):
            found[key].append(at)
    return found


def _without_count(name: str) -> str:
    """A name without the number of the call: `Functional.linear.3.backward` is `Functional.linear.backward`."""
    if match := _API.fullmatch(name):
        return f"{match['op']}.{match['phase']}"
    match = _MODULE.fullmatch(name)
    return match["op"] if match else name


def _aligned(target: Sequence[Entry], golden: Sequence[Entry], names: Sequence[str], others: Sequence[str]) -> dict[int, int]:
    left, right = [_without_count(name) for name in names], [_without_count(name) for name in others]
    found = align(
        [_sketch(entry, key) for entry, key in zip(target, left, strict=True)],
        [_sketch(entry, key) for entry, key in zip(golden, right, strict=True)],
    )
    return {at: partner for at, partner in found if left[at] == right[partner]}


def _sketch(entry: Entry, key: str) -> Sketch:
    def shapes(role: str) -> tuple[tuple[int, ...], ...]:
        texts = (row.shape.strip("[]") for row in entry.rows if row.is_tensor and row.role == role)
        return tuple(tuple(int(size) for size in text.split(", ") if size.isdecimal()) for text in texts)

    dtypes = tuple(row.dtype for row in entry.rows if row.is_tensor)
    return Sketch("api", "", "", key, key, shapes("input"), shapes("output"), dtypes, ("", ""), (None, None))


def _in_order(partners: Mapping[int, int], num_target: int, num_golden: int) -> Iterator[tuple[int | None, int | None]]:
    """Places side by side; a lone place of the golden side comes before the first partner that ran later."""
    taken = set(partners.values())
    told = 0
    for at in range(num_target):
        partner = partners.get(at)
        if partner is not None and partner >= told:
            yield from ((None, lone) for lone in range(told, partner) if lone not in taken)
            told = partner + 1
        yield at, partner
    yield from ((None, lone) for lone in range(told, num_golden) if lone not in taken)


def _mapped_rows(target: DumpTable, golden: DumpTable, translation: Translation) -> dict[str, Row]:
    """The golden row of each target row that a data mapping names, where both are there."""
    if not translation.rows:
        return {}
    ours = {row.name for entry in target.entries for row in entry.rows}
    theirs = {row.name: row for entry in golden.entries for row in entry.rows}
    return {one: theirs[other] for one, other in translation.rows.items() if one in ours and other in theirs}


def _call_pair(target: Entry | None, golden: Entry | None, mapped: Mapping[str, Row], taken: frozenset[str]) -> CallPair:
    others = {row.name[len(golden.name) :]: row for row in golden.rows if row.name not in taken} if golden else {}
    rows = []
    for row in target.rows if target else ():
        assert target is not None
        partner = mapped.get(row.name)
        rows.append(RowPair(row, partner if partner is not None else others.pop(row.name[len(target.name) :], None)))
    return CallPair(target, golden, (*rows, *(RowPair(None, row) for row in others.values())))
