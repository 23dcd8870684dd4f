# SPDX-License-Identifier: Apache-2.0
"""Parse and format the names of calls and slots: no other file takes a dotted name apart."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias, get_args

from ulpscope.model.nouns import dataclass

__all__ = ["INPUT_ROLES", "OUTPUT_ROLES", "ROLES", "CallName", "Role", "Slot"]

Role: TypeAlias = Literal["input", "output", "mutated", "parameter", "buffer", "gradient", "state"]
ROLES: tuple[Role, ...] = get_args(Role)
INPUT_ROLES: frozenset[Role] = frozenset({"input", "parameter", "buffer", "gradient"})
OUTPUT_ROLES: frozenset[Role] = frozenset({"output", "mutated", "state"})

_FREE_SIGNS = {"eigh": (1,), "qr": (0, 1), "svd": (0, 2)}


@dataclass(frozen=True, slots=True, order=True)
class CallName:
    """One call within a step: the operation, and how many times it was called before.

    >>> CallName.parse("functional.gelu.1")
    CallName(op='functional.gelu', index=1)
    """

    op: str
    index: int

    def __post_init__(self) -> None:
        if not self.op or self.index < 0:
            raise ValueError(f"a call is named by an operation and a count from 0 up, not ({self.op!r}, {self.index})")

    def __str__(self) -> str:
        return f"{self.op}.{self.index}"

    @property
    def short(self) -> str:
        """Return the operation without its namespace: `gelu` of `functional.gelu`, `mm` of `aten.mm.default`."""
        parts = [part for part in self.op.split(".") if part]
        if parts and parts[0] == "aten" and len(parts) > 1:
            return parts[1]
        return parts[-1] if parts else self.op

    @property
    def free_signs(self) -> tuple[int, ...]:
        """Return the positions of the results that are unique only up to the signs of their rows or columns: factors of matrices."""
        return _FREE_SIGNS.get(self.short.removeprefix("linalg_"), ())

    @classmethod
    def parse(cls, text: str) -> CallName:
        op, _, index = text.rpartition(".")
        if not op or not (index.isascii() and index.isdigit()):
            raise ValueError(f"{text!r} is not the name of a call; expected an operation and a count, as in 'functional.gelu.1'")
        return cls(op, int(index))


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """An argument or a result of a call, by its path through nested containers.

    >>> Slot.parse("input.3.mask")
    Slot(role='input', path=(3, 'mask'))
    """

    role: Role
    path: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        return ".".join([self.role, *map(_format_part, self.path)])

    @classmethod
    def parse(cls, text: str) -> Slot:
        return _parse_slot(text)

    @property
    def is_input(self) -> bool:
        return self.role in INPUT_ROLES

    @property
    def is_output(self) -> bool:
        return self.role in OUTPUT_ROLES


@functools.lru_cache(maxsize=65_536)
def _parse_slot(text: str) -> Slot:
    role, *parts = text.split(".")
    if role not in ROLES:
        raise ValueError(f"{text!r} is not a slot: it begins with none of {', '.join(ROLES)}")
    return Slot(role, tuple(_parse_part(part) for part in parts))


def _format_part(part: int | str) -> str:
    if isinstance(part, int):
        return str(part)
    text = part.replace("%", "%25").replace(".", "%2E")
    return f"'{text}" if not text or text[0] == "'" or text.isdigit() else text


def _parse_part(text: str) -> int | str:
    if text.isascii() and text.isdigit():
        return int(text)
    return text.removeprefix("'").replace("%2E", ".").replace("%25", "%")
