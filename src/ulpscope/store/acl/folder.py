# SPDX-License-Identifier: Apache-2.0
"""Open a folder of Ascend's dump files as a run: one call for each operator, in the order of their times.

    {dump_path}/{time}/{device}/{model_name}/{model_id}/{step}/{files}      any of these folders, and a single file, can be opened;
                                                                            there may be fewer levels

The device is the rank. A call whose files cannot be read is missing, and the ledger says so; scratch memory (buffers, workspaces) is left
out.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ulpscope.errors import DamagedRunError, InputError, NotARunError
from ulpscope.model import CallName, CallRecord, LedgerEntry, RunInfo, Slot, TensorData, TensorRecord
from ulpscope.numerics.summary.summary import summarize
from ulpscope.store.acl.blocked_formats import is_convertible
from ulpscope.store.acl.debug_files import AclOverflow, read_overflows
from ulpscope.store.acl.file import AclDump, AclTensor, is_acl_file, read_acl_file
from ulpscope.store.acl.file_names import AclName, match_acl_name, read_mapping
from ulpscope.store.acl.statistics import is_statistics_file, read_statistics

__all__ = ["AclFile", "AclRun", "acl_files", "open_dump", "recognize"]

_DEEPEST = 6
_TIME = re.compile(r"\d{14,17}")


@dataclass(frozen=True, slots=True)
class AclFile:
    """One file of a dump, under its true name even where that was too long for the file system."""

    path: Path
    name: AclName
    is_statistics: bool = False

    @property
    def order(self) -> tuple[int, int, str]:
        return self.name.time, self.name.task, self.path.name


def acl_files(folder: Path) -> list[AclFile]:
    """List the dump files in one folder, in the order of their times."""
    mapping = read_mapping(folder)
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            stem = entry.name.removesuffix(".csv")
            name = match_acl_name(mapping.get(stem, stem) if stem.isdecimal() else stem)
            if name is not None and entry.is_file(follow_symlinks=False):
                found.append(AclFile(Path(entry.path), name, is_statistics=stem != entry.name))
    return sorted(found, key=lambda file: file.order)


def recognize(path: Path) -> bool:
    """Tell whether the path is a dump file of Ascend, or a folder with such files in it or in its folders of numbers."""
    if path.is_dir():
        return next(_folders(path), None) is not None
    name = match_acl_name(path.name.removesuffix(".csv"))
    if path.suffix == ".csv":
        return name is not None and is_statistics_file(path)
    return is_acl_file(path)


def open_dump(path: Path) -> AclRun:
    """Open a dump by any of its folders, or one file of it."""
    if path.is_file():
        known = match_acl_name(path.name.removesuffix(".csv")) or match_acl_name(read_mapping(path.parent).get(path.name, ""))
        name = known or AclName("unnamed", path.name, 0, None, 0)
        return AclRun(path, {(0, 0): [AclFile(path, name, is_statistics=path.suffix == ".csv")]})
    places: dict[tuple[int, int], list[Path]] = {}
    for folder in _folders(path):
        places.setdefault(_place(folder, path), []).append(folder)
    if not places:
        raise NotARunError(f"'{path}' holds no dump files of Ascend, neither itself nor in its folders of numbers; give the dump_path")
    for (rank, step), folders in places.items():
        times = sorted({_time_of(folder) for folder in folders})
        if len(times) > 1:
            raise InputError(
                f"'{path}' holds several dumps of device {rank}, step {step}: '{times[0]}' and '{times[1]}'; give the one that is meant"
            )
    files = {place: [file for folder in folders for file in acl_files(folder)] for place, folders in places.items()}
    return AclRun(path, {place: sorted(found, key=lambda file: file.order) for place, found in sorted(files.items())})


def _folders(path: Path, depth: int = 0) -> Iterator[Path]:
    """Find the folders with dump files. Below the given folder each is named by a number or, as the model's, stands in one that is."""
    try:
        with os.scandir(path) as entries:
            names = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except PermissionError:
        return
    if any(not is_dir and _may_be_dumped(name) for name, is_dir in names) and acl_files(path):
        yield path
    if depth < _DEEPEST:
        for name, is_dir in names:
            if is_dir and (name.isdecimal() or path.absolute().name.isdecimal()):
                yield from _folders(path / name, depth + 1)


