# SPDX-License-Identifier: Apache-2.0
"""Keep the memory of a long comparison flat: rows of steps that no finding can speak about go to a temporary file.

Whole steps are condensed, never parts of one. Kept whole are the first calls, and every remarkable step with the step before it, up to the
first step that diverges; later steps are its consequences. Condensed calls still count, and stand in every table.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

import msgspec

from ulpscope.explain.contributions import left_behind, with_contributions
from ulpscope.explain.gaps import count_opaque, gaps_of, with_behind_told
from ulpscope.model import Gap, JudgedCall, PairReplay
from ulpscope.model.nouns import dataclass
from ulpscope.report.comparison.counts import call_state, lone_side
from ulpscope.report.comparison.rows import COLUMNS, call_rows

__all__ = ["Condensed", "kept_calls"]

KEPT_CALLS = 30_000
_REMARKABLE = frozenset(("fork", "choice", "amplified", "random", "unwritten", "arguments"))
_INDICES = tuple(place for place, column in enumerate(COLUMNS) if column.kind == "index")


class Condensed:
    """Condensed steps, as `model.CondensedSteps`: their numbers, and their rows in a file that lives as long as this object."""

    def __init__(self) -> None:
        self.levels: Counter[str] = Counter()
        self.lone: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.modules: Counter[tuple[str, str, str]] = Counter()
        self.num_slots = 0
        self.num_rows = 0
        self.is_in_doubt = False
        self.gaps: list[Gap] = []
        self.num_opaque = 0
        self._differing: Counter[tuple[str, str]] = Counter()
        self._examples: dict[tuple[str, str], JudgedCall] = {}
        self._places: dict[int, tuple[int, int]] = {}
        from tempfile import TemporaryFile  # imported late: most comparisons need no file

        self._file = TemporaryFile(prefix="ulpscope-")  # noqa: SIM115 (it is read until the comparison is forgotten)
        weakref.finalize(self, self._file.close)

    @property
    def num_calls(self) -> int:
        return self.levels.total() + self.lone.total()

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._places))

    def add(self, step: int, calls: Sequence[JudgedCall]) -> None:
        rows = [row for call in self._settled(calls) for row in self._counted(call)]
        body = msgspec.msgpack.encode(rows)
        self._places[step] = (self._file.seek(0, 2), len(body))
        self._file.write(body)
        self.num_rows += len(rows)

    def _settled(self, calls: Sequence[JudgedCall]) -> Iterator[JudgedCall]:
        """Yield the calls of all ranks with their contributions, one rank after another; note the gaps that they leave."""
        for rank in sorted({call.pair.record.rank for call in calls}):
            own = with_contributions([call for call in calls if call.pair.record.rank == rank])
            self.gaps += gaps_of(own)
            self.num_opaque += count_opaque(own)
            for call in own:
                yield with_behind_told(left_behind(call))  # a differing call comes after the step settled as the first that diverges

    def _counted(self, call: JudgedCall) -> Iterator[tuple[Any, ...]]:
        side, record = lone_side(call), call.pair.record
        if side is None:
            self.levels[call.level] += 1
        else:
            self.lone[side] += 1
        state = call_state(call)
        self.states[state] += 1
        self.modules[(record.module, record.phase, state)] += 1
        self.num_slots += len(call.slots)
        self.is_in_doubt = self.is_in_doubt or any(slot.differs_by_unknown for slot in call.slots)
        if _is_divergence(call):
            kind = (call.contribution, call.pair.record.call.short)
            self._differing[kind] += 1
            self._examples.setdefault(kind, call)
        return call_rows(call)

    @property
    def later(self) -> list[JudgedCall]:
        """Return every call that differs, each as an example of its kind."""
        return [self._examples[kind] for kind, many in self._differing.items() for _ in range(many)]

    def rows(self, step: int) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of one step, as `report.rows` makes them."""
        offset, length = self._places[step]
        self._file.seek(offset)
        for cells in msgspec.msgpack.decode(self._file.read(length)):
            for place in _INDICES:
                cells[place] = None if cells[place] is None else tuple(cells[place])
            yield tuple(cells)


@dataclass(slots=True)
class _Step:
    """The calls of all ranks in one step."""

    number: int
    calls: list[JudgedCall] = field(default_factory=list)
    replays: list[PairReplay | None] = field(default_factory=list)
    is_plain: bool = True

    def add(self, call: JudgedCall, replay: PairReplay | None) -> None:
        self.calls.append(call)
        self.replays.append(replay)
        self.is_plain = self.is_plain and _is_plain(call)


def kept_calls(
    judged: Iterable[tuple[JudgedCall, PairReplay | None]], kept: int = KEPT_CALLS
) -> tuple[list[JudgedCall], list[PairReplay | None], Condensed | None]:
    """Choose the calls to keep whole with their replays, given step by step, and condense the others."""
    condensed: Condensed | None = None
    steps: list[_Step] = []
    settled_at: int | None = None
    num_kept = 0
    for call, replay in judged:
        number = call.pair.record.step
        if not steps or steps[-1].number != number:
            if settled_at is None and steps and any(_is_divergence(one) for one in steps[-1].calls):
                settled_at = steps[-1].number
            if num_kept > kept and _is_done_with(steps, settled_at):
                condensed = condensed or Condensed()
                before = steps.pop(-2)
                condensed.add(before.number, before.calls)
                num_kept -= len(before.calls)
            steps.append(_Step(number))
        steps[-1].add(call, replay)
        num_kept += 1
    calls = [call for step in steps for call in step.calls]
    replays = [replay for step in steps for replay in step.replays]
    return calls, replays, condensed


def _is_done_with(steps: Sequence[_Step], settled_at: int | None) -> bool:
    """Tell whether the last step but one is no longer needed."""
    if len(steps) < 2:
        return False
    before, last = steps[-2:]
    is_consequence = settled_at is not None and before.number > settled_at
    return is_consequence or (before.is_plain and last.is_plain)


def _is_plain(call: JudgedCall) -> bool:
    """Tell whether no explanation and no remark could speak of the call."""
    if call.differences or call.pair.subject is None or call.pair.reference is None:
        return False
    return all(slot.verdict.level in ("same", "rounding") and slot.verdict.rule not in _REMARKABLE for slot in call.slots)


def _is_divergence(call: JudgedCall) -> bool:
    return call.pair.record.phase not in ("start", "end") and call.level == "differs"
