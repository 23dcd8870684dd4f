# SPDX-License-Identifier: Apache-2.0
"""Read the dumps of ptdbg: `[mode_]dump.pkl`, which is text with one JSON array a line, and the folder of .npy files of the same stem.

    ptdbg_dump_v4.0/step0/rank0/api_stack_dump.pkl      any of these paths, and the folder above, can be opened;
                                                        the step folder may be missing or stand first

A true pickle is never loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.model import Arguments, CallName, CallRecord, Frame, LedgerEntry, Phase, RunInfo, Slot, TensorRecord
from ulpscope.store.foreign.ptdbg_lines import json_lines
from ulpscope.store.foreign.reader import (
    NOT_RECORDED,
    ForeignRun,
    Numbering,
    Place,
    Reading,
    canonical_dtype,
    fingerprint,
    join_backward,
    mark_late_inputs,
    nested_arguments,
    number_ranks,
    operation,
    summary,
    tensor_shape,
    user_frames,
)

__all__ = ["open_dump", "open_file", "recognize"]

# Without torch.distributed and without a device the tool names the rank folder after the process.
_PROCESS_IDS_FROM = 1024

_NAME = re.compile(
    r"(?:(?P<namespace>Functional|Tensor|Torch|VF|NPU|Distributed|Aten|Module)_)?(?P<name>[A-Za-z_].*)_(?P<index>\d{1,9})_"
    r"(?P<phase>forward|backward)_"
    r"(?:(?P<role>input|output)(?P<path>(?:\.\d{1,4}){0,8})|stack_info)"
)
_FOLDER = re.compile(r"step\d{1,9}|rank\d{0,9}|.*_v\d[\w.]*")


def recognize(path: Path) -> bool:
    """Tell whether the path looks like a dump of ptdbg."""
    if path.is_file():
        return path.name.endswith("dump.pkl") or (path.suffix == ".pkl" and _head(path).startswith(b"["))
    return bool(_files(path))


def open_dump(path: Path) -> ForeignRun:
    """Open a dump by any of its folders or by its pkl file."""
    places = tuple(_places(path))
    if not places:
        raise NotARunError(f"'{path}' holds no *dump.pkl, neither itself nor in step*/rank* below; give the folder that holds the ranks")
    world_size = len({place.rank for place in places})
    return ForeignRun(path, RunInfo(format="ptdbg", tool="ptdbg_ascend", world_size=world_size), places, _read)


def open_file(file: Path, tensors: Path, *, rank: int = 0, step: int = 0) -> ForeignRun:
    """Open one pkl file by itself, with its tensors wherever they lie, as the given rank and step."""
    place = Place(rank, step, file, tensors)
    return ForeignRun(file, RunInfo(format="ptdbg", tool="ptdbg_ascend", world_size=1), (place,), _read)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(64).lstrip()
    except OSError as error:
        raise DamagedRunError(f"'{file}' cannot be opened ({error.strerror}); see whether it is still there and may be read") from None


def _files(path: Path) -> list[Path]:
    """Find the dump files at the path or in the folders below that make up a dump."""
    if path.is_file():
        return [path]
    if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return []
    entries = sorted(path.iterdir())
    found = [entry for entry in entries if entry.name.endswith("dump.pkl") and entry.is_file()]
    below = [entry for entry in entries if _FOLDER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()]
    return found + [file for folder in below for file in _files(folder)]


def _places(path: Path) -> Iterator[Place]:
    steps: dict[int, dict[str, Path]] = {}
    for file in _files(path):
        files = steps.setdefault(_step_number(file), {})
        other = files.setdefault(file.parent.name, file)
        if other != file:
            raise InputError(f"'{path}' holds several dumps of one rank and step, '{other}' and '{file}'; give the one that is meant")
    for step, files in sorted(steps.items()):
        folders = {file.parent: file for file in files.values()}
        for rank, folder in number_ranks(folders, process_ids_from=_PROCESS_IDS_FROM).items():
            yield Place(rank, step, folders[folder], folders[folder].with_suffix(""))


def _step_number(file: Path) -> int:
    """Return the step of the nearest folder that is named after one, at most three up."""
    matches = (re.fullmatch(r"step(\d{1,9})", folder.name) for folder in list(file.parents)[:3])
    return next((int(match[1]) for match in matches if match), 0)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line: a tensor or number in a slot of a call, or the stack of a call."""

    op: str
    source: str
    index: int
    phase: Phase
    slot: Slot | None
    values: list[Any]

    @classmethod
    def parse(cls, values: list[Any]) -> _Line | None:
        name = values[0] if len(values) >= 2 and isinstance(values[0], str) and len(values[0]) < 1024 else ""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        namespace, name = match["namespace"] or "Module", match["name"]  # a module dumped as one unit has a name of the user's
        op = f"module.{name}" if namespace == "Module" else operation(namespace, name)
        phase: Phase = "forward" if match["phase"] == "forward" else "backward"
        return cls(op, f"{namespace}_{name}", int(match["index"]), phase, _slot(match), values)


