# SPDX-License-Identifier: Apache-2.0
"""Write a report under a temporary name and rename it: a file under its final name is always whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ulpscope.errors import InputError

__all__ = ["check_writable", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` if the block ends well, else delete it."""
    check_writable(path)
    temporary = path.with_name(f".{path.name[:100]}.{os.urandom(4).hex()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}; choose another place") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, with a sentence that says why."""
    if path.is_dir():
        raise InputError(f"cannot write '{path}': it is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        raise InputError(
            f"cannot write '{path}': it is a device or a pipe, which a report would take the place of; give the name of a file"
        )
    if not path.parent.is_dir():
        raise InputError(f"cannot write '{path}': the folder '{path.parent}' does not exist; create it first")
