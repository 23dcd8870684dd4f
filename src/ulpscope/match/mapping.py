# SPDX-License-Identifier: Apache-2.0
"""User rules for renamed modules and calls: one a line, `subject-glob -> reference-glob`, over `module/call` names.

Each `*` on the left captures any text; the first `*` on the right stands for the first capture, and so on:

    # the reference calls its blocks h
    layers.* -> h.*
    */npu.npu_gelu.* -> */functional.gelu.*

Parameter names go through the same rules. The first rule that fits wins.
"""

from __future__ import annotations

from pathlib import Path

from ulpscope._files import read_small
from ulpscope.errors import InputError
from ulpscope.model.nouns import dataclass

__all__ = ["Mapping", "Rule", "read_mapping"]

_MOST_BYTES = 16 << 20
_EXAMPLE = "write one rule a line, as in 'layers.* -> h.*'"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a mapping, each glob split at its stars."""

    subject: tuple[str, ...]
    reference: tuple[str, ...]

    def rename(self, name: str) -> str | None:
        captures = _captures(self.subject, name)
        if captures is None:
            return None
        text = self.reference[0]
        for capture, literal in zip(captures, self.reference[1:], strict=False):
            text += capture + literal
        return text


@dataclass(frozen=True, slots=True)
class Mapping:
    """How names of the subject read in the reference."""

    rules: tuple[Rule, ...] = ()

    def rename(self, name: str) -> str | None:
        """The reference's name for a name of the subject; None where no rule fits."""
        return next((text for rule in self.rules if (text := rule.rename(name)) is not None), None)

    @classmethod
    def parse(cls, text: str, origin: str = "the mapping") -> Mapping:
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return cls(tuple(_parse_rule(line, f"{origin}, line {number}") for number, line in enumerate(lines, 1) if line))


def read_mapping(path: str | Path) -> Mapping:
    """Read a mapping file."""
    try:
        text = read_small(path, _MOST_BYTES, "mapping").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the mapping {path}: {error}; {_EXAMPLE}") from error
    return Mapping.parse(text, str(path))


def _parse_rule(line: str, where: str) -> Rule:
    sides = [side.strip() for side in line.split("->")]
    if len(sides) != 2 or not all(sides):
        raise InputError(f"{where}: {line[:80]!r} is not a rule; {_EXAMPLE}")
    subject, reference = (tuple(side.split("*")) for side in sides)
    if len(reference) > len(subject):
        raise InputError(f"{where}: {line[:80]!r} has more stars on the right than on the left, so nothing fills them; {_EXAMPLE}")
    return Rule(subject, reference)


def _captures(literals: tuple[str, ...], name: str) -> list[str] | None:
    """What the stars between `literals` stand for in `name`: each as short as possible, in one pass."""
    first, last = literals[0], literals[-1]
    if len(literals) == 1:
        return [] if name == first else None
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return None
    captures, at, end = [], len(first), len(name) - len(last)
    for literal in literals[1:-1]:
        found = name.find(literal, at, end)
        if found < 0:
            return None
        captures.append(name[at:found])
        at = found + len(literal)
    return [*captures, name[at:end]]
