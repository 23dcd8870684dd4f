# SPDX-License-Identifier: Apache-2.0
"""Append to files, and cut off again what a failed write left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["FILE_MODE", "FOLDER_MODE", "AppendFile", "repeated", "write_all"]

FILE_MODE = 0o640
FOLDER_MODE = 0o750


class AppendFile:
    """A file that only grows. After a failed write it cuts off the torn bytes and takes nothing more."""

    def __init__(self, path: Path, beginning: bytes) -> None:
        self.path = path
        self.size = 0
        self._failed: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), FILE_MODE)
        try:
            self.append(beginning)
        except OSError:
            self.close()
            raise

    def append(self, data: bytes | memoryview) -> None:
        """Hand the bytes to the kernel: from here on they outlive this process."""
        self.verify_whole()
        try:
            write_all(self._fd, data)
        except OSError as error:
            self._cut(error)
            raise
        self.size += len(data)

    def overwrite(self, data: bytes, offset: int) -> None:
        """Replace bytes that are there already; the end of the file stays where it is."""
        os.lseek(self._fd, offset, os.SEEK_SET)
        try:
            write_all(self._fd, data)
        finally:
            os.lseek(self._fd, self.size, os.SEEK_SET)

    def verify_whole(self) -> None:
        """Raise if an earlier write has failed."""
        if self._failed is not None:
            raise repeated(self._failed)

    def verify_present(self) -> None:
        """Raise if somebody has removed the file meanwhile: no reader can reach what is written to it then."""
        if os.fstat(self._fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was being written", str(self.path))

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _cut(self, error: OSError) -> None:
        self._failed = OSError(error.errno, error.strerror, str(self.path))
        try:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, self.size, os.SEEK_SET)
        except OSError:
            pass  # the torn frame stays; its checksum tells readers to stop in front of it


def repeated(error: OSError) -> OSError:
    """Copy an earlier error to raise it once more: the same object would grow each time it is raised."""
    return OSError(error.errno, f"nothing more is written here after an earlier failure: {error.strerror}", error.filename)


def write_all(fd: int, data: bytes | memoryview) -> None:
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])
