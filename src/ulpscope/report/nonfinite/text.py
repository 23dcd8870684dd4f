# SPDX-License-Identifier: Apache-2.0
"""Show where inf and NaN began, on a terminal and as JSON: the first maker first, then the rest, then the near misses."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from ulpscope.model import Frame, NearMiss, NonFiniteEvent, NonFiniteReport
from ulpscope.report.escaping import shortened
from ulpscope.report.replacing import replacing

__all__ = ["NONFINITE_SCHEMA", "dump_nonfinite", "headroom_text", "render_nonfinite", "verdict_line", "write_nonfinite_json"]

NONFINITE_SCHEMA = "ulpscope.nonfinite/1"
_MOST_FAULTS = 3
_MOST_NOTES = 5
_MOST_MISSES = 10
_LONGEST_LINE = 400


def render_nonfinite(report: NonFiniteReport, console: Console) -> None:
    """Print the verdict, the faults with their evidence, the rest in a line each, and the near misses in a table."""
    _print(console, verdict_line(report), "bold red" if report.first else "bold green")
    for event in report.faults[:_MOST_FAULTS]:
        _print(console, "")
        _render_event(event, console)
    _more(console, len(report.faults) - _MOST_FAULTS, "fault")
    others = [event for event in report.events if event.level == "note"]
    if others:
        _print(console, "")
    for event in others[:_MOST_NOTES]:
        _print(console, f"{event.kind}: {event.headline}", "yellow")
        for line in filter(None, (event.cause, event.remedy)):
            _print(console, f"  {line}", "dim")
    _more(console, len(others) - _MOST_NOTES, "note")
    _render_misses(report.near_misses, console)
    for note in report.notes:
        _print(console, f"note: {note}", "dim")


def verdict_line(report: NonFiniteReport) -> str:
    """Say in one sentence which call made the first non-finite value, or that none did harm."""
    first = report.first
    if first is not None:
        return f"first non-finite value: {first.headline}"
    harmless = f"; {len(report.events)} harmless" if report.events else ""
    what = f"{report.num_calls} recorded calls" if "watch" not in report.info.options else "the hunted run"
    return f"nothing non-finite did harm in {report.path}: {what}{harmless}"


def _render_event(event: NonFiniteEvent, console: Console) -> None:
    _print(console, event.headline, "bold")
    if event.cause:
        _print(console, f"  why: {event.cause}")
    if event.remedy:
        _print(console, f"  what would help: {event.remedy}")
    for line in event.evidence:
        _print(console, f"  {line}")
    if event.source is not None:
        _print(console, f"  {_place(event.source)}", "cyan")
    if event.next:
        _print(console, f"  next: {event.next}", "dim")


def _render_misses(misses: tuple[NearMiss, ...], console: Console) -> None:
    if not misses:
        return
    _print(console, "")
    _print(console, "near misses: how far the largest value was from the end of its dtype", "bold")
    rows = [(_where(miss), miss.dtype, f"{miss.largest:.4g}", headroom_text(miss), _sunk(miss)) for miss in misses[:_MOST_MISSES]]
    headings = ("call", "dtype", "largest", "headroom", "sunk")
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        _print(console, "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    _more(console, len(misses) - _MOST_MISSES, "near miss", "near misses")


def headroom_text(miss: NearMiss) -> str:
    """Say how many times larger the largest value could be."""
    return f"{miss.headroom:.3g}x" if miss.headroom < 1e6 else f"2^{int(math.log2(miss.headroom))}"


def _sunk(miss: NearMiss) -> str:
    shares = {"subnormal": miss.subnormal_share, "to zero": miss.zero_share}
    return ", ".join(f"{share:.2%} {what}" for what, share in shares.items() if share)


def _where(miss: NearMiss) -> str:
    return f"{miss.module + '  ' if miss.module else ''}{miss.call} {miss.phase}"


def _more(console: Console, number: int, one: str, many: str = "") -> None:
    if number > 0:
        _print(console, f"and {number} more {one if number == 1 else many or one + 's'}: --json", "dim")


def _place(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}{f': {frame.code.strip()}' if frame.code.strip() else ''}"


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(shortened(line, _LONGEST_LINE), style=style), soft_wrap=True, highlight=False)


def write_nonfinite_json(report: NonFiniteReport, path: Path) -> None:
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as stream:
        dump_nonfinite(report, stream)


def dump_nonfinite(report: NonFiniteReport, stream: TextIO) -> None:
    """Write the whole report as JSON; NaN and infinities are the strings "NaN", "Infinity" and "-Infinity"."""
    data = {
        "schema": NONFINITE_SCHEMA,
        "verdict": "nonfinite" if report.first else "finite",
        "path": report.path,
        "num_calls": report.num_calls,
        "num_unknown": report.num_unknown,
        "events": [asdict(event) for event in report.events],
        "near_misses": [asdict(miss) for miss in report.near_misses],
        "notes": list(report.notes),
    }
    json.dump(_plain(data), stream, ensure_ascii=True, allow_nan=False, indent=1)
    stream.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
