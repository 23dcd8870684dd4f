# SPDX-License-Identifier: Apache-2.0
"""Show how two devices' checks compare: on a terminal with the worst first, as csv and json with a row for each result.

`DEVICE_COLUMNS` are the columns of the csv and the keys of the json's rows: the fields that identify a result, the verdict, the ratios of
the subject's errors to the reference's, the status of each ratio, and the figures of both sides.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, TypeAlias

from rich.console import Console
from rich.text import Text

from ulpscope.model.check.standards import STANDARD_METRICS, DeviceComparison, DevicePair
from ulpscope.report.comparison.table import defused
from ulpscope.report.escaping import shortened
from ulpscope.report.replacing import replacing

__all__ = ["DEVICES_SCHEMA", "DEVICE_COLUMNS", "device_rows", "dump_devices", "render_devices", "write_devices_csv", "write_devices_json"]

DEVICES_SCHEMA = "ulpscope.devices/1"
Cell: TypeAlias = "str | float | None"
_RATIOS = ("small_errors", "rms_error", "max_rel", "mean_rel", "balance", "ulp_beyond", "error")
_NAMES = ("place", "module", "call", "phase", "slot", "dtype", "shape")
_VERDICT = ("standard", "status", "multiple", "reason")
DEVICE_COLUMNS: tuple[str, ...] = (
    *_NAMES,
    *_VERDICT,
    *(f"{kind}_{name}" for name in _RATIOS for kind in ("ratio", "status")),
    *(f"{side}_{name}" for side in ("subject", "reference") for name in (*STANDARD_METRICS, "error")),
)
_MOST_ROWS = 20
_LONGEST = 300
_STYLES = {"failed": "red", "warning": "yellow"}


def device_rows(comparison: DeviceComparison) -> Iterator[dict[str, Cell]]:
    """Yield every result as a row by column name; a row leaves out columns without a value."""
    for pair in comparison.pairs:
        row: dict[str, Cell] = {name: getattr(pair.row, name) for name in _NAMES}
        row |= {name: getattr(pair.verdict, name) for name in _VERDICT}
        row |= {f"ratio_{name}": value for name, value in pair.verdict.ratios.items()}
        row |= {f"status_{name}": value for name, value in pair.verdict.statuses.items() if name in _RATIOS}
        for side, found in (("subject", pair.subject), ("reference", pair.reference)):
            if found is not None:
                row |= {f"{side}_{name}": value for name, value in found.metrics.items()}
                row |= {f"{side}_error": found.error}
        yield {name: value for name, value in row.items() if value is not None}


def write_devices_csv(comparison: DeviceComparison, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(DEVICE_COLUMNS)
        for row in device_rows(comparison):
            cells = (row.get(name) for name in DEVICE_COLUMNS)
            writer.writerow([defused(cell) if isinstance(cell, str) else cell for cell in cells])


def write_devices_json(comparison: DeviceComparison, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        dump_devices(comparison, stream)


def dump_devices(comparison: DeviceComparison, stream: TextIO) -> None:
    """Write the counts, then a row for each result, as JSON; NaN and infinities are texts."""
    head = {
        "schema": DEVICES_SCHEMA,
        "subject": comparison.subject_path,
        "reference": comparison.reference_path,
        "edition": comparison.edition,
        "counts": comparison.counts,
        "calls": [{"call": call, "phase": phase, "status": status} for (call, phase), status in comparison.calls.items()],
    }
    stream.write(json.dumps(head, indent=1)[:-2] + ',\n "results": [')
    for number, row in enumerate(device_rows(comparison)):
        plain = {name: _plain(value) for name, value in row.items()}
        stream.write((",\n  " if number else "\n  ") + json.dumps(plain, allow_nan=False))
    stream.write("\n ]\n}\n")


def _plain(value: Cell) -> Cell:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def render_devices(comparison: DeviceComparison, console: Console) -> None:
    counts = comparison.counts
    judged = sum(counts.values()) - counts["skipped"]
    where = f"{comparison.subject_path} against {comparison.reference_path}"
    failed, warned = counts["failed"], counts["warning"]
    style = "bold red" if failed else "bold yellow" if warned else "bold green"
    _print(console, f"{'worse' if failed else 'no worse'}: {where}, {failed} of {judged} results fail, {warned} are warnings", style)
    for pair in comparison.worst[:_MOST_ROWS]:
        _print(console, _line(pair), _STYLES.get(pair.verdict.status, ""))
    if len(comparison.worst) > _MOST_ROWS:
        _print(console, f"and {len(comparison.worst) - _MOST_ROWS} more: --csv", "dim")
    _render_skipped(comparison, console)


def _line(pair: DevicePair) -> str:
    row, verdict = pair.row, pair.verdict
    name = " ".join(part for part in (row.module, row.call, row.phase, row.slot, row.dtype) if part)
    return f"{verdict.status}  {name}  ({verdict.standard}): {verdict.reason}"


def _render_skipped(comparison: DeviceComparison, console: Console) -> None:
    reasons: dict[str, int] = {}
    for pair in comparison.pairs:
        if pair.verdict.status == "skipped":
            reasons[pair.verdict.reason] = reasons.get(pair.verdict.reason, 0) + 1
    for reason, many in sorted(reasons.items(), key=lambda item: -item[1])[:_MOST_ROWS]:
        _print(console, f"{many} skipped: {reason}", "dim")


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(shortened(line, _LONGEST), style=style), soft_wrap=True)
