# SPDX-License-Identifier: Apache-2.0
"""Write result files as csv or xlsx under names with the time in them. A text that a spreadsheet would run is defused."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ulpscope._optional import require
from ulpscope.compat.msprobe.compare.result_rows import Cell, ResultRow
from ulpscope.errors import InputError
from ulpscope.report.comparison.table import defused
from ulpscope.report.replacing import replacing

__all__ = ["fresh_stamp", "output_folder", "write_cells", "write_csv", "write_xlsx"]

_ROWS_A_SHEET = 1_048_500
_LONGEST_TEXT = 32_767  # the most characters that an Excel cell holds
_LARGEST_NUMBER = 9.99999999999999e307  # the largest number that an Excel cell holds
_FILLS = {"red": "#FF0000", "yellow": "#FFFF00"}
_OPTIONS = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False, "use_zip64": True}


def output_folder(path: Path) -> Path:
    """Return the folder; make it where it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the output folder '{path}' cannot be made ({error.strerror}); choose another with -o") from None
    return path


def fresh_stamp(folder: Path) -> str:
    """Return the time to the second, or a later second if a result of that second exists already."""
    now = time.time()
    while any(folder.glob(f"*_{(stamp := time.strftime('%Y%m%d%H%M%S', time.localtime(now)))}.*")):
        now += 1
    return stamp


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[ResultRow]) -> None:
    """Write a result as csv."""
    with replacing(path) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_safe(cell) if isinstance(cell, str) else cell for cell in row.cells] for row in rows)
        temporary.chmod(0o640)


def write_xlsx(path: Path, columns: Sequence[str], rows: Sequence[ResultRow]) -> None:
    """Write a result as xlsx, its bad rows red or yellow, on as many sheets as needed."""
    sheets = {
        f"Sheet{number + 1}": rows[start : start + _ROWS_A_SHEET] for number, start in enumerate(range(0, max(len(rows), 1), _ROWS_A_SHEET))
    }
    write_cells(path, {name: (columns, [(row.cells, row.colour) for row in part]) for name, part in sheets.items()})


def write_cells(path: Path, sheets: Mapping[str, tuple[Sequence[str], Sequence[tuple[Sequence[Cell], str | None]]]]) -> None:
    """Write sheets of cells, each row with a colour or without."""
    xlsxwriter = require("xlsxwriter", extra="xlsx", purpose="writing an xlsx table")
    with replacing(path) as temporary, TemporaryDirectory(prefix="ulpscope-") as scratch:
        try:
            with xlsxwriter.Workbook(str(temporary), {**_OPTIONS, "tmpdir": scratch}) as book:
                _fill_book(book, sheets)
        except xlsxwriter.exceptions.FileCreateError as error:
            raise OSError(str(error)) from error
    path.chmod(0o640)


def _fill_book(book: Any, sheets: Mapping[str, tuple[Sequence[str], Sequence[tuple[Sequence[Cell], str | None]]]]) -> None:
    heading = book.add_format({"bold": True})
    fills = {name: book.add_format({"bg_color": colour}) for name, colour in _FILLS.items()}
    for name, (columns, rows) in sheets.items():
        sheet = book.add_worksheet(name)
        sheet.freeze_panes(1, 0)
        sheet.write_row(0, 0, columns, heading)
        for number, (cells, colour) in enumerate(rows, 1):
            for place, cell in enumerate(cells):
                _write_cell(sheet, number, place, cell, fills.get(colour or ""))


def _write_cell(sheet: Any, row: int, place: int, cell: Cell, fill: Any) -> None:
    if isinstance(cell, bool):
        sheet.write_boolean(row, place, cell, fill)
    elif isinstance(cell, (int, float)) and abs(cell) <= _LARGEST_NUMBER:
        sheet.write_number(row, place, cell, fill)
    elif cell is not None:
        sheet.write_string(row, place, _safe(str(cell))[:_LONGEST_TEXT], fill)


def _safe(text: str) -> str:
    """Defuse a text that begins like a formula; the words for infinities stay as they are."""
    return text if text == "-inf" else defused(text)
