# SPDX-License-Identifier: Apache-2.0
"""Run the old overflow check: hunt for inf and NaN, count every call that leaves one, and write old files for each.

    {rank folder}/Tensor___add___1_forward_1.pkl     statistics of the call that overflowed first, its stack first
    {rank folder}/Tensor___add___1_forward_1/        its tensors

As on the old tool's devices the largest finite number of a dtype counts as an overflow. What made it out of clean inputs also goes into
forward_info, backward_info and stack_info in the working folder, as it happens.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulpscope.compat.ptdbg.dump.overflow_info import OverflowInfo
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.ptdbg.files.kept import KeptTensors
from ulpscope.compat.ptdbg.files.line_names import api_name
from ulpscope.compat.ptdbg.files.line_slots import Value, forward_values
from ulpscope.compat.ptdbg.files.modes import switched_on
from ulpscope.compat.ptdbg.files.pkl_writer import frames_line, number_line, tensor_line
from ulpscope.compat.ptdbg.files.places import FILE_RIGHTS, DumpPlace, make_folder
from ulpscope.compat.screen import print_warning
from ulpscope.model import DTYPES, CallRecord, LedgerEntry, NonFinite, NonFiniteCall, TensorRecord
from ulpscope.workflows.record.capturing import Capture

__all__ = ["OverflowCheck", "OverflowOptions"]

_STEP_FLAG = 101
_WITH_LIMIT = ("float16", "float32", "bfloat16")
_OVERFLOW_FILE = re.compile(r".+_(?:forward|backward)_\d+\.pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowOptions:
    """Training stops at overflow number `limit`, or never (None)."""

    limit: int | None = 1
    with_values: bool = False
    floats_only: bool = False

    @classmethod
    def parse(cls, overflow_nums: object, need_replicate: object = False, filter_switch: object = "OFF") -> OverflowOptions:
        is_number = isinstance(overflow_nums, int) and not isinstance(overflow_nums, bool)
        if not is_number or (overflow_nums != -1 and overflow_nums < 1):  # type: ignore[operator]
            raise CompareException(
                CompareException.INVALID_PARAM_ERROR, f"overflow_nums is a whole number from 1 up, or -1 for no end, not {overflow_nums!r}"
            )
        if not isinstance(need_replicate, bool):
            raise CompareException(CompareException.INVALID_PARAM_ERROR, f"need_replicate is True or False, not {need_replicate!r}")
        limit = None if overflow_nums == -1 else overflow_nums
        return cls(limit=limit, with_values=need_replicate, floats_only=switched_on(filter_switch, "filter_switch"))  # type: ignore[arg-type]


class OverflowCheck:
    """One running check. It is the sink of the hunt, which keeps tensors there, and is told of each overflow."""

    def __init__(self, place: DumpPlace, options: OverflowOptions, *, rank: int | None = None, step: int | None = None) -> None:
        self.floats_only = options.floats_only
        self._place = place
        self._options = options
        self._step = step
        self._rank = 0
        self._count = 0
        self._tensors: KeptTensors | None = None
        self._info: OverflowInfo | None = None
        watch = NonFinite(limit=None, passed_on=True, saturation=True, ring=0, calls=True, at_once=True, on_event=self._take_down)
        self._capture = Capture.into_sink(self._open, operators=True, ranks=rank, watch=watch)

    def start(self) -> None:
        self._capture.start()

    def pause(self) -> None:
        self._capture.pause()

    def resume(self) -> None:
        self._capture.resume()

    def next_step(self, step: int | None) -> None:
        """Start the next step: calls are counted anew, and files go to its folder; overflows go on being counted."""
        self._capture.step()
        self._close_files()
        self._step = step

    def stop(self) -> None:
        self._capture.stop()

    # ---- the sink of the watch

    def _open(self, rank: int) -> OverflowCheck:
        self._rank = rank
        folder = self._folder
        old = [file.name for file in folder.iterdir() if _OVERFLOW_FILE.fullmatch(file.name)] if folder.is_dir() else []
        if old:
            raise CompareException(
                CompareException.INVALID_FILE_ERROR,
                f"'{folder}' holds the overflows of an earlier check, for example '{min(old)}'; delete them, or choose another dump path",
            )
        return self

    @property
    def _folder(self) -> Path:
        return self._place.rank_folder(self._rank, self._step)

    def begin_step(self, step: int) -> None:
        """Do nothing: the debugger decides the steps."""

    def end_step(self) -> None:
        """Do nothing: the debugger decides the steps."""

    def write(self, record: CallRecord) -> None:
        """Ignore the record: the check is told of every call that the hunt writes."""

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        if self._tensors is None:
            make_folder(self._folder)
            self._tensors = KeptTensors(self._folder)
        return self._tensors.keep(dtype, shape, buffer)

    def note(self, entry: LedgerEntry) -> None:
        print_warning(f"could not {entry.what}: {entry.why}")

    def close(self, *, complete: bool = True) -> None:
        self._close_files()
        if self._info is not None:
            self._info.close()
            self._info = None

    def _close_files(self) -> None:
        if self._tensors is not None:
            self._tensors.close()
            self._tensors = None

    # ---- each overflow

    def _take_down(self, call: NonFiniteCall) -> None:
        record = call.record
        name = api_name(record.call.op)
        if name is None or record.phase not in ("forward", "backward"):
            return
        self._count += 1
        api = f"{name}_{record.call.index}_{record.phase}"
        file = self._write_files(api, record)
        print_warning(f"overflow {self._count}: {api}: {_described(record)}; its data are in '{file}'")
        if _is_clean(record):
            self._info = self._info or OverflowInfo(Path.cwd(), self._rank, with_values=self._options.with_values)
            self._info.add(api, record, self._tensors)
        self._close_files()
        if self._options.limit is not None and self._count >= self._options.limit:
            raise ValueError(f"[overflow {self._options.limit} times]: dump file is saved in '{file}'.")

    def _write_files(self, api: str, record: CallRecord) -> Path:
        folder = self._folder
        make_folder(folder / f"{api}_{self._count}")
        lines = [frames_line(api, record.stack)]
        lines += [self._line(f"{api}_{self._count}", f"{api}_{part}", value) for part, value in _values(record) if self._is_wanted(value)]
        file = folder / f"{api}_{self._count}.pkl"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_RIGHTS), "w", encoding="utf-8") as stream:
            stream.writelines(f"{json.dumps(line)}\n" for line in lines)
        return file

    def _is_wanted(self, value: Value) -> bool:
        if isinstance(value, TensorRecord):
            return value.summary is not None and (not self.floats_only or DTYPES[value.dtype].is_floating)
        return not self.floats_only

    def _line(self, folder: str, name: str, value: Value) -> list[Any]:
        tensors = self._tensors
        assert tensors is not None
        if not isinstance(value, TensorRecord):
            tensors.name_number(value, f"{folder}/{name}.npy")
            return number_line(name, value, _STEP_FLAG)
        if value.content is not None:
            tensors.name(value.content, f"{folder}/{name}.npy")
        return tensor_line(name, value, tensors.mean(value.content), _STEP_FLAG)


def _values(record: CallRecord) -> Iterator[tuple[str, Value]]:
    if record.phase == "forward":
        yield from forward_values(record)
        return
    received = [slot for slot in record.slots if slot.slot.role == "input"]
    passed_on = [slot for slot in record.slots if slot.slot.role in ("output", "gradient")]
    for role, slots in (("input", received), ("output", passed_on)):
        yield from ((f"{role}.{place}", slot) for place, slot in enumerate(slots))


def _is_clean(record: CallRecord) -> bool:
    """Tell whether the inputs of the call show no overflow while its results do."""
    return not _overflows(record, ("input", "parameter")) and _overflows(record, ("output", "mutated", "gradient"))


def _described(record: CallRecord) -> str:
    if _overflows(record, ("input", "parameter")):
        return "its input overflowed already"
    return "its input is clean and its output overflows"


def _overflows(record: CallRecord, roles: tuple[str, ...]) -> bool:
    return any(_shows_overflow(slot) for slot in record.slots if slot.slot.role in roles)


def _shows_overflow(slot: TensorRecord) -> bool:
    summary = slot.summary
    if summary is None:
        return False
    if summary.num_nonfinite:
        return True
    return slot.dtype in _WITH_LIMIT and summary.abs_max is not None and summary.abs_max >= DTYPES[slot.dtype].max
