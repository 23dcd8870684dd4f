# SPDX-License-Identifier: Apache-2.0
"""Write the pairs as csv and xlsx, row by row.

A text that a spreadsheet would run as a formula gets an apostrophe before it; numbers stay numbers. Where a metric is undefined the cell is
empty and `remarks` says why; NaN and infinities are the texts nan, inf and -inf.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ulpscope._optional import require
from ulpscope.model import Comparison
from ulpscope.report.comparison.rows import COLUMNS, Cell, pair_rows
from ulpscope.report.escaping import visible
from ulpscope.report.replacing import replacing

__all__ = ["write_csv", "write_xlsx"]

_FORMULA_STARTS = frozenset("=+-@\t\r\n＝＋－＠")
_WORDS = [place for place, column in enumerate(COLUMNS) if column.kind in ("text", "index")]
_ROWS_PER_SHEET = 1_048_575  # a sheet has 2**20 rows, one of which is the header
_LONGEST_TEXT = 32_767  # the most characters that an Excel cell holds
_LARGEST_NUMBER = 9.99999999999999e307  # the largest number that an Excel cell holds
_PLAIN = {
    "constant_memory": True,
    "strings_to_numbers": False,
    "strings_to_formulas": False,
    "strings_to_urls": False,
    "nan_inf_to_errors": False,
    "use_zip64": True,
}


def write_csv(comparison: Comparison, path: Path) -> None:
    """Write all pairs."""
    with replacing(path) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([column.name for column in COLUMNS])
        writer.writerows(_defused_rows(comparison))


def write_xlsx(comparison: Comparison, path: Path, *, rows_per_sheet: int = _ROWS_PER_SHEET) -> None:
    """Write all pairs, on as many sheets as needed."""
    xlsxwriter = require("xlsxwriter", extra="xlsx", purpose="writing an xlsx table")
    rows = _defused_rows(comparison)
    with replacing(path) as temporary, TemporaryDirectory(prefix="ulpscope-") as scratch:
        try:
            with xlsxwriter.Workbook(str(temporary), {**_PLAIN, "tmpdir": scratch}) as workbook:
                heading = workbook.add_format({"bold": True})
                for first in chain([next(rows, None)], rows):
                    _fill_sheet(workbook.add_worksheet(), heading, _group(first, rows, rows_per_sheet))
        except xlsxwriter.exceptions.FileCreateError as error:
            raise OSError(str(error)) from error


def _group(first: list[Cell] | None, rows: Iterator[list[Cell]], size: int) -> Iterator[list[Cell]]:
    return chain([] if first is None else [first], islice(rows, size - 1))


def _fill_sheet(sheet: Any, heading: Any, rows: Iterable[list[Cell]]) -> None:
    sheet.freeze_panes(1, 0)
    for place, column in enumerate(COLUMNS):
        sheet.write_string(0, place, column.name, heading)
    number = 0
    for number, cells in enumerate(rows, 1):
        for place, cell in enumerate(cells):
            if cell is not None:
                _write_cell(sheet, number, place, cell)
    sheet.autofilter(0, 0, number, len(COLUMNS) - 1)


def _write_cell(sheet: Any, row: int, place: int, cell: Cell) -> None:
    if isinstance(cell, bool):
        sheet.write_boolean(row, place, cell)
    elif isinstance(cell, (int, float)) and abs(cell) <= _LARGEST_NUMBER:
        sheet.write_number(row, place, cell)
    else:
        sheet.write_string(row, place, str(cell)[:_LONGEST_TEXT])


def _defused_rows(comparison: Comparison) -> Iterator[list[Cell]]:
    for row in pair_rows(comparison):
        cells = list(row)
        for place in _WORDS:
            if (cell := cells[place]) is not None:
                cells[place] = defused(cell if isinstance(cell, str) else str(list(cell)))  # type: ignore[arg-type]
        yield cells


@lru_cache(maxsize=65536)
def defused(text: str) -> str:
    """Spell out control characters, and put an apostrophe before a text that a spreadsheet would run as a formula."""
    starts_formula = text.lstrip(" ")[:1] in _FORMULA_STARTS
    return ("'" if starts_formula else "") + visible(text)
