# SPDX-License-Identifier: Apache-2.0
"""Select what is recorded: steps, ranks and patterns.

One pattern is one of

    layers.1.*/functional.gelu*     a glob over `module/call`; without a slash over the call alone (`gelu`, `functional.gelu*`)
    re:layers\\.\\d+/.*linear         a regular expression over `module/call`, matched whole
    module:layers.1                 a module and everything below it
    range:GLOB..GLOB                from the first call that the first glob matches to the first that the second matches, both included
    phase:backward   slot:output*   only this phase; only these slots (`slot:none` for no slot at all)
    !PATTERN                        not this

Patterns of names, modules and ranges add up; phases and slots narrow that selection. `@file` reads patterns from a file, one a line, `#`
begins a comment. In code a pattern may also be a function of the module and the call.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ulpscope._files import read_small
from ulpscope.errors import InputError
from ulpscope.model import CallName, Phase, Slot

__all__ = ["Selection"]

_MOST_BYTES = 16 << 20
_PHASES = ("start", "forward", "backward", "optimizer", "end")

Matcher: TypeAlias = Callable[[str, CallName], bool]


@dataclass(slots=True)
class _Range:
    """Opens at one glob and closes after another; begins anew with each step."""

    first: Callable[[str, CallName], bool]
    last: Callable[[str, CallName], bool]
    is_open: bool = False
    is_done: bool = False

    def __call__(self, module: str, call: CallName) -> bool:
        if self.is_done:
            return False
        if not self.is_open and not self.first(module, call):
            return False
        self.is_open = True
        self.is_done = self.last(module, call)
        return True


@dataclass(slots=True)
class Selection:
    """The steps, ranks, calls, phases and slots that are recorded.

    >>> Selection.parse(select="module:layers.1").wants_call("layers.1.mlp", CallName("functional.gelu", 0))
    True
    """

    steps: frozenset[int] | None = None
    ranks: frozenset[int] | None = None
    names: list[Callable[[str, CallName], bool]] = field(default_factory=list)
    without: list[Callable[[str, CallName], bool]] = field(default_factory=list)
    phases: frozenset[Phase] | None = None
    slots: list[re.Pattern[str]] = field(default_factory=list)
    _idle: dict[int, str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        *,
        steps: Iterable[int] | int | None = None,
        ranks: Iterable[int] | int | None = None,
        select: str | Sequence[str | Matcher] | None = None,
    ) -> Selection:
        given = [select] if isinstance(select, str) else list(select or ())
        selection = cls(steps=_numbers(steps, "steps"), ranks=_numbers(ranks, "ranks"))
        selection.names += [pattern for pattern in given if callable(pattern)]
        for pattern in _patterns([pattern for pattern in given if isinstance(pattern, str)]):
            selection._add(pattern)
        return selection

    def begin_step(self) -> None:
        for matcher in (*self.names, *self.without):
            if isinstance(matcher, _Range):
                matcher.is_open = matcher.is_done = False

    def wants_step(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def wants_rank(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def wants_phase(self, phase: Phase) -> bool:
        return self.phases is None or phase in self.phases

    def wants_call(self, module: str, call: CallName) -> bool:
        """Tell whether a call is recorded; ask once for each call in execution order, since ranges count."""
        if not self.names and not self.without:
            return True
        wanted = [matcher(module, call) for matcher in self.names]
        if self._idle:
            self._note_used(self.names, wanted)
        unwanted = [matcher(module, call) for matcher in self.without]
        return (not wanted or any(wanted)) and not any(unwanted)

    def wants_slot(self, slot: Slot) -> bool:
        if not self.slots:
            return True
        wanted = [pattern.fullmatch(str(slot)) is not None for pattern in self.slots]
        if self._idle:
            self._note_used(self.slots, wanted)
        return any(wanted)

    @property
    def idle_patterns(self) -> tuple[str, ...]:
        """Return the patterns that asked for something and have matched nothing yet."""
        return tuple(self._idle.values())

    def _note_used(self, matchers: Sequence[object], wanted: Sequence[bool]) -> None:
        for matcher, is_match in zip(matchers, wanted, strict=True):
            if is_match:
                self._idle.pop(id(matcher), None)

    def _add(self, pattern: str) -> None:
        names = self.names
        body = pattern
        if body.startswith("!"):
            names, body = self.without, body[1:]
        kind, _, rest = body.partition(":")
        if kind == "phase":
            if rest not in _PHASES:
                raise InputError(f"select pattern {pattern!r} names the phase {rest!r}; phases are {', '.join(_PHASES)}")
            chosen = frozenset(phase for phase in _PHASES if (phase == rest) != (names is self.without))
            self.phases = chosen if self.phases is None else _merged(self.phases, chosen, names is self.without)  # type: ignore[assignment]
        elif kind == "slot" and names is self.names:
            self.slots.append(re.compile(fnmatch.translate(rest)))
            if rest != "none":
                self._idle[id(self.slots[-1])] = pattern
        else:
            names.append(_matcher(kind, rest, body))
            if names is self.names:
                self._idle[id(names[-1])] = pattern


def _merged(old: frozenset[Phase], new: frozenset[str], narrowing: bool) -> frozenset[str]:
    return old & new if narrowing else old | new


def _matcher(kind: str, rest: str, body: str) -> Callable[[str, CallName], bool]:
    if kind == "re":
        try:
            expression = re.compile(rest)
        except re.error as error:
            raise InputError(f"select pattern {body!r} is not a regular expression: {error}") from None
        return lambda module, call: expression.fullmatch(f"{module}/{call}") is not None
    if kind == "module":
        return lambda module, call: module == rest or module.startswith(rest + ".")
    if kind == "range":
        first, separator, last = rest.partition("..")
        if not separator or not first or not last:
            raise InputError(f"select pattern {body!r} is not a range: write range:FIRST..LAST with two globs")
        return _Range(_glob(first), _glob(last))
    return _glob(body)


def _glob(pattern: str) -> Callable[[str, CallName], bool]:
    expression = re.compile(fnmatch.translate(pattern))
    if "/" in pattern:
        return lambda module, call: expression.match(f"{module}/{call}") is not None
    return lambda module, call: any(expression.match(name) for name in (str(call), call.op, call.short, f"{call.short}.{call.index}"))


def _patterns(given: Sequence[str]) -> list[str]:
    patterns: list[str] = []
    for pattern in given:
        if not pattern.startswith("@"):
            patterns.append(pattern)
            continue
        try:
            lines = read_small(pattern[1:], _MOST_BYTES, "list of calls").decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the selection file {pattern[1:]!r} cannot be read ({error}); give the path of a text file after @") from None
        patterns += [line.partition("#")[0].strip() for line in lines]
    return [pattern for pattern in patterns if pattern]


def _numbers(given: Iterable[int] | int | None, what: str) -> frozenset[int] | None:
    if given is None:
        return None
    numbers = frozenset([given] if isinstance(given, int) else given)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise InputError(f"{what} are whole numbers from 0 up, not {sorted(map(repr, numbers))}")
    return numbers
