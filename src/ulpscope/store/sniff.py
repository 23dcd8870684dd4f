# SPDX-License-Identifier: Apache-2.0
"""Look at a path and choose a reader, or say in one sentence what was found instead.

A reader is a module with `recognize(path) -> bool` and a function that opens a recognized path. Readers of other tools' formats are
imported only when the path is not a run of our own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from ulpscope.errors import NotARunError
from ulpscope.model import Run
from ulpscope.store.native import directory

__all__ = ["open_run"]

MAX_LISTED = 8

_MAGIC = {
    b"PK\x03\x04": "a zip archive (a .pt checkpoint, perhaps)",
    b"\x80\x02": "a pickle, which is never loaded",
    b"\x80\x03": "a pickle, which is never loaded",
    b"\x80\x04": "a pickle, which is never loaded",
    b"\x80\x05": "a pickle, which is never loaded",
    b"\x93NUMPY": "a NumPy array",
    b"PAR1": "a Parquet table",
    b"\x1f\x8b": "a gzip archive",
    b"{": "a JSON file",
    b"[": "a JSON file",
}


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run of any format that we read.

    >>> open_run("runs/npu").steps(rank=0)  # doctest: +SKIP
    (0, 1)
    """
    path = Path(path)
    try:
        opener = _opener(path)
        if opener is not None:
            return opener(path)
        found = _what_is_there(path)
    except PermissionError as error:
        raise NotARunError(f"{path} cannot be read: {error.strerror} ({error.filename})") from error
    raise NotARunError(found)


def _opener(path: Path) -> Callable[[Path], Run] | None:
    if not path.exists():
        return None
    if path.is_dir() and directory.recognize(path):
        return directory.DirectoryRun
    from ulpscope.store.acl import folder as acl_run
    from ulpscope.store.foreign import checker as checker_json
    from ulpscope.store.foreign import msprobe as dump_json
    from ulpscope.store.foreign import npu_hooks as hooks_pkl
    from ulpscope.store.foreign import ptdbg as pkl

    readers: tuple[tuple[Callable[[Path], bool], Callable[[Path], Run]], ...] = (
        (dump_json.recognize, dump_json.open_dump),
        (hooks_pkl.recognize, hooks_pkl.open_dump),
        (pkl.recognize, pkl.open_dump),
        (checker_json.recognize, checker_json.open_info),
        (acl_run.recognize, acl_run.open_dump),
    )
    return next((opener for recognize, opener in readers if recognize(path)), None)


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return _missing(path)
    return _folder_found(path) if path.is_dir() else _file_found(path)


def _missing(path: Path) -> str:
    there = next(parent for parent in path.absolute().parents if parent.is_dir())
    wanted = path.absolute().relative_to(there).parts[0]
    from difflib import get_close_matches

    near = get_close_matches(wanted, _entries(there, limit=10_000), n=3, cutoff=0.5)
    if near:
        return f"{path} does not exist; {there} has {_joined(near)}"
    return f"{path} does not exist; {there} has {_listing(there)}"


def _file_found(path: Path) -> str:
    if path.name == directory.RUN_JSON:
        return f"{path} is a part of a run; open the folder it lies in, {path.parent}"
    if not stat.S_ISREG(path.stat().st_mode):
        return f"{path} is neither a file nor a folder (a pipe, a socket or a device), so it holds no run"
    with path.open("rb") as file:
        beginning = file.read(8)
    if not beginning:
        return f"{path} is an empty file; a run is a folder, made by 'ulpscope run --into FOLDER' or ulpscope.Capture"
    kind = next((kind for magic, kind in _MAGIC.items() if beginning.startswith(magic)), f"a {path.suffix or 'binary or text'} file")
    return f"{path} is {kind}, and no run that we can read; a run is a folder, made by 'ulpscope run --into FOLDER' or ulpscope.Capture"


def _folder_found(path: Path) -> str:
    for parent in (path.parent, path.parent.parent):
        if path.name.startswith(("rank", "step")) and (parent / directory.RUN_JSON).is_file():
            return f"{path} is a part of a run; open the run itself, {parent}"
    runs = [name for name in _entries(path, limit=1000) if _opener(path / name) is not None]
    if runs:
        return f"{path} is no run but holds {len(runs)}: open {_joined(runs, ' or ')}"
    return f"{path} holds no run that we can read; it has {_listing(path)}"


def _entries(folder: Path, limit: int) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in islice(entries, limit))


def _listing(folder: Path) -> str:
    return _joined(_entries(folder, limit=1000)) or "nothing in it"


def _joined(names: list[str], word: str = " and ") -> str:
    """Join at most a few names, unprintable ones made printable."""
    shown = [ascii(name) if not name.isprintable() else repr(name) for name in names[:MAX_LISTED]]
    if len(names) > MAX_LISTED:
        shown.append(f"{len(names) - MAX_LISTED} more")
    return ", ".join(shown[:-1]) + word + shown[-1] if len(shown) > 1 else "".join(shown)
