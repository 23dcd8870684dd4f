# SPDX-License-Identifier: Apache-2.0
"""Choose the old tool's paths: `{dump_path}/[step{n}/]{tag}_v4.0/rank{r}`, folders with the rights 0750 and files with 0640.

The step stands where the guide prints it. Readers of such trees accept it at either level.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.ptdbg.files.line_names import is_plain_name

__all__ = ["DEFAULT_TAG", "FILE_RIGHTS", "FOLDER_RIGHTS", "VERSION", "DumpPlace", "make_folder"]

VERSION = "4.0"
DEFAULT_TAG = "ptdbg_dump"
FOLDER_RIGHTS = 0o750
FILE_RIGHTS = 0o640

_VARIABLE = "ASCEND_WORK_PATH"
_LONGEST_PATH = 4096


@dataclass(frozen=True, slots=True)
class DumpPlace:
    """The folder and the name that a user chose."""

    folder: Path
    tag: str = DEFAULT_TAG

    @classmethod
    def parse(cls, fpath: object, dump_tag: object = DEFAULT_TAG) -> DumpPlace:
        """Take the given folder, else `${ASCEND_WORK_PATH}/dump_data`; refuse if neither is known."""
        if fpath is None and os.environ.get(_VARIABLE):
            fpath = Path(os.environ[_VARIABLE]) / "dump_data"
        if not isinstance(fpath, (str, os.PathLike)) or not os.fspath(fpath):
            raise CompareException(
                CompareException.INVALID_PATH_ERROR,
                f"no folder is known to dump into: give dump_path (not {fpath!r}), or set the environment variable {_VARIABLE}",
            )
        if not isinstance(dump_tag, str) or not is_plain_name(dump_tag):
            raise CompareException(
                CompareException.INVALID_PARAM_ERROR, f"dump_tag is a name of letters, digits, '_', '-' and '.', not {dump_tag!r}"
            )
        folder = Path(os.path.abspath(os.path.expanduser(os.fspath(fpath))))  # noqa: PTH100, PTH111
        _check(folder)
        return cls(folder, dump_tag)

    def rank_folder(self, rank: int, step: int | None = None) -> Path:
        above = self.folder if step is None else self.folder / f"step{step}"
        return above / f"{self.tag}_v{VERSION}" / f"rank{rank}"


def _check(folder: Path) -> None:
    if len(str(folder)) > _LONGEST_PATH:
        raise CompareException(CompareException.INVALID_PATH_ERROR, f"the dump folder's path has {len(str(folder))} characters; shorten it")
    for parent in (folder, *folder.parents):
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise CompareException(
                    CompareException.INVALID_PATH_ERROR,
                    f"'{folder}' cannot be a folder, since '{parent}' is a file; choose another dump_path",
                )
            return


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, with the rights that the old tool gave."""
    for parent in (*reversed(folder.parents), folder):
        if not parent.is_dir():
            parent.mkdir(FOLDER_RIGHTS, exist_ok=True)
