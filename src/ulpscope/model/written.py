# SPDX-License-Identifier: Apache-2.0
"""Carry what a dump of an older tool states, word for word, and two such statements side by side.

A `CallRecord` says what a dump means: dtypes in our names, statistics as floats. A table of the older tools repeats the text of the dump:
its names, its dtypes as it writes them, its numbers with the digits they have. These nouns carry that text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ulpscope.model.nouns import dataclass

__all__ = [
    "NOT_THERE",
    "MeasuredPair",
    "OldNumbers",
    "WrittenCall",
    "WrittenCallPair",
    "WrittenPair",
    "WrittenRole",
    "WrittenValue",
]

WrittenRole: TypeAlias = Literal["input", "parameter", "output", "gradient"]

NOT_THERE = "N/A"


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """One tensor or plain argument. `statistics` are max, min, mean and norm; a plain argument is all four itself."""

    name: str
    dtype: str = NOT_THERE
    shape: str = NOT_THERE
    statistics: tuple[Any, ...] = (None, None, None, None)
    checksum: str | None = None
    role: WrittenRole = "input"
    requires_grad: bool | None = None
    file: str | None = None
    is_tensor: bool = False

    @property
    def is_plain(self) -> bool:
        """Tell whether it is a plain argument: a number, a word or a truth value."""
        return self.dtype.startswith("<class")


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call in one phase; `stack` is the text of its frames, empty where the dump has none."""

    name: str
    values: Sequence[WrittenValue]
    stack: str = ""


@dataclass(frozen=True, slots=True)
class WrittenPair:
    """Two values side by side; None where a side lacks it."""

    subject: WrittenValue | None
    reference: WrittenValue | None

    @property
    def value(self) -> WrittenValue:
        """Return the subject's value, or the reference's where the subject has none."""
        value = self.subject or self.reference
        assert value is not None, "a pair has at least one side"
        return value

    @property
    def is_matched(self) -> bool:
        return self.subject is not None and self.reference is not None


@dataclass(frozen=True, slots=True)
class WrittenCallPair:
    """A call with its partner, and their values."""

    subject: WrittenCall | None
    reference: WrittenCall | None
    values: tuple[WrittenPair, ...]

    @property
    def name(self) -> str:
        call = self.subject or self.reference
        assert call is not None, "a pair has at least one side"
        return call.name


@dataclass(frozen=True, slots=True, kw_only=True)
class OldNumbers:
    """The numbers of two tensors by the definitions of the older tools, rounded as they round them; None where undefined.

    `numel` is None where the shapes differ, and where `failure` says why no number could be measured. `disagreeing` counts the positions
    where NaN or infinities stand on one side only; any such position leaves all numbers undefined. `zeros` tells which sides are zero
    throughout. `cosine` is that of msprobe 26.x; in `old_cosine`, that of ptdbg and msprobe 1.x, nearly equal directions count as equal.
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    numel: int | None = None
    failure: str = ""
    disagreeing: int = 0
    zeros: tuple[bool, bool] = (False, False)
    no_cosine: str = ""
    old_cosine: float | None = None
    cosine: float | None = None
    euclidean: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    within_1e3: float | None = None
    within_5e3: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """Two values side by side with the differences of their statistics and, where there are files, of their tensors.

    `statistics` are max, min, mean and norm of subject and reference, None where missing; `differences` subject less reference, None where
    either is no number; `relative` the same as shares of the reference, infinite where that is zero and the subject is not.
    """

    pair: WrittenPair
    numbers: OldNumbers | None
    statistics: tuple[tuple[Any, Any], ...]
    differences: tuple[float | None, ...]
    relative: tuple[float | None, ...]

    @property
    def value(self) -> WrittenValue:
        return self.pair.value

    @property
    def is_matched(self) -> bool:
        return self.pair.is_matched
