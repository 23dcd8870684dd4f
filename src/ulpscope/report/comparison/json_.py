# SPDX-License-Identifier: Apache-2.0
"""Write the comparison, or the contents of a run, as JSON (docs/report-json.md).

JSON has no word for NaN and infinities, and readers silently turn a value that is not a number into null. So they are the strings "NaN",
"Infinity" and "-Infinity" in the number's place; null and absent both mean that there is no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ulpscope.model import CallRecord, Comparison, Finding, Frame, Run, RunInfo, TensorRecord
from ulpscope.report.comparison.counts import count_calls
from ulpscope.report.comparison.coverage import coverage_data
from ulpscope.report.comparison.json_pairs import PairLines
from ulpscope.report.comparison.rows import COLUMNS, num_rows
from ulpscope.report.json_text import text
from ulpscope.report.replacing import replacing

__all__ = ["COMPARISON_SCHEMA", "RUN_SCHEMA", "dump_comparison", "dump_run", "write_json"]

COMPARISON_SCHEMA = "ulpscope.comparison/1"
RUN_SCHEMA = "ulpscope.run/1"
_ROWS_INSIDE = 20_000
_BUFFER = 1 << 18


def write_json(comparison: Comparison, path: Path, *, rows_inside: int = _ROWS_INSIDE, lines: PairLines | None = None) -> None:
    """Write the comparison; more than `rows_inside` pairs go to a csv beside it, and the JSON names that file.

    `lines` were told of the calls while they were judged.
    """
    many = num_rows(comparison)
    table = None
    if many > rows_inside:
        from ulpscope.report.comparison.table import write_csv  # rarely needed

        table = path.with_name(f"{path.stem}.pairs.csv")
        write_csv(comparison, table)
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", buffering=_BUFFER) as stream:
        dump_comparison(comparison, stream, table=None if table is None else {"table": table.name, "rows": many}, lines=lines)


def dump_comparison(comparison: Comparison, stream: TextIO, *, table: dict[str, Any] | None = None, lines: PairLines | None = None) -> None:
    """Write the comparison to an open file: every pair, or with `table` a reference to the table that holds the pairs."""
    head = {
        "schema": COMPARISON_SCHEMA,
        "verdict": comparison.verdict,
        "rules": comparison.rules,
        "elapsed_s": comparison.elapsed_s,
        "findings": [_finding(finding) for finding in comparison.findings],
        "counts": asdict(count_calls(comparison)),
        "coverage": coverage_data(comparison.coverage),
        "columns": [column.name for column in COLUMNS],
        "subject": _run_info(comparison.subject, comparison.subject_path),
        "reference": _run_info(comparison.reference, comparison.reference_path),
    }
    _dump(head, "pairs", table or (lines or PairLines()).lines(comparison), stream)


def dump_run(run: Run, records: Iterable[CallRecord], stream: TextIO) -> None:
    """Write how a run was made, what its capture could not do, and the given records."""
    head = {
        "schema": RUN_SCHEMA,
        "run": _run_info(run.info, str(run.path)),
        "ranks": [
            {"rank": rank, "steps": _steps(run, rank), "ledger": [asdict(entry) for entry in run.ledger(rank)]} for rank in run.ranks()
        ],
    }
    _dump(head, "records", map(text, map(_record, records)), stream)


def _steps(run: Run, rank: int) -> list[dict[str, Any]]:
    return [{"step": step, "complete": run.is_complete(rank, step)} for step in run.steps(rank)]


def _dump(head: dict[str, Any], last: str, items: dict[str, Any] | Iterator[str], stream: TextIO) -> None:
    """Write one key a line; the items under `last` are written as they come, one a line."""
    stream.write("{\n")
    for key, value in head.items():
        stream.write(f"{text(key)}: {text(value)},\n")
    stream.write(f"{text(last)}: ")
    if isinstance(items, dict):
        stream.write(text(items))
    else:
        _dump_list(items, stream)
    stream.write("\n}\n")


def _dump_list(items: Iterator[str], stream: TextIO) -> None:
    stream.write("[")
    for place, item in enumerate(items):
        stream.write(f",\n{item}" if place else f"\n{item}")
    stream.write("\n]")


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "level": finding.level,
        "kind": finding.kind,
        "headline": finding.headline,
        "step": finding.step,
        "rank": finding.rank,
        "phase": finding.phase,
        "module": finding.module,
        "call": finding.call,
        "slot": finding.slot,
        "order": finding.order,
        "source": _frame(finding.source),
        "evidence": finding.evidence,
        "next": finding.next,
        "stack": [_frame(frame) for frame in finding.stack],
        "histograms": [asdict(histogram) for histogram in finding.histograms],
        "repro": finding.repro,
    }


def _frame(frame: Frame | None) -> dict[str, Any] | None:
    return None if frame is None else asdict(frame)


def _run_info(info: RunInfo, path: str) -> dict[str, Any]:
    return {"path": path} | asdict(info)


def _record(record: CallRecord) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "step": record.step,
        "order": record.order,
        "level": record.level,
        "phase": record.phase,
        "module": record.module,
        "call": str(record.call),
        "parent": record.parent,
        "recompute": record.recompute,
        "arguments": record.arguments and asdict(record.arguments),
        "modes": record.modes and asdict(record.modes),
        "stack": [_frame(frame) for frame in record.stack],
        "slots": [_tensor(tensor) for tensor in record.slots],
    }


def _tensor(tensor: TensorRecord) -> dict[str, Any]:
    return asdict(tensor) | {"slot": str(tensor.slot)}
