# SPDX-License-Identifier: Apache-2.0
"""Read a dump.json of msprobe word for word: its entries, the values in them, and the stacks beside it.

`Functional.gelu.0.forward` has the values `...input.0`, `...input.approximate`, `...output.0`; a module has `...parameters.weight` before
its outputs. debug.json is read in the same way; its entries are values themselves. Nothing in a dump is trusted: a value that cannot be
understood has no numbers, and the names of files are only looked up in the folder of the dump.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ulpscope.errors import DamagedRunError
from ulpscope.model.written import NOT_THERE, WrittenCall, WrittenRole, WrittenValue
from ulpscope.store.foreign.reader import is_crowded, tensor_shape

__all__ = [
    "Leaf",
    "WrittenDump",
    "gradient_leaves",
    "input_containers",
    "is_leaf",
    "is_tensor",
    "load_json",
    "part_leaves",
    "read_written",
    "written_stacks",
]

_MAX_JSON_BYTES = 2 << 30  # parsed it takes about eight times as much memory
_MAX_DEPTH = 64
_LONGEST_TEXT = 200
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_LATER_PARTS: tuple[tuple[str, WrittenRole, str], ...] = (("parameters", "parameter", "parameters"), ("output", "output", "output"))


def load_json(file: Path) -> dict[str, Any]:
    """Load the object from a json file of a dump; refuse anything else in one sentence."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
    except OSError as error:
        raise DamagedRunError(f"'{file}' cannot be opened ({error.strerror}); see whether it is still there and may be read") from None
    if size > _MAX_JSON_BYTES:
        raise DamagedRunError(
            f"'{file}' is {size / 1e9:.1f} GB, at most {_MAX_JSON_BYTES >> 30} GiB can be read; dump fewer calls or ranks"
        )
    text = file.read_bytes()
    if is_crowded(text):
        raise DamagedRunError(f"'{file}' is all brackets, {size} bytes of them, and no dump; dump this run again")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or not text.rstrip().endswith(b"}"):
            raise DamagedRunError(
                f"'{file}' ends in the middle, after {size} bytes: its writer was killed or is still at work; dump again"
            ) from None
        raise DamagedRunError(
            f"'{file}' is not JSON at line {error.lineno}, column {error.colno} ({error.msg}); dump this run again"
        ) from None
    except RecursionError:
        raise DamagedRunError(f"'{file}' nests its values too deeply to be a dump; dump this run again") from None
    except ValueError as error:
        raise DamagedRunError(f"'{file}' is not JSON ({str(error)[:80]}); dump this run again") from None
    if not isinstance(value, dict):
        raise DamagedRunError(f"'{file}' holds a {type(value).__name__} where a dump has an object; give another path")
    return value


# --- the values of one entry


class Leaf(NamedTuple):
    """One value of an entry: its role, the word for that role, its place, and the dump's statement of it."""

    role: WrittenRole
    word: str
    path: tuple[int | str, ...]
    value: Any


def is_leaf(value: object) -> bool:
    """Tell whether an object of the dump is one value and not a container."""
    return isinstance(value, dict) and (isinstance(value.get("type"), str) or is_tensor(value))


def is_tensor(value: object) -> bool:
    return isinstance(value, dict) and "dtype" in value and "shape" in value


def input_containers(body: dict[str, Any]) -> tuple[Any, Any]:
    """Return the inputs of an entry by position (a backward entry names them otherwise) and by keyword."""
    return body.get("input_args", body.get("input")), body.get("input_kwargs")


def part_leaves(body: dict[str, Any], entry: str, file: Path) -> Iterator[Leaf]:
    """Yield the values of a call, a lone value at position 0."""
    containers = [("input", "input", container) for container in input_containers(body)]
    containers += [(role, word, body.get(part)) for part, role, word in _LATER_PARTS]
    for role, word, container in containers:
        if isinstance(container, (dict, list)) and not is_leaf(container):
            yield from _leaves(container, Leaf(role, word, (), None), entry, file)  # type: ignore[arg-type]
        elif container is not None:
            yield Leaf(role, word, (0,), container)  # type: ignore[arg-type]


def gradient_leaves(body: dict[str, Any], entry: str, file: Path) -> Iterator[Leaf]:
    """Yield the gradients of parameters, by the parameter; later versions wrap each in a list."""
    for key, value in body.items():
        yield from _leaves(value[0] if isinstance(value, list) and value else value, Leaf("gradient", "", (key,), None), entry, file)


