# SPDX-License-Identifier: Apache-2.0
"""Turn checked calls into rows, one for each result of each call: the same columns in csv, xlsx and json.

A skipped call has a row too. A cell without a value is empty; infinities are the texts inf and -inf.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO, TypeAlias

from ulpscope._optional import require
from ulpscope.model import Finding, SlotReplay
from ulpscope.model.check.checks import Check, CheckedCall, CheckedSlot
from ulpscope.report.check.console import verdict_line
from ulpscope.report.comparison.table import defused
from ulpscope.report.replacing import replacing

__all__ = ["CHECK_SCHEMA", "check_columns", "check_rows", "dump_check", "write_check_csv", "write_check_json", "write_check_xlsx"]

CHECK_SCHEMA = "ulpscope.check/1"
Cell: TypeAlias = "str | int | float | bool | None"

_CALL = ("rank", "step", "order", "module", "call", "phase", "status", "reason", "device", "data")
_SLOT = ("slot", "dtype", "shape", "slot_status", "multiple", "blamed", "judged_in")
_RATIOS = ("max_ratio", "rms_ratio", "error", "honest_error", "bias", "scale", "num_nonfinite", "num_flipped", "is_bound")
_REST = ("second_opinion", "standard_errors", "overflow", "reproduced", "random", "stands_for", "elapsed_s", "source")
_MOST_ROWS = 1_048_575
_LONGEST_TEXT = 32_767


def check_columns(check: Check) -> list[str]:
    """Return all columns; the figures of a rule set come last."""
    metrics = dict.fromkeys(name for call in check.calls for slot in call.slots for name in slot.metrics)
    ratios = [f"{role}_{name}" for role in ("device", "recorded") for name in _RATIOS]
    return [*_CALL, *_SLOT, *ratios, *_REST, *metrics]


def check_rows(check: Check) -> Iterator[dict[str, Cell]]:
    for call in check.calls:
        for slot in call.slots or (None,):
            yield _row(call, slot)


def _row(call: CheckedCall, slot: CheckedSlot | None) -> dict[str, Cell]:
    frame = call.source
    row: dict[str, Cell] = {
        "rank": call.rank,
        "step": call.step,
        "order": call.order,
        "module": call.module,
        "call": str(call.call),
        "phase": call.phase,
        "status": call.status,
        "reason": call.reason,
        "device": call.device,
        "data": call.data,
        "overflow": call.overflow,
        "reproduced": call.is_reproduced,
        "random": call.is_random,
        "stands_for": call.stands_for,
        "elapsed_s": round(call.elapsed_s, 6),
        "source": f"{frame.file}:{frame.line}" if frame else None,
    }
    return row if slot is None else row | _slot_cells(slot)


def _slot_cells(slot: CheckedSlot) -> dict[str, Cell]:
    known = slot.device or slot.recorded
    cells: dict[str, Cell] = {
        "slot": str(slot.slot),
        "dtype": slot.dtype,
        "shape": str(list(slot.shape)),
        "slot_status": slot.status,
        "multiple": slot.multiple,
        "blamed": slot.blamed,
        "judged_in": known.dtype if known else None,
        "second_opinion": slot.second_opinion.max_ratio if slot.second_opinion else None,
        "standard_errors": slot.drawn.distance if slot.drawn else None,
    }
    return cells | _ratios("device", slot.device) | _ratios("recorded", slot.recorded) | dict(slot.metrics)


def _ratios(role: str, found: SlotReplay | None) -> dict[str, Cell]:
    return {} if found is None else {f"{role}_{name}": getattr(found, name) for name in _RATIOS}


def write_check_csv(check: Check, path: Path) -> None:
    """Write every row."""
    columns = check_columns(check)
    with replacing(path) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        for row in check_rows(check):
            writer.writerow([_defused(row.get(name)) for name in columns])


def write_check_xlsx(check: Check, path: Path) -> None:
    """Write every row that a sheet has room for."""
    xlsxwriter = require("xlsxwriter", extra="xlsx", purpose="writing an xlsx table")
    columns = check_columns(check)
    plain = {"constant_memory": True, "strings_to_numbers": False, "strings_to_formulas": False, "strings_to_urls": False}
    with replacing(path) as temporary, TemporaryDirectory(prefix="ulpscope-") as scratch:
        try:
            with xlsxwriter.Workbook(str(temporary), {**plain, "tmpdir": scratch}) as workbook:
                _fill(workbook, columns, check)
        except xlsxwriter.exceptions.FileCreateError as error:
            raise OSError(str(error)) from error


def _fill(workbook: Any, columns: list[str], check: Check) -> None:
    sheet, heading = workbook.add_worksheet("check"), workbook.add_format({"bold": True})
    sheet.freeze_panes(1, 0)
    for place, name in enumerate(columns):
        sheet.write_string(0, place, defused(name), heading)
    number = 0
    for number, row in zip(range(1, _MOST_ROWS), check_rows(check), strict=False):
        for place, name in enumerate(columns):
            _write_cell(sheet, number, place, _defused(row.get(name)))
    sheet.autofilter(0, 0, number, len(columns) - 1)


def _write_cell(sheet: Any, row: int, place: int, cell: Cell) -> None:
    if isinstance(cell, bool):
        sheet.write_boolean(row, place, cell)
    elif isinstance(cell, (int, float)) and math.isfinite(cell):
        sheet.write_number(row, place, cell)
    elif cell is not None:
        sheet.write_string(row, place, str(cell)[:_LONGEST_TEXT])


def _defused(cell: Cell) -> Cell:
    return defused(cell) if isinstance(cell, str) else cell


def write_check_json(check: Check, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        dump_check(check, stream)


def dump_check(check: Check, stream: TextIO) -> None:
    """Write the answer, the findings, and every row as JSON; NaN and infinities are texts."""
    head = {
        "schema": CHECK_SCHEMA,
        "verdict": check.verdict,
        "headline": verdict_line(check),
        "path": check.path,
        "device": check.device,
        "rules": check.rules,
        "seed": check.seed,
        "elapsed_s": check.elapsed_s,
        "counts": check.counts,
        "coverage": check.coverage,
        "num_calls": check.num_calls,
        "num_checked": check.num_checked,
        "opaque": check.opaque,
        "skipped": check.reasons,
        "precision": [{"family": one.family, "operands": one.operands, "of": one.role} for one in check.precision],
        "findings": [_finding(finding) for finding in check.findings],
    }
    stream.write("{\n")
    for name, value in head.items():
        stream.write(f"{json.dumps(name)}: {json.dumps(_plain(value), allow_nan=False)},\n")
    stream.write('"results": [')
    for place, row in enumerate(check_rows(check)):
        known = {name: value for name, value in row.items() if value is not None}
        stream.write((",\n" if place else "\n") + json.dumps(_plain(known), allow_nan=False))
    stream.write("\n]\n}\n")


def _finding(finding: Finding) -> dict[str, Any]:
    names = ("level", "kind", "headline", "step", "rank", "phase", "module", "call", "slot", "evidence", "next")
    frame = finding.source
    source = {"file": frame.file, "line": frame.line, "function": frame.function, "code": frame.code} if frame else None
    return {**{name: getattr(finding, name) for name in names}, "source": source}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
