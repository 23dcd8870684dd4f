# SPDX-License-Identifier: Apache-2.0
"""Write one HTML file that holds the whole comparison and opens from disk.

The page is built apart (web/) and committed as one file with an empty JSON block; here the block is filled. Nothing of a run
is ever written as markup: every foreign string travels inside that JSON, where `<`, `>` and `&` are spelled `\\u003c` and so on.
Rows travel as columns, and texts that repeat as numbers into a table, so that 100 000 rows stay a few megabytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, get_args

from ulpscope._shell import command_line
from ulpscope.model import (
    Arguments,
    CallRecord,
    Comparison,
    Contribution,
    Finding,
    FingerprintMeasurement,
    Frame,
    JudgedCall,
    JudgedSlot,
    Level,
    MatchedBy,
    Metric,
    Modes,
    NotMeasured,
    Pair,
    Phase,
    RunInfo,
    Summary,
    SummaryMeasurement,
    TensorMeasurement,
    TensorRecord,
    Undefined,
    VerdictLevel,
)
from ulpscope.report.comparison.counts import count_calls, count_states
from ulpscope.report.comparison.coverage import answer_text, gaps_text
from ulpscope.report.replacing import replacing

__all__ = ["page_data", "write_html"]

PAGE_SCHEMA = 1
ROW_LIMIT = 200_000
SLOT_LIMIT = 25_000
TEXT_LIMIT = 400
MARKER = '<script type="application/json" id="comparison"></script>'

Json: TypeAlias = Any

_CODES: dict[str, tuple[str, ...]] = {
    "phase": get_args(Phase),
    "kind": get_args(Level),
    "level": get_args(VerdictLevel),
    "contribution": get_args(Contribution),
    "matched_by": get_args(MatchedBy),
}
_METRICS = (
    "max_abs",
    "max_rel",
    "mean_abs",
    "rms_error",
    "rel_l2",
    "cosine",
    "snr_db",
    "within_1e4",
    "within_1e3",
    "within_5e3",
    "ulp_max",
    "ulp_p50",
    "ulp_p99",
)
_DIGITS = {"cosine": 9}
_COUNTS = ("numel", "num_different", "num_sign_flips", "num_nan_disagree", "num_inf_disagree")
_STATISTICS = ("min", "max", "mean", "rms", "num_nan", "num_posinf", "num_neginf", "num_zero", "num_subnormal")


def write_html(comparison: Comparison, path: Path) -> None:
    """Write the report; what stood at `path` before is replaced only once the new file is whole."""
    page = resources.files("ulpscope.report").joinpath("assets").joinpath("report.html").read_text(encoding="utf-8")
    before, marker, after = page.partition(MARKER)
    assert marker, "the built page has lost its JSON block"
    opening, _, closing = marker.rpartition("<")
    with replacing(path) as temporary:
        temporary.write_text(f"{before}{opening}{_embedded(page_data(comparison))}<{closing}{after}", encoding="utf-8", newline="\n")


def _embedded(data: Json) -> str:
    """Encode JSON that no HTML parser can mistake for markup.

    `<`, `>`, `&` and everything beyond ASCII are escaped, U+2028 and lone surrogates included.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(comparison: Comparison) -> dict[str, Json]:
    """Return exactly the data that the page reads.

    A finite number stays a number; `inf`, `-inf` and `nan` are strings; a value that was not measured is null; an undefined metric is a
    list with one reason.
    """
    texts, stacks, signatures = _Table(), _Table(), _Table()
    levels, condensed = [call.level for call in comparison.calls], comparison.condensed
    rows_of_findings = _rows_of(comparison.findings, comparison.calls)
    kept = _kept_rows(comparison.calls, levels, {row for row in rows_of_findings if row is not None})
    position = {row: place for place, row in enumerate(kept)}
    calls = [comparison.calls[row] for row in kept]
    return {
        "schema": PAGE_SCHEMA,
        "verdict": comparison.verdict,
        "rules": _short(comparison.rules),
        "elapsed_s": _number(comparison.elapsed_s),
        "subject": {"path": _short(comparison.subject_path), "facts": _facts(comparison.subject)},
        "reference": {"path": _short(comparison.reference_path), "facts": _facts(comparison.reference)},
        "findings": [
            _finding(finding, None if row is None else position[row])
            for finding, row in zip(comparison.findings, rows_of_findings, strict=True)
        ],
        "codes": {name: list(codes) for name, codes in _CODES.items()},
        "counts": count_states(comparison),
        "answer": answer_text(comparison, count_calls(comparison)),
        "not_compared": _short(gaps_text(comparison.coverage), 10 * TEXT_LIMIT),
        "num_left_out": len(levels) - len(kept) + (condensed.num_calls if condensed else 0),
        "rows": _rows(calls, texts, stacks, signatures),
        "details": _details(calls, [position[row] for row in rows_of_findings if row is not None], texts),
        "differences": {
            str(row): [[texts.add(_short(d.what)), texts.add(_short(d.subject)), texts.add(_short(d.reference))] for d in call.differences]
            for row, call in enumerate(calls)
            if call.differences
        },
        "signatures": [[[texts.add(part) for part in slot] for slot in signature] for signature in signatures.values],
        "stacks": [
            [[texts.add(_short(f.file)), f.line, texts.add(_short(f.function)), texts.add(_short(f.code))] for f in stack]
            for stack in stacks.values
        ],
        "texts": texts.values,
    }