def _may_be_dumped(name: str) -> bool:
    stem = name.removesuffix(".csv")
    return stem.isdecimal() or match_acl_name(stem) is not None


def _time_of(folder: Path) -> str:
    return next((part for part in reversed(folder.absolute().parts) if _TIME.fullmatch(part)), "")


def _place(folder: Path, root: Path) -> tuple[int, int]:
    """Read the device and the step from the folders below that of the time; without one, from those below the opened folder."""
    parts = folder.absolute().parts
    times = [at for at, part in enumerate(parts) if _TIME.fullmatch(part)]
    below = parts[times[-1] + 1 :] if times else folder.relative_to(root).parts
    device, *rest = below or ("0",)
    has_step = len(rest) >= 3 or (len(rest) == 2 and rest[0].isdecimal())
    return _number(device), _number(rest[-1]) if has_step else 0


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0


class AclRun:
    """Dump files as a `Run`. It keeps the last step in memory, without its tensors."""

    def __init__(self, path: Path, places: dict[tuple[int, int], list[AclFile]]) -> None:
        self._path = path
        self._places = places
        self._last: tuple[tuple[int, int], _Step] | None = None

    @property
    def path(self) -> Path:
        return self._path

    @property
    def info(self) -> RunInfo:
        return RunInfo(format="acl", tool="Ascend ACL", world_size=len(self.ranks()), devices=("npu",))

    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self._places}))

    def steps(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(step for found, step in self._places if found == rank))

    def records(self, rank: int, step: int) -> Iterator[CallRecord]:
        yield from self._step(rank, step).records

    def tensor(self, rank: int, step: int, content: str) -> TensorData:
        found = self._step(rank, step).contents.get(content)
        if found is None:
            raise DamagedRunError(
                f"'{self._path}' keeps no tensor named '{content}'; compare by statistics, or copy the missing file there"
            )
        file, role, index = found
        tensor = next((tensor for tensor in read_acl_file(file).of(role) if tensor.index == index), None)
        if tensor is None:
            raise DamagedRunError(f"'{file}' has changed since it was opened: it has no {role} {index} any more; open the run again")
        return _data(tensor)[0]

    def ledger(self, rank: int) -> tuple[LedgerEntry, ...]:
        return tuple(entry for step in self.steps(rank) for entry in self._step(rank, step).ledger)

    def is_complete(self, rank: int, step: int) -> bool:
        return self._step(rank, step).is_complete

    def _step(self, rank: int, step: int) -> _Step:
        place = rank, step
        if place not in self._places:
            known = ", ".join(f"step {step} of rank {rank}" for rank, step in list(self._places)[:4])
            raise NotARunError(f"'{self._path}' holds no step {step} of rank {rank}; it holds {known}")
        if self._last is None or self._last[0] != place:
            self._last = place, _Step(rank, step, self._places[place])
        return self._last[1]


