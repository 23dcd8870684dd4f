# SPDX-License-Identifier: Apache-2.0
"""Write the old files: `[mode_]dump.pkl`, text with one JSON array a line, and the folder of .npy files of the same stem.

A line is `[name, step_flag, [], dtype, shape, [max, min, mean]]`, statistics in float32; a stack line is `[name_stack_info, frames]`. The
tensors of a call are in their files before its lines are in the pkl, and the files of a killed process stay readable.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ulpscope.compat.ptdbg.files.kept import KeptTensors
from ulpscope.compat.ptdbg.files.line_slots import Value, backward_values, floating_inputs, forward_values
from ulpscope.compat.ptdbg.files.modes import DumpOptions
from ulpscope.compat.ptdbg.files.places import FILE_RIGHTS, make_folder
from ulpscope.compat.screen import print_warning
from ulpscope.model import DTYPES, CallName, CallRecord, Frame, LedgerEntry, SinkAbilities, TensorRecord

__all__ = ["DumpWriter", "frames_line", "number_line", "tensor_line"]

_MOST_NAMES = 3
_NO_STATISTICS: list[Any] = [[], [], []]


class DumpWriter:
    """Writes one dump of one rank. `name_of` gives the old name of a call, or None for a call that the old tool does not record."""

    abilities = SinkAbilities(shows_overwritten=True)

    def __init__(self, folder: Path, options: DumpOptions, name_of: Callable[[CallName], str | None]) -> None:
        self.folder = folder
        self.num_apis = 0
        self._options = options
        self._name_of = name_of
        self._is_chosen = options.chooser()
        self._has_chosen = False
        self._first_names: list[str] = []
        self._inputs: dict[CallName, list[tuple[int | str, ...]]] = {}
        make_folder(folder)
        self._data = folder / options.stem
        self._empty_data_folder()
        self._tensors = KeptTensors(self._data if options.has_files else None)
        self._pkl = os.open(folder / f"{options.stem}.pkl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, FILE_RIGHTS)

    def begin_step(self, step: int) -> None:
        """Do nothing: each step of the debugger has a writer of its own."""

    def end_step(self) -> None:
        """Do nothing: each step of the debugger has a writer of its own."""

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        return self._tensors.keep(dtype, shape, buffer)

    def note(self, entry: LedgerEntry) -> None:
        print_warning(f"could not {entry.what}: {entry.why}")

    def close(self, *, complete: bool = True) -> None:
        if self._pkl >= 0:
            os.close(self._pkl)
            self._pkl = -1
            self._tensors.close()
            self._tell_empty_scope()

    def write(self, record: CallRecord) -> None:
        name = self._name_of(record.call)
        if name is None or record.recompute or record.phase not in ("forward", "backward"):
            return
        if record.phase == "forward" and self._options.needs_backward:
            self._inputs[record.call] = floating_inputs(record)
        api = f"{name}_{record.phase}"
        is_chosen = self._is_chosen(api)
        self._has_chosen = self._has_chosen or is_chosen
        if len(self._first_names) < _MOST_NAMES:
            self._first_names.append(api)
        if not is_chosen or record.phase not in self._options.words or self._is_empty(record):
            return
        step_flag = int(record.level == "module")
        lines = [self._line(f"{api}_{part}", value, step_flag) for part, value in self._values(record)]
        if self._options.has_stacks:
            lines.append(frames_line(api, record.stack))
        if lines:
            self._append(lines)
            self.num_apis += 1

    def _tell_empty_scope(self) -> None:
        """Say that a scope named nothing that ran: its files are empty, and look like those of a dump."""
        wanted = self._options.scope or self._options.api_list
        if wanted and not self._has_chosen:
            seen = f"the first APIs are {', '.join(self._first_names)}" if self._first_names else "no API ran that these could name"
            print_warning(f"mode '{self._options.mode}' with {list(wanted)} matched no API, so nothing was dumped; {seen}")

    def _is_empty(self, record: CallRecord) -> bool:
        """Tell whether no values were read at all: meta tensors, or memory that nothing has written to."""
        return self._options.has_tensors and all(slot.summary is None for slot in record.slots)

    def _values(self, record: CallRecord) -> Iterator[tuple[str, Value]]:
        if not self._options.has_tensors:
            return
        is_forward = record.phase == "forward"
        values = forward_values(record) if is_forward else backward_values(record, self._inputs.get(record.call, []))
        for part, value in values:
            if part.partition(".")[0] in self._options.words and self._is_wanted(value):
                yield part, value

    def _is_wanted(self, value: Value) -> bool:
        if not isinstance(value, TensorRecord):
            return not self._options.floats_only
        if value.summary is None:
            return False
        is_floating = value.dtype in DTYPES and DTYPES[value.dtype].is_floating
        return not self._options.floats_only or (is_floating and bool(value.shape) and value.summary.numel > 0)

    def _line(self, name: str, value: Value, step_flag: int) -> list[Any]:
        if isinstance(value, TensorRecord):
            if value.content is not None:
                self._tensors.name(value.content, f"{name}.npy")
            return tensor_line(name, value, self._tensors.mean(value.content), step_flag)
        self._tensors.name_number(value, f"{name}.npy")
        return number_line(name, value, step_flag)

    def _append(self, lines: Iterable[list[Any]]) -> None:
        rest = memoryview("".join(f"{json.dumps(line)}\n" for line in lines).encode())
        while rest:
            rest = rest[os.write(self._pkl, rest) :]

    def _empty_data_folder(self) -> None:
        """Begin with an empty folder, or with none if the dump writes no tensors. Only tensors are removed."""
        if self._data.is_dir() and not self._data.is_symlink():
            for file in list(self._data.glob("*.npy")):
                file.unlink()
            if not self._options.has_files and not any(self._data.iterdir()):
                self._data.rmdir()
        if self._options.has_files:
            make_folder(self._data)


def tensor_line(name: str, record: TensorRecord, mean: float | None, step_flag: int) -> list[Any]:
    return [name, step_flag, [], f"torch.{record.dtype}", list(record.shape), _statistics(record, mean)]


def number_line(name: str, value: bool | int | float, step_flag: int) -> list[Any]:
    return [name, step_flag, [], str(type(value)), "[]", [value, value, value]]


def frames_line(api: str, stack: Iterable[Frame]) -> list[Any]:
    """Return the line of a stack, innermost frame first."""
    return [f"{api}_stack_info", [[frame.file, str(frame.line), frame.function, frame.code or None] for frame in stack]]


def _statistics(record: TensorRecord, mean: float | None) -> list[Any]:
    summary = record.summary
    if summary is None or summary.numel == 0 or record.dtype == "bool":
        return _NO_STATISTICS
    if summary.num_nan:
        return [math.nan] * 3
    if summary.max is None or summary.min is None:
        return _NO_STATISTICS
    middle = mean if mean is not None else summary.mean if summary.mean is not None else math.nan
    return [_as_float32(summary.max), _as_float32(summary.min), _as_float32(middle)]


def _as_float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
