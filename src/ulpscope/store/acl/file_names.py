# SPDX-License-Identifier: Apache-2.0
"""Parse the names of Ascend's dump files and folders.

    {op_type}.{op_name}.{task}.{stream}.{time}            an operator; older writers leave the stream out
    ... .{task_type}.{context}.{thread}.{device}          behind that: one thread of a sliced operator (FFTS+)
    exception_info.{stream}.{task}.{time}                 what lay in memory when an operator failed
    {kernel}.{stream}.{task}.{core_type}.{core}.{time}    the same, in the newer form
    {number}                                              a name that was too long; `mapping.csv` beside it has the true one

A name is only ever looked at: nothing in it, nor in mapping.csv, becomes a path.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from ulpscope.errors import DamagedRunError, InputError

__all__ = ["MAPPING_FILE", "AclName", "match_acl_name", "parse_acl_name", "read_mapping"]

MAPPING_FILE = "mapping.csv"
_MAX_MAPPING_BYTES = 100 << 20
_MAX_NAME = 4096

_TIME = r"(?P<time>\d{10,20})"
_OPERATOR = re.compile(
    r"(?P<op_type>[^./\\]+)\.(?P<op_name>[^/\\]*?[^\d./\\][^/\\]*?|\d+)\.(?P<task>\d{1,20})(?:\.(?P<stream>\d{1,20}))?\." + _TIME + r""
    r"(?:\.(?P<task_type>\d{1,9})\.(?P<context>\d{1,9})\.(?P<thread>\d{1,9})(?:\.(?P<device>\d{1,9}))?)?"
)
_EXCEPTION = re.compile(r"(?P<op_type>exception_info)\.(?P<stream>\d{1,20})\.(?P<task>\d{1,20})\." + _TIME)
_CALLBACK = re.compile(
    r"(?P<op_type>[^./\\]+)\.(?P<stream>\d{1,20})\.(?P<task>\d{1,20})\.(?P<core_type>\w{1,16})\.(?P<core>\d{1,9})\." + _TIME
)


@dataclass(frozen=True, slots=True)
class AclName:
    """The parts of a dump file's name. `stream` is None in the older form without it; `time` is in microseconds."""

    op_type: str
    op_name: str
    task: int
    stream: int | None
    time: int
    task_type: int | None = None
    context: int | None = None
    thread: int | None = None
    device: int | None = None

    @property
    def is_overflow(self) -> bool:
        """Tell whether the file is about an overflow (`Opdebug.Node_OpDebug...`) rather than an operator."""
        return self.op_type.lower() == "opdebug"

    @property
    def is_exception(self) -> bool:
        """Tell whether the file was written because an operator failed."""
        return self.op_name == ""


def parse_acl_name(filename: str) -> AclName:
    """Take a file name apart.

    >>> parse_acl_name("MatMul.MatMul_1.45.0.1675157077183551").task
    45
    """
    name = match_acl_name(filename)
    if name is None:
        raise InputError(
            f"{filename[:200]!r} is not the name of a dump file of Ascend; expected type, name, task, stream and time, "
            "as in 'MatMul.MatMul_1.45.0.1675157077183551'"
        )
    return name


def match_acl_name(filename: str) -> AclName | None:
    """Return the parts of the name, or None where it is no such name."""
    if len(filename) > _MAX_NAME or not filename.isprintable():
        return None
    found = _EXCEPTION.fullmatch(filename) or _CALLBACK.fullmatch(filename) or _OPERATOR.fullmatch(filename)
    if found is None:
        return None
    parts = found.groupdict()
    numbers = {key: int(parts[key]) if parts.get(key) else None for key in ("stream", "task_type", "context", "thread", "device")}
    return AclName(parts["op_type"], parts.get("op_name") or "", int(parts["task"]), time=int(parts["time"]), **numbers)


def read_mapping(folder: Path) -> dict[str, str]:
    """Read the true names of the files whose names were too long, by the number that stands for each."""
    file = folder / MAPPING_FILE
    if file.is_symlink() or not file.is_file():
        return {}
    size = file.stat().st_size
    if size > _MAX_MAPPING_BYTES:
        raise DamagedRunError(f"'{file}' has {size} bytes, more than any list of names; copy it again, or take it away")
    try:
        with file.open(encoding="utf-8", errors="replace", newline="") as stream:
            return {row[0]: row[1] for row in csv.reader(stream) if len(row) == 2 and row[0].isdecimal()}
    except csv.Error as error:
        raise DamagedRunError(f"'{file}' is not the list of names that belongs to long file names ({error}); copy it again") from error