class _Step:
    """The contents of one step's files."""

    def __init__(self, rank: int, step: int, files: list[AclFile]) -> None:
        self.ledger: list[LedgerEntry] = []
        self.contents: dict[str, tuple[Path, str, int]] = {}
        self.is_complete = True
        self._step = step
        overflows = [overflow for file in files if file.name.is_overflow for overflow in self._overflows(file)]
        self.records = tuple(self._records(rank, files, overflows))

    def _records(self, rank: int, files: list[AclFile], overflows: list[AclOverflow]) -> Iterator[CallRecord]:
        counts: Counter[str] = Counter()
        told: set[Path] = set()
        for group in _calls(file for file in files if not file.name.is_overflow):
            module, slots = self._read(group)
            if slots is None:
                continue
            name = group[0].name
            here = [overflow for overflow in overflows if overflow.concerns(name)]
            told.update(overflow.path for overflow in here)
            op = f"acl.{name.op_type}"
            order = counts.total()
            call = CallName(op, counts[op])
            counts[op] += 1
            marked = tuple(_marked(slot, here) for slot in slots)
            yield CallRecord(rank=rank, step=self._step, order=order, call=call, phase="forward", level="op", module=module, slots=marked)
        for overflow in overflows:
            if overflow.path not in told:
                where = f"task {overflow.task} of stream {overflow.stream}"
                self._note(
                    overflow.path, f"it tells of an overflow in {where} ({overflow.unit}), which no dumped operator has", step_ends=False
                )

    def _read(self, group: list[AclFile]) -> tuple[str, tuple[TensorRecord, ...] | None]:
        """Return the true name of an operator, and its slots; None where none of its files can be read."""
        module, is_read = group[0].name.op_name, False
        slots: dict[Slot, TensorRecord] = {}
        for file in group:
            try:
                if file.is_statistics:
                    slots |= {slot.slot: slot for slot in read_statistics(file.path) if slot.slot not in slots}
                else:
                    dump = read_acl_file(file.path)
                    module = dump.op_name or module
                    slots |= {slot.slot: slot for slot in self._slots(dump)}
                is_read = True
            except (InputError, OSError) as error:
                self._note(file.path, str(error))
        return module, tuple(slots[slot] for slot in sorted(slots)) if is_read else None

    def _slots(self, dump: AclDump) -> Iterator[TensorRecord]:
        for tensor in dump.tensors:
            if tensor.role not in ("input", "output"):
                continue
            slot = Slot("input" if tensor.role == "input" else "output", (tensor.index,))
            content = f"{dump.path.name}:{slot}"
            if content in self.contents:
                content = f"{dump.path}:{slot}"
            try:
                record = _record(tensor, slot, content)
            except InputError as error:
                self._note(dump.path, str(error))
                record = TensorRecord(slot=slot, dtype=tensor.dtype, shape=(), device="npu", note="its values cannot be read")
            if record.content is not None:
                self.contents[content] = dump.path, tensor.role, tensor.index
            yield record

    def _overflows(self, file: AclFile) -> tuple[AclOverflow, ...]:
        try:
            return read_overflows(file.path) if not file.is_statistics else ()
        except (InputError, OSError) as error:
            self._note(file.path, str(error))
            return ()

    def _note(self, path: Path, why: str, *, step_ends: bool = True) -> None:
        self.ledger.append(LedgerEntry(what=f"reading {path.name}", why=why, step=self._step))
        self.is_complete = self.is_complete and not step_ends


def _calls(files: Iterable[AclFile]) -> list[list[AclFile]]:
    """Group the files of each call: its values, its statistics, or both."""
    calls: dict[tuple[Path, AclName], list[AclFile]] = {}
    for file in files:
        calls.setdefault((file.path.parent, file.name), []).append(file)
    return [sorted(group, key=lambda file: file.is_statistics) for group in calls.values()]


def _marked(slot: TensorRecord, overflows: list[AclOverflow]) -> TensorRecord:
    if not overflows or not slot.slot.is_output:
        return slot
    units = ", ".join(f"{overflow.unit}, status {'/'.join(map(hex, overflow.status))}" for overflow in overflows)
    return replace(slot, note="; ".join(filter(None, (slot.note, f"overflowed on the device ({units})"))))


def _record(tensor: AclTensor, slot: Slot, content: str) -> TensorRecord:
    if not tensor.is_kept:
        note = "its values are not in the file"
        return TensorRecord(slot=slot, dtype=tensor.dtype, shape=tensor.original_shape or tensor.shape, device="npu", note=note)
    data, note = _data(tensor)
    summary, fingerprint = summarize(data.dtype, np.frombuffer(data.buffer, np.uint8))
    return TensorRecord(
        slot=slot,
        dtype=data.dtype,
        shape=data.shape,
        device="npu",
        summary=summary,
        fingerprint=fingerprint,
        content=content,
        note=note,
    )


def _data(tensor: AclTensor) -> tuple[TensorData, str]:
    """Return the tensor in its original shape, or as stored where it cannot be converted, and a note about that."""
    try:
        data, notes = tensor.data("ND" if is_convertible(tensor.format) else None), []
        if not is_convertible(tensor.format):
            notes.append(f"as stored, {tensor.format}")
    except InputError:
        data, notes = tensor.data(), [f"as stored, {tensor.format}"]
    if data.dtype != tensor.dtype:
        notes.append(f"{tensor.dtype} on the device")
    return data, "; ".join(notes)
