# SPDX-License-Identifier: Apache-2.0
"""Read small files that a user names, up to the size that such a file can have: a device, a pipe or a file of holes may have no end."""

from __future__ import annotations

import os
from pathlib import Path

from ulpscope.errors import InputError

__all__ = ["read_small"]

_AT_ONCE = 1 << 20


def read_small(path: str | os.PathLike[str], most_bytes: int, what: str) -> bytes:
    """Read all bytes of a file; refuse one that is larger than any `what`. Raise OSError where it cannot be read.

    >>> read_small("/dev/zero", 1 << 20, "config.json")
    Traceback (most recent call last):
    ulpscope.errors.InputError: '/dev/zero' has more than 1048576 bytes, far more than a config.json; give the right file
    """
    pieces, size = [], 0
    with Path(path).open("rb", buffering=0) as stream:
        while piece := stream.read(_AT_ONCE):
            pieces.append(piece)
            size += len(piece)
            if size > most_bytes:
                raise InputError(f"'{os.fspath(path)}' has more than {most_bytes} bytes, far more than a {what}; give the right file")
    return b"".join(pieces)
