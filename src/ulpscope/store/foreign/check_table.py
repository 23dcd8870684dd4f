# SPDX-License-Identifier: Apache-2.0
"""Read the table of a check: our own csv, or the details csv of api_accuracy_checker and msprobe, told apart by their headings.

The names of both tools become ours. A cell that is no number is no value.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ulpscope.errors import InputError
from ulpscope.model.check.standards import STANDARD_METRICS, DeviceRow
from ulpscope.store.foreign.reader import canonical_dtype, operation

__all__ = ["UPSTREAM_COLUMNS", "read_check_table"]

_MOST_BYTES = 1 << 30
_MOST_COLUMNS = 1024
UPSTREAM_COLUMNS = {
    "余弦相似度": "cosine",
    "Cosine Similarity": "cosine",
    "最大绝对误差": "max_abs",
    "Max Abs Error": "max_abs",
    "双百指标": "within_1e2",
    "Relative Error (dual hundredth)": "within_1e2",
    "双千指标": "within_1e3",
    "Relative Error (dual thousandth)": "within_1e3",
    "双万指标": "within_1e4",
    "Relative Error (dual ten thousandth)": "within_1e4",
    "二进制一致错误率": "mismatch",
    "Error Rate": "mismatch",
    "误差均衡性": "balance",
    "均方根误差": "rms_error",
    "小值域错误占比": "small_errors",
    "相对误差最大值": "max_rel",
    "相对误差平均值": "mean_rel",
    "inf/nan错误率": "nonfinite_errors",
    "相对误差错误率": "rel_errors",
    "绝对误差错误率": "abs_errors",
    "ULP误差最大值": "ulp_max",
    "ULP误差平均值": "ulp_mean",
    "ULP误差大于阈值占比": "ulp_beyond",
}
"""The headings in the details of the other tools, in our words."""
_UPSTREAM_NAME = re.compile(
    r"(?P<namespace>[^.*]{1,100})[.*](?P<name>.{1,400}?)[.*](?P<index>\d{1,9})\.(?P<phase>forward|backward)\.(?P<slot>output\.\d{1,6})"
)
_UPSTREAM_STATUS = {"pass": "passed", "warning": "warning", "error": "failed", "skip": "skipped"}


def read_check_table(path: Path) -> tuple[DeviceRow, ...]:
    """Read every row of a check's csv."""
    rows = _cells(path)
    headings = next(rows, {})
    if {"call", "phase", "slot", "dtype"} <= headings.keys():
        return _without_single_place(tuple(_own(row) for row in rows))
    name = next((each for each in ("API Name", "Npu Name") if each in headings), None)
    if name is not None and any(each in headings for each in UPSTREAM_COLUMNS):
        return tuple(_upstream(row, row.get(name, "")) for row in rows)
    found = ", ".join(repr(each[:30]) for each in list(headings)[:5]) or "nothing"
    raise InputError(
        f"'{path}' is no table of a check: its headings begin with {found}; "
        "give what 'ulpscope check --csv FILE' wrote, or accuracy_checking_details_*.csv"
    )


def _cells(path: Path) -> Iterator[dict[str, str]]:
    """Yield the headings as a row of their own, then each row by its headings."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"'{path}' is larger than {_MOST_BYTES >> 30} GiB, which no table of a check is; give another file")
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            headings = next(reader, [])[:_MOST_COLUMNS]
            yield dict(zip(headings, headings, strict=True))
            for cells in reader:
                yield dict(zip(headings, cells, strict=False))
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror}); give the csv that a check wrote") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"'{path}' is no csv ({str(error)[:80]}); give what 'ulpscope check --csv FILE' wrote") from None


def _own(row: dict[str, str]) -> DeviceRow:
    call = row.get("call", "")
    return DeviceRow(
        call=call,
        op=call.rpartition(".")[0] or call,
        phase=row.get("phase", ""),
        slot=row.get("slot", ""),
        dtype=row.get("dtype", ""),
        shape=row.get("shape", ""),
        module=row.get("module", ""),
        place=f"rank {row.get('rank', '')} step {row.get('step', '')}",
        status=row.get("slot_status", "") or row.get("status", ""),
        reason=row.get("reason", ""),
        error=_number(row.get("device_error", "")),
        metrics=_numbers({name: row.get(name, "") for name in STANDARD_METRICS}),
    )


def _upstream(row: dict[str, str], name: str) -> DeviceRow:
    match = _UPSTREAM_NAME.fullmatch(name)
    op = operation(match["namespace"], match["name"]) if match else name
    status = row.get("Status", "").strip().lower()
    return DeviceRow(
        call=f"{op}.{int(match['index'])}" if match else name,
        op=op or "unknown",
        phase=match["phase"] if match else "",
        slot=match["slot"] if match else "",
        dtype=canonical_dtype((row.get("DEVICE Dtype") or row.get("NPU Dtype") or "").strip()),
        shape=row.get("Shape", "").strip(),
        status=_UPSTREAM_STATUS.get(status, status),
        reason=row.get("Message", "").strip(),
        metrics=_numbers({ours: row[theirs] for theirs, ours in UPSTREAM_COLUMNS.items() if theirs in row}),
        name=name,
    )


def _without_single_place(rows: tuple[DeviceRow, ...]) -> tuple[DeviceRow, ...]:
    """Drop the place from a table of one step of one rank, so that it compares with any other single step."""
    if len({row.place for row in rows}) != 1:
        return rows
    return tuple(replace(row, place="") for row in rows)


def _numbers(cells: dict[str, str]) -> dict[str, float]:
    found = {name: _number(cell) for name, cell in cells.items()}
    return {name: value for name, value in found.items() if value is not None}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
