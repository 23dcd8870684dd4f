# SPDX-License-Identifier: Apache-2.0
"""The lines of a dump file as the old comparison sees them: tensors under the names that were written, one operator for a call and phase.

All three layouts are read: three statistics (4.0), four (with the norm), and none beside a checksum. The lines of one call and phase
are one operator wherever they stand; a name that comes again begins the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.store.foreign.ptdbg import json_array

__all__ = ["DumpFile", "Operator", "TensorLine", "read_arrays", "read_dump"]

_LONGEST_LINE = 1 << 24
_LONGEST_NAME = 1024
_NAME = re.compile(r"(?P<operator>.+_(?:forward|backward))_(?:(?P<role>input|output)(?:\.\d{1,4}){0,8}|stack_info)")


@dataclass(frozen=True, slots=True)
class TensorLine:
    """A tensor or a number, its type and shape as texts."""

    name: str
    dtype: str
    shape: str
    statistics: tuple[Any, ...]
    checksum: str


@dataclass(slots=True)
class Operator:
    """One call in one phase, for example `Functional_conv2d_0_forward`."""

    name: str
    inputs: list[TensorLine] = field(default_factory=list)
    outputs: list[TensorLine] = field(default_factory=list)
    stack: list[Any] | None = None

    @property
    def tensors(self) -> list[TensorLine]:
        return [*self.inputs, *self.outputs]


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A dump file with its operators in the order of the file; `strangers` are lines that name no part of a call."""

    path: Path
    operators: list[Operator]
    strangers: int

    @property
    def has_stacks(self) -> bool:
        return any(operator.stack is not None for operator in self.operators)

    @property
    def has_checksums_only(self) -> bool:
        lines = [line for operator in self.operators for line in operator.tensors]
        return bool(lines) and all(line.checksum and not line.statistics for line in lines)


def read_arrays(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """The lines with their names. A last line without its end is what a killed writer leaves, and is left out."""
    try:
        with path.open("rb") as stream:
            count = 0
            while text := stream.readline(_LONGEST_LINE):
                count += 1
                values = json_array(text)
                if values is None and text.startswith(b"[") and not text.endswith(b"\n") and not stream.peek(1):
                    return
                if values is None:
                    raise _damaged(path, f"line {count} is not a JSON array")
                if values:
                    yield _name(path, count, values), values
    except OSError as error:
        raise CompareException(CompareException.INVALID_PATH_ERROR, f"'{path}' cannot be read ({error.strerror}); check the path") from None


def _name(path: Path, count: int, values: list[Any]) -> str:
    name = values[0]
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise _damaged(path, f"line {count} does not begin with a name")
    return name


def read_dump(path: Path) -> DumpFile:
    """All operators of a dump file."""
    operators: list[Operator] = []
    latest: dict[str, tuple[Operator, set[str]]] = {}
    strangers = 0
    for name, values in read_arrays(path):
        match = _NAME.fullmatch(name)
        if match is None or (match["role"] and len(values) < 6) or len(values) < 2:
            strangers += 1
            continue
        operator, seen = latest.get(match["operator"], (None, set()))
        if operator is None or name in seen:
            operator, seen = latest[match["operator"]] = Operator(match["operator"]), set()
            operators.append(operator)
        seen.add(name)
        _add(operator, match["role"], name, values)
    if not operators:
        raise _damaged(path, "it holds no line of an API")
    return DumpFile(path, operators, strangers)


def _add(operator: Operator, role: str | None, name: str, values: list[Any]) -> None:
    if role is None:
        operator.stack = values[1] if isinstance(values[1], list) else [values[1]]
        return
    _, _, checksum, dtype, shape, statistics = values[:6]
    line = TensorLine(
        name=name,
        dtype=_shortened(dtype),
        shape=_shortened(shape),
        statistics=tuple(statistics[:4]) if isinstance(statistics, list) else (),
        checksum=checksum[:64] if isinstance(checksum, str) else "",
    )
    (operator.inputs if role == "input" else operator.outputs).append(line)


def _shortened(value: object) -> str:
    return value[:200] if isinstance(value, str) else repr(value)[:200]


def _damaged(path: Path, what: str) -> CompareException:
    return CompareException(
        CompareException.INVALID_DUMP_FILE,
        f"'{path}' is not a dump that can be compared: {what}; give the pkl file that the dump wrote, text with one JSON array a line",
    )