class _Table:
    """Numbers distinct values in the order they first come."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Hashable, int] = {}

    def add(self, value: Hashable) -> int:
        place = self._places.setdefault(value, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


def _kept_rows(calls: Sequence[JudgedCall], levels: Sequence[VerdictLevel], wanted: set[int]) -> list[int]:
    """Choose the rows to show: all if they fit; otherwise those that findings point at, then the worst, the first ones among equals."""
    if len(levels) <= ROW_LIMIT:
        return list(range(len(levels)))
    badness = [-1 if row in wanted else _badness(call, level) for row, (call, level) in enumerate(zip(calls, levels, strict=True))]
    worst = sorted(range(len(levels)), key=badness.__getitem__)  # a stable sort: the first ones stay in front
    return sorted(worst[: max(ROW_LIMIT, len(wanted))])


def _badness(call: JudgedCall, level: VerdictLevel) -> int:
    if call.contribution == "contributed":
        return 0
    return {"rounding": 2, "same": 3}.get(level, 1)


def _rows_of(findings: Sequence[Finding], calls: Sequence[JudgedCall]) -> list[int | None]:
    """Find the row each finding speaks about: by the call's name, else by its place in execution order."""
    by_name = {(f.rank, f.step, f.phase, f.call): None for f in findings if f.call}
    by_order = {(f.rank, f.step, f.phase, f.order): None for f in findings if f.order is not None}
    rows: dict[Hashable, int] = {}
    for row, call in enumerate(calls):
        record = call.pair.record
        place = (record.rank, record.step, record.phase)
        for key, wanted in (((*place, str(record.call)), by_name), ((*place, record.order), by_order)):
            if key in wanted:
                rows.setdefault(key, row)
    return [rows.get((f.rank, f.step, f.phase, f.call), rows.get((f.rank, f.step, f.phase, f.order))) for f in findings]


