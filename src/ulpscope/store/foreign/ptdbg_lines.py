# SPDX-License-Identifier: Apache-2.0
"""Read a dump file of ptdbg word for word: one JSON array a line, and the values of one call and phase together.

All three layouts are read: three statistics (4.0), four (with the norm), and none beside a checksum. The lines of one call and phase are
one call wherever they stand; a name that comes again begins the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ulpscope.errors import DamagedRunError, NotARunError
from ulpscope.model.written import WrittenCall, WrittenRole, WrittenValue
from ulpscope.store.foreign.reader import is_crowded

__all__ = ["JsonLine", "WrittenFile", "json_array", "json_lines", "named_lines", "read_written"]

_LONGEST_LINE = 1 << 24
_LONGEST_NAME = 1024
_LONGEST_TEXT = 200
_LONGEST_CHECKSUM = 64
_MOST_STATISTICS = 4
_NAME = re.compile(r"(?P<call>.+_(?:forward|backward))_(?:(?P<role>input|output)(?:\.\d{1,4}){0,8}|stack_info)")


class JsonLine(NamedTuple):
    """One line; `values` is None if it is no array, and empty if the line is blank."""

    number: int
    text: bytes
    values: list[Any] | None

    @property
    def is_cut(self) -> bool:
        """Tell whether the line was not written to its end; a killed writer leaves such a line."""
        return self.values is None and not self.text.endswith(b"\n") and len(self.text) < _LONGEST_LINE


def json_lines(file: Path) -> Iterator[JsonLine]:
    """Read the lines of a dump file."""
    with file.open("rb") as stream:
        count = 0
        while text := stream.readline(_LONGEST_LINE):
            count += 1
            yield JsonLine(count, text, json_array(text))


def json_array(text: bytes) -> list[Any] | None:
    """Parse one line; None if it is no array, an empty array if it is blank."""
    if is_crowded(text):
        return None
    try:
        values = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, list) else None


def named_lines(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yield the lines with their names, without a last line that a killed writer did not finish."""
    try:
        for line in json_lines(path):
            if line.is_cut and line.text.startswith(b"["):
                return
            if line.values is None:
                raise _damaged(path, f"line {line.number} is not a JSON array")
            if line.values:
                yield _name(path, line), line.values
    except OSError as error:
        raise NotARunError(f"'{path}' cannot be read ({error.strerror}); check the path") from None


def _name(path: Path, line: JsonLine) -> str:
    name = line.values[0] if line.values else None
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise _damaged(path, f"line {line.number} does not begin with a name")
    return name


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A dump file with its calls in the order of the file; `strangers` are lines that name no part of a call."""

    path: Path
    calls: tuple[WrittenCall, ...]
    strangers: int

    @property
    def has_stacks(self) -> bool:
        return any(call.stack for call in self.calls)

    @property
    def has_checksums_only(self) -> bool:
        values = [value for call in self.calls for value in call.values]
        return bool(values) and all(value.checksum and not value.statistics for value in values)


@dataclass(slots=True)
class _Gathered:
    """The lines of one call so far, its inputs before its outputs."""

    name: str
    values: dict[WrittenRole, list[WrittenValue]] = field(default_factory=lambda: {"input": [], "output": []})
    stack: str = ""
    seen: set[str] = field(default_factory=set)

    def call(self) -> WrittenCall:
        return WrittenCall(self.name, (*self.values["input"], *self.values["output"]), self.stack)


def read_written(path: Path) -> WrittenFile:
    """Read all calls of a dump file."""
    calls: list[_Gathered] = []
    latest: dict[str, _Gathered] = {}
    strangers = 0
    for name, values in named_lines(path):
        match = _NAME.fullmatch(name)
        if match is None or (match["role"] and len(values) < 6) or len(values) < 2:
            strangers += 1
            continue
        call = latest.get(match["call"])
        if call is None or name in call.seen:
            call = latest[match["call"]] = _Gathered(match["call"])
            calls.append(call)
        call.seen.add(name)
        if match["role"] is None:
            call.stack = str(values[1] if isinstance(values[1], list) else [values[1]])
        else:
            role: WrittenRole = "input" if match["role"] == "input" else "output"
            call.values[role].append(_written(name, role, values))
    if not calls:
        raise _damaged(path, "it holds no line of an API")
    return WrittenFile(path, tuple(call.call() for call in calls), strangers)


def _written(name: str, role: WrittenRole, values: list[Any]) -> WrittenValue:
    _, _, checksum, dtype, shape, statistics = values[:6]
    return WrittenValue(
        name=name,
        dtype=_shortened(dtype),
        shape=_shortened(shape),
        statistics=tuple(statistics[:_MOST_STATISTICS]) if isinstance(statistics, list) else (),
        checksum=checksum[:_LONGEST_CHECKSUM] if isinstance(checksum, str) else "",
        role=role,
    )


def _shortened(value: object) -> str:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else repr(value)[:_LONGEST_TEXT]


def _damaged(path: Path, what: str) -> DamagedRunError:
    return DamagedRunError(
        f"'{path}' is not a dump that can be compared: {what}; give the pkl file that the dump wrote, text with one JSON array a line"
    )
