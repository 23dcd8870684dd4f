# SPDX-License-Identifier: Apache-2.0
"""Read the rows of csv and xlsx files from an untrusted source.

An xlsx file is a zip archive of XML, and a small one can inflate without end. So the inflated bytes are counted as they come, whatever size
the archive states, before anything reads them as a sheet. Cells are counted as they come too, since a sheet can claim a cell in its last
corner and nothing before it.
"""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ulpscope._optional import require

__all__ = ["Cell", "read_csv", "read_sheet"]

Cell: TypeAlias = str | int | float | bool | None
_Row = TypeVar("_Row", bound=Sequence[Any])

_MOST_INFLATED = 16 << 20
_MOST_TIMES = 50  # a larger file may inflate to so many times its size; sheets of numbers inflate ten to thirty times
_MOST_ENTRIES = 1000
_MOST_CELLS = 1 << 24
_BLOCK = 1 << 16
_DECLARATIONS = (b"<!DOCTYPE", b"<!ENTITY")


def read_csv(path: Path) -> list[list[str]]:
    """Read the rows that are not empty; raise ValueError with the reason where the file is no csv."""
    with path.open(newline="", encoding="utf-8-sig") as stream:
        try:
            return [list(row) for row in _counted(csv.reader(stream)) if row]
        except csv.Error as error:
            raise ValueError(str(error)) from None


def read_sheet(path: Path) -> list[list[Cell]]:
    """Read the rows of the first sheet; raise ValueError with the reason where there is none."""
    openpyxl = require("openpyxl", extra="xlsx", purpose=f"reading '{path.name}'; results as csv need nothing, or else it")
    _check_inflated(path)
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        return [list(row) for row in _counted(book.active.iter_rows(values_only=True))]
    except MemoryError:
        raise
    except Exception as error:  # reading a zip and XML can raise nearly anything
        raise ValueError(str(error) or type(error).__name__) from None


def _counted(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Yield the rows, as long as there are not more cells than any result has."""
    num_cells = 0
    for row in rows:
        num_cells += len(row) + 1
        if num_cells > _MOST_CELLS:
            raise ValueError(f"it has more than {_MOST_CELLS} cells")
        yield row


def _check_inflated(path: Path) -> None:
    most = max(_MOST_INFLATED, _MOST_TIMES * path.stat().st_size)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) > _MOST_ENTRIES:
                raise ValueError(f"it has {len(entries)} entries, more than any workbook")
            for entry in entries:
                if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError("it is compressed in a way that no workbook is")
                most -= _inflated(archive, entry, most)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, zlib.error) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _inflated(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> int:
    """Count how many bytes an entry really has, since its stated size is not trusted."""
    size, before = 0, b""
    with archive.open(entry) as stream:
        while block := stream.read(_BLOCK):
            size += len(block)
            if size > most:
                raise ValueError("it would inflate to far more than a result takes")
            text = (before + block).replace(b"\0", b"")  # in UTF-16 every other byte is one
            if any(word in text for word in _DECLARATIONS):
                raise ValueError("its XML declares entities, which no workbook does")
            before = block[-2 * len(_DECLARATIONS[0]) :]
    return size
