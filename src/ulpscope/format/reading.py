# SPDX-License-Identifier: Apache-2.0
"""Read files of frames, and other small files of a run. Nothing here trusts a length or a type of file.

A frame that claims more bytes than its file holds or MAX_BODY allows, or that holds more values than any call, is a bad frame: reading
stops in front of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ulpscope.errors import DamagedRunError, InputError, NewerFormatError
from ulpscope.format.frames import (
    END_SIZE,
    HEAD_SIZE,
    MAX_BODY,
    UNREADABLE,
    AnyFrame,
    EndFrame,
    StartFrame,
    checksum,
    decoded,
    end_frame,
    head_at,
    holds_too_much,
    is_of_unknown_kind,
)
from ulpscope.model import FORMAT_VERSION

__all__ = ["FrameReader", "end_of_step", "newer_format", "not_allowed", "open_regular", "read_text", "verify_regular"]

_BLOCK = 1 << 16


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuse one that would block or never end (pipes, devices)."""
    try:
        verify_regular(path, path.stat())
        return path.open("rb", buffering=1 << 18)
    except PermissionError as error:
        raise not_allowed(path) from error


def not_allowed(path: Path) -> InputError:
    return InputError(f"{path} may not be read by you: the files of a run are open to their owner and group only")


def verify_regular(path: Path, status: os.stat_result) -> int:
    """Return the size of a regular file; refuse anything else."""
    if not stat.S_ISREG(status.st_mode):
        raise DamagedRunError(f"{path} should be a file of a run but is something else; nothing was read from it")
    return status.st_size


def read_text(path: Path, at_most: int) -> bytes:
    """Read at most so many bytes of a small file, however large it is."""
    with open_regular(path) as file:
        return file.read(min(at_most, os.fstat(file.fileno()).st_size))


class FrameReader:
    """Iterate over the frames of one file, from the beginning or from where the last reading stopped.

    After an iteration `position` is behind the last good frame; `problem` says what stands there, empty at a clean end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.problem = ""

    def __iter__(self) -> Iterator[Any]:
        with open_regular(self.path) as file:
            file.seek(self.position)
            for body in self._bodies(file):
                frame = self._decode(body)
                self.position += HEAD_SIZE + len(body)
                if frame is not None:
                    yield frame

    def damaged(self, what: str) -> DamagedRunError:
        return DamagedRunError(f"{self.path} is damaged at byte {self.position}: {what}; restore the file, or leave this step out")

    def _bodies(self, file: BinaryIO) -> Iterator[bytes]:
        data, at = b"", 0  # the bytes read so far, and where `position` is among them
        while True:
            if len(data) - at < HEAD_SIZE:
                data, at = data[at:] + file.read(_BLOCK), 0
                if len(data) < HEAD_SIZE:
                    self.problem = "a frame is cut off" if data else ""
                    return
            length, expected = head_at(data, at)
            end = at + HEAD_SIZE + length
            if end > len(data):
                if length > MAX_BODY or self.position + HEAD_SIZE + length > os.fstat(file.fileno()).st_size:
                    self.problem = f"a frame claims {length} bytes, more than there are"
                    return
                data, at, end = data[at:] + file.read(end - len(data) + _BLOCK), 0, HEAD_SIZE + length
            body = data[at + HEAD_SIZE : end]
            if checksum(body) != expected:
                self.problem = "the checksum of a frame is wrong"
                return
            if holds_too_much(body):
                self.problem = "a frame holds more values than any call has"
                return
            at = end
            yield body

    def _decode(self, body: bytes) -> AnyFrame | None:
        try:
            frame = decoded(body)
        except UNREADABLE as error:
            if is_of_unknown_kind(body):
                return None
            raise self.damaged(f"a frame holds something unexpected ({error})") from error
        if isinstance(frame, StartFrame) and frame.version > FORMAT_VERSION:
            raise newer_format(self.path, frame.version)
        return frame


def newer_format(path: Path, version: int) -> NewerFormatError:
    return NewerFormatError(f"{path} has format version {version}; this ulpscope reads up to {FORMAT_VERSION}: pip install -U ulpscope")


def end_of_step(path: Path) -> EndFrame | None:
    """Read the end frame of a step's records, from the end of the file; None where the step is not complete."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - END_SIZE))
        return end_frame(file.read(END_SIZE))
