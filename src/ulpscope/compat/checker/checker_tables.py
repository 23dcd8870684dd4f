# SPDX-License-Identifier: Apache-2.0
"""Write the two csv files of run_ut: one row for each API, one row for each of its results.

The details have the columns of 2023 in their places. After them come the later columns: the share within a hundredth, the error rate, the
status and a message.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from ulpscope.compat.sheets import read_csv
from ulpscope.model.check.check_details import CheckDetail, CheckOutcome
from ulpscope.model.check.checks import CheckStatus
from ulpscope.workflows.check.old_tables import STATUS_WORDS

__all__ = ["DETAIL_COLUMNS", "RESULT_COLUMNS", "finished_apis", "write_details", "write_results"]

RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message")
DETAIL_COLUMNS = (
    "Npu Name",
    "Bench Dtype",
    "NPU Dtype",
    "Shape",
    "Cosine Similarity",
    "Cosine Similarity Message",
    "Max Rel Error",
    "Max Rel Err Message",
    "Max Abs Error",
    "Max Abs Err Message",
    "Relative Error (dual thousandth)",
    "Relative Error (dual thousandth) Message",
    "Relative Error (dual ten thousandth)",
    "Relative Error (dual ten thousandth) Message",
    "Compare Builtin Type",
    "Builtin Type Message",
    "Pass",
    "Relative Error (dual hundredth)",
    "Error Rate",
    "Status",
    "Message",
)


def write_results(path: Path, outcomes: Iterable[CheckOutcome], earlier: Iterable[Sequence[str]] = ()) -> None:
    """Write one row for each API; `earlier` are rows of a check that is continued."""
    rows = [[one.key, _success(one.forward), _success(one.backward), one.message] for one in outcomes]
    _write(path, RESULT_COLUMNS, [*earlier, *rows])


def _success(status: CheckStatus | None) -> str:
    if status is None:
        return "N/A"
    return "SKIP" if status == "skipped" else str(status == "passed")


def write_details(path: Path, details: Iterable[CheckDetail], precision: int = 14) -> None:
    """Write one row for each result; figures have as many decimals as the old tool prints."""
    _write(path, DETAIL_COLUMNS, [_detail(one, precision) for one in details])


def _detail(one: CheckDetail, precision: int) -> list[object]:
    def figure(name: str) -> str:
        value = one.metrics.get(name)
        return "N/A" if value is None else f"{value:.{precision}f}"

    relative = [figure(name) for name in ("max_rel", "max_abs", "within_1e3", "within_1e4")]
    shape = str(tuple(one.shape)) if one.shape is not None else ""
    facts: list[object] = [one.name, one.golden_dtype, one.dtype, shape, figure("cosine"), _cosine_message(one)]
    pairs = [cell for value in relative for cell in (value, "")]
    passed = "" if one.status == "skipped" else str(one.status == "passed")
    return [*facts, *pairs, "N/A", "", passed, figure("within_1e2"), figure("mismatch"), STATUS_WORDS[one.status], one.message]


def _cosine_message(one: CheckDetail) -> str:
    return "" if "cosine" in one.metrics or one.status == "skipped" else "no cosine: a single number, all zero, or no floating point"


def finished_apis(path: Path) -> list[list[str]]:
    """Read the rows of a result csv to continue; empty where the file is none."""
    try:
        rows = read_csv(path)
    except (OSError, ValueError):
        return []
    return [row for row in rows[1:] if len(row) == len(RESULT_COLUMNS)] if rows and tuple(rows[0]) == RESULT_COLUMNS else []


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)


def _cell(value: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would run as a formula."""
    text = isinstance(value, str) and value[:1] in ("=", "+", "@", "\t", "\r")
    return f"'{value}" if text else value