def _leaves(value: Any, at: Leaf, entry: str, file: Path) -> Iterator[Leaf]:
    if len(at.path) > _MAX_DEPTH:
        raise DamagedRunError(f"'{file}' nests its values too deeply to be a dump, in '{entry[:80]}'; dump this run again")
    if isinstance(value, list) or (isinstance(value, dict) and not is_leaf(value)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, Leaf(at.role, at.word, (*at.path, key), None), entry, file)
    else:
        yield Leaf(at.role, at.word, at.path, value)


# --- a whole dump


@dataclass(frozen=True, slots=True)
class WrittenDump:
    """One dump.json. `mode` is the kind of comparison that its contents allow."""

    path: Path
    task: str
    framework: str
    calls: tuple[WrittenCall, ...]
    has_stacks: bool

    @property
    def tensors(self) -> Path:
        return self.path.parent / "dump_tensor_data"

    @property
    def mode(self) -> Literal["tensor", "md5", "statistics"]:
        tensors = [value for call in self.calls for value in call.values if value.is_tensor]
        if self.task == "tensor" or any(value.file for value in tensors):
            return "tensor"
        has_all = tensors and all(value.checksum is not None for value in tensors if value.statistics[0] is not None)
        return "md5" if has_all else "statistics"


def read_written(path: Path, stacks: Path | None = None) -> WrittenDump:
    """Read a dump.json or debug.json, and the stacks beside it or in the file that is named."""
    content = load_json(path)
    data = content.get("data")
    if not isinstance(data, dict):
        raise DamagedRunError(f"'{path}' has no object named 'data', so it is no dump of msprobe; give a dump.json")
    texts = _stack_texts(stacks or path.with_name("stack.json"))
    calls = (WrittenCall(name, tuple(_values(name, body, path)), texts.get(name, "")) for name, body in data.items())
    return WrittenDump(
        path=path,
        task=str(content.get("task", "")),
        framework=str(content.get("framework") or "pytorch"),
        calls=tuple(call for call in calls if call.values),
        has_stacks=bool(texts),
    )


def written_stacks(content: dict[str, Any]) -> Iterator[tuple[list[str], list[Any]]]:
    """Yield the frames of stack.json with the calls that they belong to: 26.x writes number -> [names, frames], 1.x name -> frames."""
    for key, value in content.items():
        is_shared = isinstance(value, list) and len(value) == 2 and all(isinstance(part, list) for part in value)
        names, frames = value if is_shared else ([key], value)
        if isinstance(frames, list):
            yield [name for name in names if isinstance(name, str)], frames


def _stack_texts(path: Path) -> dict[str, str]:
    """Return the frames of each call as text. A damaged file counts as missing: stacks are an extra."""
    if not path.is_file():
        return {}
    try:
        content = load_json(path)
    except DamagedRunError:
        return {}
    found: dict[str, str] = {}
    for names, frames in written_stacks(content):
        text = str([frame for frame in frames if isinstance(frame, str)])
        found.update((name, text) for name in names)
    return found


def _values(name: str, body: Any, path: Path) -> Iterator[WrittenValue]:
    if not isinstance(body, dict) or is_leaf(body):
        leaves = _leaves(body, Leaf("output", "", (), None), name, path)
    elif ".parameters_grad" in name:
        leaves = gradient_leaves(body, name, path)
    elif any(part in body for part in ("input_args", "input", "input_kwargs", "parameters", "output")):
        leaves = part_leaves(body, name, path)
    else:
        leaves = _leaves(body, Leaf("output", "", (), None), name, path)
    for leaf in leaves:
        yield _written(".".join((name, *((leaf.word,) if leaf.word else ()), *map(str, leaf.path))), leaf.role, leaf.value)


def _written(name: str, role: WrittenRole, leaf: Any) -> WrittenValue:
    if not isinstance(leaf, dict):
        return WrittenValue(name, role=role) if leaf is None else _plain(name, role, type(leaf).__name__, leaf)
    if not is_tensor(leaf):
        return _plain(name, role, str(leaf["type"]), leaf.get("value", leaf.get("format")))
    shape = tensor_shape(leaf["shape"])
    checksum, file = leaf.get("md5"), leaf.get("data_name")
    return WrittenValue(
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


def _plain(name: str, role: WrittenRole, kind: str, value: Any) -> WrittenValue:
    shown = value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
    shown = shown[:_LONGEST_TEXT] if isinstance(shown, str) else shown
    checksum = f"{zlib.crc32(str(shown).encode('utf-8', 'replace')):08x}"
    return WrittenValue(name, f"<class '{kind[:_LONGEST_TEXT]}'>", "[]", (shown, shown, shown, shown), checksum, role)


def _statistic(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else None
