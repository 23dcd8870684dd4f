# SPDX-License-Identifier: Apache-2.0
"""Run `msprobe merge_result`: put chosen columns of the results of several ranks side by side, one sheet for each column.

The results are csv files, or xlsx where openpyxl is installed. Rows are named by `NPU Name`. A rank without a number there shows the two
maxima instead, as the old tool does.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

from ulpscope.compat.msprobe.command.flat_yaml import read_lists
from ulpscope.compat.msprobe.compare.result_files import fresh_stamp, output_folder, write_cells
from ulpscope.compat.sheets import Cell, read_csv, read_sheet
from ulpscope.errors import InputError
from ulpscope.report.escaping import visible

__all__ = ["run_merge"]

_RESULT = re.compile(r"compare_result_rank(?P<rank>\d{1,9})(?:-rank\d{1,9})?_(?P<time>\d{14})\.(?:csv|xlsx)")
_MOST_BYTES = 1 << 30
_NAME_OF_SHEET = re.compile(r"[\[\]:*?/\\]")


def run_merge(given: argparse.Namespace) -> int:
    """Write multi_ranks_compare_merge_{time}.xlsx."""
    config = read_lists(given.config_path)
    apis, wanted = config.get("api", []), config.get("compare_index", [])
    if not wanted:
        raise InputError(f"'{given.config_path}' names no compare_index: write 'compare_index: [Max diff, L2norm diff]'")
    files = _files(given.input_dir)
    if len(files) < 2:
        raise InputError(
            f"'{given.input_dir}' holds {len(files)} results named compare_result_rank*_*.csv or .xlsx; merging needs two ranks"
        )
    tables = {rank: _table(path) for rank, path in files.items()}
    missing = [name for name in wanted if not any(name in row for rows in tables.values() for row in rows.values())]
    if missing:
        raise InputError(f"no result has the column '{missing[0]}'; choose columns that are in the results")
    names = [name for name in dict.fromkeys(name for rows in tables.values() for name in rows) if _is_wanted(name, apis)]
    if not names:
        raise InputError(f"no row begins with one of the names under api in '{given.config_path}'")
    folder = output_folder(given.output_dir)
    path = folder / f"multi_ranks_compare_merge_{fresh_stamp(folder)}.xlsx"
    headings = ("NPU Name", *(f"rank{rank}" for rank in tables))
    sheets = {}
    for column in wanted:
        cells = [([name, *(_cell(rows.get(name), column) for rows in tables.values())], None) for name in names]
        sheets[_NAME_OF_SHEET.sub("_", column)[:31]] = (headings, cells)
    write_cells(path, sheets)
    where = f"{len(names)} rows of {len(tables)} ranks are in '{visible(str(path))}'"
    print(f"{where}; the same by hand: ulpscope compare, which takes all ranks at once")
    return 0


def _files(folder: Path) -> dict[int, Path]:
    """Find the newest result of each rank."""
    if not folder.is_dir():
        raise InputError(f"'{folder}' is no folder: give the one with the results of the ranks")
    found = [(match, entry) for entry in sorted(folder.iterdir()) if (match := _RESULT.fullmatch(entry.name))]
    newest = {int(match["rank"]): entry for match, entry in sorted(found, key=lambda pair: pair[0]["time"])}
    return dict(sorted(newest.items()))


def _is_wanted(name: str, apis: list[str]) -> bool:
    return not apis or name.startswith(tuple(f"{api}." for api in apis))


def _table(path: Path) -> dict[str, dict[str, Cell]]:
    """Read the rows of a result by NPU Name."""
    if path.stat().st_size > _MOST_BYTES:
        raise InputError(f"'{path}' is larger than {_MOST_BYTES >> 30} GiB, which no result is; give another folder")
    try:
        rows = read_csv(path) if path.suffix == ".csv" else read_sheet(path)
    except (csv.Error, ValueError, KeyError) as error:
        raise InputError(f"'{path}' cannot be read as a result ({str(error)[:80]}); compare this rank again") from None
    headings = [str(cell) for cell in rows[0]] if rows else []
    if "NPU Name" not in headings or "NPU MD5" in headings:
        raise InputError(f"'{path}' is no result that can be merged: it has no column NPU Name, or compares by checksums")
    dicts = (dict(zip(headings, cells, strict=False)) for cells in rows[1:])
    return {str(row["NPU Name"]): row for row in dicts if row.get("NPU Name") not in (None, "N/A")}


def _cell(row: dict[str, Cell] | None, column: str) -> Cell:
    if row is None:
        return "N/A"
    value = row.get(column)
    if value in (None, "", "N/A", "unsupported"):
        return f"NPU:{row.get('NPU max')}  Bench:{row.get('Bench max')}"
    try:
        return float(str(value))
    except ValueError:
        return value
