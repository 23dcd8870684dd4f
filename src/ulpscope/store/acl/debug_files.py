# SPDX-License-Identifier: Apache-2.0
"""Read an `Opdebug` file: which task of which stream overflowed, on which unit, with which status.

It is an ordinary dump file whose outputs hold the facts: 64-bit numbers behind a magic number, or, in the older form, 2048 bytes with a
fixed place for each of three units. The task in the name of the file is that of the watcher, not that of the operator.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from ulpscope.errors import DamagedRunError
from ulpscope.store.acl.file import read_acl_file
from ulpscope.store.acl.file_names import AclName

__all__ = ["AclOverflow", "read_overflows"]

_MAGIC = 0x5A5A5A5A
_HEAD = struct.Struct("<IIIIII")  # magic, version, valid, unit, reserved, bytes that follow
_COMMON = "model stream task task_type context thread"
_CORE = f"{_COMMON} pc_start para_base core block status"
_UNITS = {
    0: ("AI Core", _CORE),
    1: ("AI Vector", _CORE),
    2: ("AI CPU", "model stream task task_type context cpu thread status"),
    3: ("SDMA", f"{_COMMON} source destination channel status"),
}
_NUM_STATUSES = 4  # of the cores, from version 1 on
_NOT_THERE = 65535  # as a context or thread

_OLD_BYTES = 2048
_OLD_FIELDS = "model stream task task_type pc_start para_base"
# Where the older form has a unit's task, and where its status.
_OLD_UNITS = {"DHA atomic add": (0, 512), "L2 atomic add": (128, 768), "AI Core": (256, 1024 + 16)}


@dataclass(frozen=True, slots=True)
class AclOverflow:
    """One overflow; `task` and `stream` name the operator in which it happened. `fields` has every number of the file under its name."""

    path: Path
    unit: str
    task: int
    stream: int
    context: int | None
    thread: int | None
    status: tuple[int, ...]
    fields: dict[str, int]

    def concerns(self, name: AclName) -> bool:
        """Tell whether the dump file of that name is of the operator that overflowed."""
        is_task = name.task == self.task and name.stream in (None, self.stream) and not name.is_overflow
        slices = ((self.context, name.context), (self.thread, name.thread))
        return is_task and all(told is None or found is None or told == found for told, found in slices)


def read_overflows(path: Path) -> tuple[AclOverflow, ...]:
    """Read the overflows from an Opdebug file; none where every status is zero."""
    told: list[AclOverflow] = []
    for tensor in read_acl_file(path).of("output"):
        data = tensor.raw()
        if len(data) >= _HEAD.size and int.from_bytes(data[:4], "little") == _MAGIC:
            told += _told(path, data)
        elif len(data) == _OLD_BYTES:
            told += _told_in_old_form(path, data)
        else:
            raise DamagedRunError(
                f"{tensor.place} has {len(data)} bytes that tell of no overflow; copy the file again, or look at the operators' own files"
            )
    return tuple(told)


def _told(path: Path, data: memoryview) -> list[AclOverflow]:
    _, version, is_valid, number, _, _ = _HEAD.unpack_from(data)
    if number not in _UNITS:
        raise DamagedRunError(f"'{path}' tells of an overflow on unit {number}, and there are {', '.join(map(str, _UNITS))}; copy it again")
    unit, layout = _UNITS[number]
    names = layout.split()
    num_statuses = _NUM_STATUSES if number in (0, 1) and version >= 1 else 1
    num_words = len(names) - 1 + num_statuses
    if len(data) < _HEAD.size + 8 * num_words:
        raise DamagedRunError(f"'{path}' ends in the middle of what it tells of an overflow; copy it again")
    words = struct.unpack_from(f"<{num_words}Q", data, _HEAD.size)
    fields, status = dict(zip(names, words, strict=False)), words[len(names) - 1 :]
    return [_overflow(path, unit, fields | {"status": status[0]}, status)] if is_valid and any(status) else []


def _told_in_old_form(path: Path, data: memoryview) -> list[AclOverflow]:
    names = _OLD_FIELDS.split()
    found = []
    for unit, (at, status_at) in _OLD_UNITS.items():
        fields = dict(zip(names, struct.unpack_from(f"<{len(names)}Q", data, at), strict=True))
        (status,) = struct.unpack_from("<Q", data, status_at)
        if unit == "AI Core":
            kernel, block = struct.unpack_from("<QQ", data, status_at - 16)
            fields |= {"kernel": kernel, "block": block}
        if status:
            found.append(_overflow(path, unit, fields | {"status": status}, (status,)))
    return found


def _overflow(path: Path, unit: str, fields: dict[str, int], status: tuple[int, ...]) -> AclOverflow:
    context, thread = (None if fields.get(name, _NOT_THERE) == _NOT_THERE else fields[name] for name in ("context", "thread"))
    return AclOverflow(path, unit, fields["task"], fields["stream"], context, thread, status, fields)
