# SPDX-License-Identifier: Apache-2.0
"""A dump.json as the rows of the old result: one for each tensor and each plain argument, with the numbers exactly as the dump has them.

`Functional.gelu.0.forward` has the rows `...input.0`, `...input.approximate`, `...output.0`; a module has `...parameters.weight` before its
outputs. The same is read from debug.json, whose entries are values themselves. Nothing in a dump is trusted: what makes no sense is a row
without numbers, and the names of files are only looked up in the folder of the dump.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ulpscope.errors import DamagedRunError
from ulpscope.store.foreign.msprobe import load_json
from ulpscope.store.foreign.reader import tensor_shape

__all__ = ["NOT_THERE", "DumpTable", "Entry", "Role", "Row", "Statistics", "read_table"]

Role: TypeAlias = Literal["input", "parameter", "output", "gradient"]
Statistics: TypeAlias = tuple[Any, Any, Any, Any]

NOT_THERE = "N/A"
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_PARTS: tuple[tuple[str, Role, str], ...] = (
    ("input_args", "input", "input"),
    ("input", "input", "input"),
    ("input_kwargs", "input", "input"),
    ("parameters", "parameter", "parameters"),
    ("output", "output", "output"),
)
_MAX_DEPTH = 64
_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor or plain argument. `statistics` are max, min, mean and norm; a plain argument is all four itself."""

    name: str
    role: Role
    dtype: str = NOT_THERE
    shape: str = NOT_THERE
    requires_grad: bool | None = None
    statistics: Statistics = (None, None, None, None)
    checksum: str | None = None
    file: str | None = None
    is_tensor: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is a number, a word or a truth."""
        return self.dtype.startswith("<class")


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of a dump with its rows; `stack` is the text of its frames, or empty."""

    name: str
    rows: tuple[Row, ...]
    stack: str = ""


@dataclass(frozen=True, slots=True)
class DumpTable:
    """One dump.json. `mode` is what it allows to compare by."""

    path: Path
    task: str
    framework: str
    entries: tuple[Entry, ...]
    has_stacks: bool

    @property
    def tensors(self) -> Path:
        return self.path.parent / "dump_tensor_data"

    @property
    def mode(self) -> Literal["tensor", "md5", "statistics"]:
        tensors = [row for entry in self.entries for row in entry.rows if row.is_tensor]
        if self.task == "tensor" or any(row.file for row in tensors):
            return "tensor"
        return "md5" if tensors and all(row.checksum is not None for row in tensors if row.statistics[0] is not None) else "statistics"


def read_table(path: Path, stacks: Path | None = None) -> DumpTable:
    """Read a dump.json or debug.json, and the stacks beside it or in the file that is named."""
    content = load_json(path)
    data = content.get("data")
    if not isinstance(data, dict):
        raise DamagedRunError(f"'{path}' has no object named 'data', so it is no dump of msprobe; give a dump.json")
    texts = _stacks(stacks or path.with_name("stack.json"))
    entries = (Entry(name, tuple(_rows(name, body, path)), texts.get(name, "")) for name, body in data.items())
    return DumpTable(
        path=path,
        task=str(content.get("task", "")),
        framework=str(content.get("framework") or "pytorch"),
        entries=tuple(entry for entry in entries if entry.rows),
        has_stacks=bool(texts),
    )


def _stacks(path: Path) -> dict[str, str]:
    """The frames of each call as text. A damaged file is as good as none: stacks are an extra."""
    if not path.is_file():
        return {}
    try:
        content = load_json(path)
    except DamagedRunError:
        return {}
    found: dict[str, str] = {}
    for key, value in content.items():
        is_shared = isinstance(value, list) and len(value) == 2 and all(isinstance(part, list) for part in value)
        names, frames = value if is_shared else ([key], value)
        if isinstance(frames, list):
            text = str([frame for frame in frames if isinstance(frame, str)])
            found.update((name, text) for name in names if isinstance(name, str))
    return found


def _rows(name: str, body: Any, path: Path) -> Iterator[Row]:
    walk = _Walk(name, path)
    if not isinstance(body, dict) or _is_leaf(body):
        yield from walk.value(body, name, "output")
    elif ".parameters_grad" in name:
        for key, leaf in body.items():
            yield from walk.value(leaf[0] if isinstance(leaf, list) and leaf else leaf, f"{name}.{key}", "gradient")
    elif any(part in body for part, _, _ in _PARTS):
        for part, role, word in _PARTS:
            yield from walk.container(body.get(part), f"{name}.{word}", role)
    else:
        yield from walk.value(body, name, "output")


@dataclass(frozen=True, slots=True)
class _Walk:
    """Goes through the values of one entry."""

    entry: str
    path: Path

    def container(self, values: Any, place: str, role: Role) -> Iterator[Row]:
        """Positions or names; a lone value counts as position 0."""
        if isinstance(values, (dict, list)) and not _is_leaf(values):
            yield from self.value(values, place, role)
        elif values is not None:
            yield from self.value(values, f"{place}.0", role)

    def value(self, value: Any, name: str, role: Role, depth: int = 0) -> Iterator[Row]:
        if depth > _MAX_DEPTH:
            raise DamagedRunError(f"'{self.path}' nests its values too deeply to be a dump, in '{self.entry[:80]}'; dump this run again")
        if isinstance(value, list):
            for at, part in enumerate(value):
                yield from self.value(part, f"{name}.{at}", role, depth + 1)
        elif isinstance(value, dict) and not _is_leaf(value):
            for key, part in value.items():
                yield from self.value(part, f"{name}.{key}", role, depth + 1)
        else:
            yield _row(name, role, value)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, dict) and (isinstance(value.get("type"), str) or ("dtype" in value and "shape" in value))


def _row(name: str, role: Role, leaf: Any) -> Row:
    if not isinstance(leaf, dict):
        return Row(name, role) if leaf is None else _plain(name, role, type(leaf).__name__, leaf)
    if "dtype" not in leaf or "shape" not in leaf:
        return _plain(name, role, str(leaf["type"]), leaf.get("value", leaf.get("format")))
    shape = tensor_shape(leaf["shape"])
    checksum, file = leaf.get("md5"), leaf.get("data_name")
    return Row(
        name=name,
        role=role,
        dtype=str(leaf["dtype"])[:_LONGEST_TEXT],
        shape=NOT_THERE if shape is None else str(list(shape)),
        requires_grad=leaf.get("requires_grad") if isinstance(leaf.get("requires_grad"), bool) else None,
        statistics=tuple(_statistic(leaf.get(word)) for word in _STATISTICS),
        checksum=checksum[:_LONGEST_TEXT] if isinstance(checksum, str) else None,
        file=file if isinstance(file, str) and file != "-1" else None,
        is_tensor=True,
    )


def _plain(name: str, role: Role, kind: str, value: Any) -> Row:
    shown = value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
    shown = shown[:_LONGEST_TEXT] if isinstance(shown, str) else shown
    checksum = f"{zlib.crc32(str(shown).encode('utf-8', 'replace')):08x}"
    return Row(name, role, f"<class '{kind[:_LONGEST_TEXT]}'>", "[]", statistics=(shown, shown, shown, shown), checksum=checksum)


def _statistic(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else None