def _slot(match: re.Match[str]) -> Slot | None:
    if match["role"] is None:
        return None
    slot = Slot.parse(match["role"] + match["path"])
    return slot if slot.path else Slot(slot.role, (0,))


def _read(place: Place) -> Reading:
    lines, ledger, is_complete = _lines(place)
    numbering = Numbering((line.op, line.source, line.index) for line in lines)
    calls: dict[tuple[CallName, Phase], _Call] = {}
    kept = place.kept()
    for line in lines:
        key = numbering.name(line.op, line.source, line.index), line.phase
        calls.setdefault(key, _Call()).add(place, line, kept)
    records = (call.record(place, order, *key) for order, (key, call) in enumerate(calls.items()))
    return Reading(tuple(join_backward(mark_late_inputs(records))), tuple(ledger), is_complete)


def _lines(place: Place) -> tuple[list[_Line], list[LedgerEntry], bool]:
    """Read the lines that are part of a call; a killed writer leaves a last line without its end."""
    if not _head(place.file).startswith(b"["):
        raise DamagedRunError(
            f"'{place.file}' is not the text that ptdbg writes, one JSON array a line; "
            "if it is a true pickle, it is not loaded, since that would run the code inside"
        )
    lines: list[_Line] = []
    ledger: list[LedgerEntry] = []
    for read in json_lines(place.file):
        what = f"reading line {read.number} of {place.file.name}"
        line = _Line.parse(read.values) if read.values else None
        if line:
            lines.append(line)
        elif read.is_cut:
            ledger.append(LedgerEntry(what=what, why="it was not written to its end", step=place.step))
            return lines, ledger, False
        elif read.values is None:
            raise DamagedRunError(f"'{place.file}' is not a JSON array in line {read.number}; copy the file again, or dump this run again")
        elif read.values:
            ledger.append(LedgerEntry(what=what, why="it names no part of a call", step=place.step))
    return lines, ledger, True


@dataclass(slots=True)
class _Call:
    """The slots, arguments and stack of one call in one phase, gathered line by line."""

    slots: dict[Slot, TensorRecord] = field(default_factory=dict)
    arguments: dict[tuple[int | str, ...], Any] = field(default_factory=dict)
    stack: tuple[Frame, ...] = ()

    def add(self, place: Place, line: _Line, kept: frozenset[str]) -> None:
        if line.slot is None:
            self.stack = user_frames(_frames(line.values[1]))
            return
        try:
            name, _, checksum, kind, shape, statistics = line.values[:6]
        except ValueError:
            raise DamagedRunError(
                f"'{place.file}' has {len(line.values)} values for '{line.values[0]}', six are needed; dump this run again"
            ) from None
        if str(kind).startswith("<class"):
            value: Any = statistics[0] if isinstance(statistics, list) and statistics else NOT_RECORDED
        else:
            self.slots[line.slot] = _tensor(place, line.slot, name, checksum, str(kind), shape, statistics, kept)
            value = {"$tensor": str(line.slot)}
        if line.slot.role == "input":
            self.arguments[line.slot.path] = value

    def record(self, place: Place, order: int, call: CallName, phase: Phase) -> CallRecord:
        return CallRecord(
            rank=place.rank,
            step=place.step,
            order=order,
            call=call,
            phase=phase,
            level="module" if call.op.startswith("module.") else "api",
            arguments=Arguments(args=tuple(nested_arguments(self.arguments, place.file))) if phase == "forward" else None,
            slots=tuple(self.slots.values()),
            stack=self.stack,
        )


def _tensor(
    place: Place, slot: Slot, name: str, checksum: object, kind: str, shape: object, statistics: object, kept: frozenset[str]
) -> TensorRecord:
    sizes = tensor_shape(shape)
    if sizes is None:
        raise DamagedRunError(f"'{place.file}' gives '{name}' the shape {str(shape)[:60]}, which is none; dump this run again")
    high, low, mean, norm = ((*statistics, None, None, None, None) if isinstance(statistics, list) else (None,) * 4)[:4]
    dtype = canonical_dtype(kind)
    return TensorRecord(
        slot=slot,
        dtype=dtype,
        shape=sizes,
        summary=summary(dtype, sizes, low=low, high=high, mean=mean, norm=norm),
        fingerprint=fingerprint(checksum),
        content=next((file for file in (f"{name}.npy", f"{name}.pt") if file in kept), None),
    )


def _frames(lines: object) -> Iterator[Frame]:
    for line in lines if isinstance(lines, list) else []:
        if isinstance(line, list) and len(line) >= 3 and str(line[1]).isdecimal():
            yield Frame(str(line[0]), int(line[1]), str(line[2]), str(line[3] or "").strip() if len(line) > 3 else "")
