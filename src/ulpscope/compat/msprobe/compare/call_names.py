# SPDX-License-Identifier: Apache-2.0
"""Name each call of msprobe for matching: calls with equal names on both sides are partners.

Leftover backward calls are partners in the order in which they ran. A side that recomputes activations needs this: its calls have higher
numbers. Fuzzy matching drops the numbers of calls and aligns them by the order of execution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ulpscope.match.written import CallNames, pair_written
from ulpscope.model.written import WrittenCallPair
from ulpscope.store.foreign.msprobe_words import WrittenDump

__all__ = ["Translation", "pair_calls"]

_API = re.compile(r"(?P<op>.+)\.\d{1,9}\.(?P<phase>forward|backward)")
_MODULE = re.compile(r"(?P<op>.+\.(?P<phase>forward|backward|parameters_grad))(?:\.\d{1,9})?")
_CELL = re.compile(r"(?:Module|Cell)\.(?P<place>.+)\.(?P<rest>(?:forward|backward|parameters_grad)(?:\.\d{1,9})?)")
_FRAMEWORKS = {"Cell": "Module", "Mint": "Torch", "MintFunctional": "Functional", "Primitive": "Torch"}
_SAME_WITH_MAPPING = ("Torch.", "Functional.", "Tensor.")


@dataclass(frozen=True, slots=True)
class Translation:
    """The names of the target as they read on the golden side. `rows` and `cells` come from mapping files.

    `frameworks` is for a MindSpore target and a PyTorch golden: prefixes of the one read as those of the other. With `apis` the prefix of a
    call does not matter at all: an operation may be a function here and a method there.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)
    frameworks: bool = False
    apis: bool = False

    def call(self, name: str) -> str:
        """Return the name of a target's call on the golden side."""
        prefix, dot, rest = name.partition(".")
        if self.frameworks:
            name = f"{_FRAMEWORKS.get(prefix, prefix)}{dot}{rest}"
        match = _CELL.fullmatch(name) if self.cells else None
        return f"{name.partition('.')[0]}.{self._cell(match['place'])}.{match['rest']}" if match else self.golden(name)

    def golden(self, name: str) -> str:
        """Return the name to match a call of the golden side by."""
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


def pair_calls(target: WrittenDump, golden: WrittenDump, translation: Translation, *, fuzzy: bool = False) -> list[WrittenCallPair]:
    """Pair all calls of both dumps in the order of the target; a call that only the golden side has stands where it ran."""
    names = [translation.call(call.name) for call in target.calls], [translation.golden(call.name) for call in golden.calls]
    ours, theirs = map(_names, names)
    return pair_written(target.calls, golden.calls, (ours, theirs), aligned=fuzzy, rows=translation.rows)


def _names(full: list[str]) -> CallNames:
    uncounted = [_without_count(name) for name in full]
    return CallNames(full, [name if name.endswith("backward") else None for name in uncounted], uncounted)


def _without_count(name: str) -> str:
    """Drop the number of the call from a name: `Functional.linear.3.backward` becomes `Functional.linear.backward`."""
    if match := _API.fullmatch(name):
        return f"{match['op']}.{match['phase']}"
    match = _MODULE.fullmatch(name)
    return match["op"] if match else name