def _rows(calls: Sequence[JudgedCall], texts: _Table, stacks: _Table, signatures: _Table) -> dict[str, list[Json]]:
    """Return one entry for each call and phase, in the order of the comparison, as a list for each column."""
    columns: dict[str, list[Json]] = {}
    for call in calls:
        record = call.pair.record
        values = {
            "rank": record.rank,
            "step": record.step,
            "order": record.order,
            "module": texts.add(_short(record.module)),
            "op": texts.add(_short(record.call.op)),
            "index": record.call.index,
            "other": _other_name(call.pair, texts),
            "recompute": int(record.recompute),
            "stack": stacks.add(record.stack),
            "signature": signatures.add(_signature(call)),
            "multiple": _number(call.multiple),
            "distance": _number(_distance(call)),
            "arguments": None if call.level == "same" else texts.add(_call_text(record)),
            "phase": _CODES["phase"].index(record.phase),
            "kind": _CODES["kind"].index(record.level),
            "level": _CODES["level"].index(call.level),
            "contribution": _CODES["contribution"].index(call.contribution),
            "matched_by": _CODES["matched_by"].index(call.pair.matched_by),
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return columns


def _other_name(pair: Pair, texts: _Table) -> int | None:
    """Return the reference's name for the call where it differs; for a call without partner, the side that has it."""
    if pair.subject is None or pair.reference is None:
        return texts.add("subject only" if pair.subject else "reference only")
    if (pair.subject.module, pair.subject.call) == (pair.reference.module, pair.reference.call):
        return None
    return texts.add(_short(pair.reference.name))


def _signature(call: JudgedCall) -> tuple[tuple[str, str, str], ...]:
    """List every slot with its dtype and shape on both sides."""
    return tuple((_short(str(s.pair.slot)), _tensor_text(s.pair.subject), _tensor_text(s.pair.reference)) for s in call.slots)


def _tensor_text(record: TensorRecord | None) -> str:
    return "" if record is None else _short(f"{record.dtype} {list(record.shape)}")


def _distance(call: JudgedCall) -> float | None:
    """Return how far apart the results are, or all slots where a call has no results; None where only the fact is known."""
    slots = [slot for slot in call.slots if slot.pair.slot.is_output] or call.slots
    distances = [distance for slot in slots if (distance := _slot_distance(slot)) is not None]
    if not distances:
        return 0.0 if call.level == "same" and slots else None
    return max(distances)


def _slot_distance(slot: JudgedSlot) -> float | None:
    measurement = slot.measurement
    if isinstance(measurement, NotMeasured):
        return None
    if isinstance(measurement, FingerprintMeasurement):
        return 0.0 if measurement.equal else None
    return 0.0 if measurement.equal else measurement.distance


def _details(calls: Sequence[JudgedCall], first: Iterable[int], texts: _Table) -> dict[str, Json]:
    """Collect metrics and statistics of slots that are not the same: those of findings and of contributed errors first."""
    columns: dict[str, list[Json]] = {}
    num_slots = num_left_out = 0
    for row in _by_interest(calls, first):
        slots = [slot for slot in enumerate(calls[row].slots) if slot[1].verdict.level != "same"]
        num_slots += len(slots)
        if num_slots > SLOT_LIMIT:
            num_left_out += len(slots)
            continue
        for place, slot in slots:
            for name, value in {"row": row, "place": place, **_slot_detail(slot, texts)}.items():
                columns.setdefault(name, []).append(value)
    return {
        "metrics": list(_METRICS),
        "counts": list(_COUNTS),
        "statistics": list(_STATISTICS),
        "num_left_out": num_left_out,
        "slots": columns,
    }


def _by_interest(calls: Sequence[JudgedCall], first: Iterable[int]) -> Iterator[int]:
    named = dict.fromkeys(first)
    contributed = [row for row, call in enumerate(calls) if call.contribution == "contributed"]
    others = [row for row, call in enumerate(calls) if call.level != "same"]
    yield from dict.fromkeys([*named, *contributed, *others])


def _slot_detail(slot: JudgedSlot, texts: _Table) -> dict[str, Json]:
    measurement = slot.measurement
    return {
        "level": _CODES["level"].index(slot.verdict.level),
        "rule": texts.add(_short(slot.verdict.rule)),
        "reason": texts.add(_short(slot.verdict.reason)),
        "multiple": _number(slot.verdict.multiple),
        "distance": _number(_slot_distance(slot)),
        "why_not": texts.add(_short(measurement.reason)) if isinstance(measurement, NotMeasured) else None,
        "metrics": _metrics(measurement) if isinstance(measurement, TensorMeasurement) else None,
        "counts": [getattr(measurement, name) for name in _COUNTS] if isinstance(measurement, TensorMeasurement) else None,
        "worst": _worst(measurement) if isinstance(measurement, TensorMeasurement) else None,
        "changes": _changes(measurement) if isinstance(measurement, SummaryMeasurement) else None,
        "subject": _statistics(slot.pair.subject),
        "reference": _statistics(slot.pair.reference),
    }


def _metrics(measurement: TensorMeasurement) -> list[Json]:
    return [_metric(getattr(measurement, name), _DIGITS.get(name, 4)) for name in _METRICS]


def _worst(measurement: TensorMeasurement) -> list[Json] | None:
    if measurement.worst_index is None:
        return None
    return [list(measurement.worst_index), _number(measurement.worst_subject, 9), _number(measurement.worst_reference, 9)]


def _changes(measurement: SummaryMeasurement) -> list[list[Json]]:
    return [[_short(name), _metric(value)] for name, value in measurement.differences.items()]


def _statistics(record: TensorRecord | None) -> list[Json] | None:
    summary: Summary | None = None if record is None else record.summary
    return None if summary is None else [_number(getattr(summary, name)) for name in _STATISTICS]


def _finding(finding: Finding, row: int | None) -> dict[str, Json]:
    return {
        "level": finding.level,
        "kind": _short(finding.kind),
        "headline": _short(finding.headline),
        "step": finding.step,
        "rank": finding.rank,
        "phase": finding.phase,
        "module": _short(finding.module),
        "call": _short(finding.call),
        "slot": _short(finding.slot),
        "source": None if finding.source is None else _frame(finding.source),
        "stack": [_frame(frame) for frame in finding.stack],
        "evidence": [_short(line) for line in (*finding.evidence, *([f"repro: {finding.repro}"] if finding.repro else []))],
        "next": _short(finding.next, 10 * TEXT_LIMIT),
        "row": row,
        "histograms": [
            {"what": _short(h.what), "edges": [_number(edge) for edge in h.edges], "counts": list(h.counts)} for h in finding.histograms
        ],
    }


def _frame(frame: Frame) -> list[Json]:
    return [_short(frame.file), frame.line, _short(frame.function), _short(frame.code)]


def _facts(info: RunInfo) -> list[tuple[str, str]]:
    """List how a run was made, as labelled texts."""
    facts = [
        ("format", f"{info.format} {info.format_version}"),
        ("recorded by", info.tool),
        ("created", info.created),
        ("command", command_line(*info.command)),
        ("devices", ", ".join(info.devices)),
        ("world size", str(info.world_size)),
        ("seed", "" if info.seed is None else str(info.seed)),
        *((f"version of {name}", version) for name, version in sorted(info.versions.items())),
        *((f"option {name}", _option_text(value)) for name, value in sorted(info.options.items())),
        *((f"environment {name}", value) for name, value in sorted(info.environment.items())),
    ]
    return [(_short(name), _short(text, 5 * TEXT_LIMIT)) for name, text in facts if text]


def _option_text(value: Any) -> str:
    """Write an option as text; an option that was not set becomes an empty text."""
    if value in (None, [], (), {}):
        return ""
    return value if isinstance(value, str) else _value_text(value)


def _call_text(record: CallRecord) -> str:
    """Write the call as in code, with slots in the place of tensors, and the modes around it."""
    arguments = "" if record.arguments is None else f"{record.call.short}({_arguments_text(record.arguments)})"
    return _short(" · ".join(filter(None, (arguments, "" if record.modes is None else _modes_text(record.modes)))))


def _arguments_text(arguments: Arguments) -> str:
    keywords = (f"{name}={_value_text(value)}" for name, value in (arguments.kwargs or {}).items())
    return ", ".join([*map(_value_text, arguments.args), *keywords])


def _value_text(value: Any) -> str:
    if isinstance(value, dict) and len(value) in (1, 2) and next(iter(value)).startswith("$"):
        (marker, content), *_ = value.items()
        return str(value.get("repr") or content) if marker != "$tuple" else f"({', '.join(map(_value_text, content))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value_text, value)) + "]"
    return repr(value)


def _modes_text(modes: Modes) -> str:
    words = [
        f"autocast {modes.autocast}" if modes.autocast else "",
        "" if modes.grad else "no grad",
        "inference" if modes.inference else "",
        "" if modes.training is None else ("training" if modes.training else "evaluation"),
        "deterministic" if modes.deterministic else "",
    ]
    return " · ".join(filter(None, words))


def _metric(value: Metric, digits: int = 4) -> Json:
    return [_short(value.reason)] if isinstance(value, Undefined) else _number(value, digits)


def _number(value: float | None, digits: int = 4) -> Json:
    """Round a number to four digits, plenty for most of the page; an infinity becomes a text, since JSON has none."""
    return value if not value or isinstance(value, int) else _rounded(value, digits)


@lru_cache(maxsize=1 << 14)  # a call's result is the next call's argument, so most numbers come twice
def _rounded(value: float, digits: int) -> Json:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)


def _short(text: str, limit: int = TEXT_LIMIT) -> str:
    """Leave out the middle of a text that is longer than anyone would read."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
