# SPDX-License-Identifier: Apache-2.0
"""Keep recorded tensors from filling the memory of the machine.

Written pages stay in the kernel's page cache until a program needs the memory. A recorder writes gigabytes that nobody reads soon: they
push out the training's own files, and the kernel must first find every further page (in a virtual machine whose memory grows on demand, at
an eighth of the speed). So only the newest part stays cached; the rest is sent to the disk in the background and let go.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

__all__ = ["PageCache"]

SPAN = 16 << 20
KEPT = 512 << 20


class PageCache:
    """The pages of large files that are still cached. It is told of every write and lives as long as its sink; without posix_fadvise it
    does nothing.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[Path, int, int]] = deque()
        self._cached = 0
        self._file: Path | None = None
        self._begin = 0

    def wrote(self, path: Path, end: int) -> None:
        """Take note that the file has grown to `end` bytes."""
        if path != self._file:
            self._file, self._begin = path, 0
        if end - self._begin < SPAN:
            return
        span = (path, self._begin, end)
        self._begin = end
        self._cached += span[2] - span[1]
        _advise(*span)  # begins to write it to the disk; what is not there yet stays cached
        self._spans.append(span)
        while self._cached > KEPT:
            oldest = self._spans.popleft()
            self._cached -= oldest[2] - oldest[1]
            _advise(*oldest)


def _advise(path: Path, begin: int, end: int) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):  # it is advice; whoever writes the file notices what is wrong with it
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
