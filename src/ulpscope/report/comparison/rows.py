# SPDX-License-Identifier: Apache-2.0
"""Turn the pairs of a comparison into rows: one for each slot pair, the same columns in csv, xlsx, parquet and json.

A cell is a plain value, or None where there is none. `remarks` says why a metric has no value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal, TypeAlias, TypeVar

from ulpscope.model import (
    CallRecord,
    Comparison,
    FingerprintMeasurement,
    JudgedCall,
    JudgedSlot,
    Measurement,
    NotMeasured,
    Summary,
    SummaryMeasurement,
    TensorMeasurement,
    TensorRecord,
    Undefined,
)
from ulpscope.model.nouns import dataclass

__all__ = [
    "COLUMNS",
    "Cell",
    "Column",
    "Kind",
    "Row",
    "call_cells",
    "call_rows",
    "in_order",
    "measured_cells",
    "num_rows",
    "pair_rows",
    "slot_cells",
    "source_cells",
    "statistics_cells",
]

Kind: TypeAlias = Literal["text", "int", "float", "bool", "index"]
Cell: TypeAlias = "str | int | float | bool | tuple[int, ...] | None"
Row: TypeAlias = tuple[Cell, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column:
    """A column; an `index` is a shape or a position: a tuple of integers."""

    name: str
    kind: Kind


_KINDS: dict[str, Kind] = {
    "bool": "bool",
    "float": "float",
    "float | None": "float",
    "int": "int",
    "int | None": "int",
    "Metric": "float",
    "tuple[int, ...] | None": "index",
}


def _kinds_of(noun: type) -> dict[str, Kind]:
    return {entry.name: _KINDS[str(entry.type)] for entry in fields(noun)}


_STATISTICS = _kinds_of(Summary)
_METRICS = {name: kind for name, kind in _kinds_of(TensorMeasurement).items() if name != "equal"}
_DIFFERENCES = ("min", "max", "mean", "rms", "num_nan", "num_posinf", "num_neginf")


def _columns() -> Iterator[Column]:
    for name in ("step", "rank", "order"):
        yield Column(name, "int")
    for name in ("level", "phase", "module", "subject_call", "reference_call", "matched_by", "slot", "subject_dtype", "reference_dtype"):
        yield Column(name, "text")
    yield Column("subject_shape", "index")
    yield Column("reference_shape", "index")
    yield Column("verdict", "text")
    yield Column("contribution", "text")
    yield Column("multiple", "float")
    yield Column("rule", "text")
    yield Column("reason", "text")
    yield Column("measured_from", "text")
    yield Column("equal", "bool")
    yield from (Column(name, kind) for name, kind in _METRICS.items())
    yield from (Column(f"difference_{name}", "float") for name in _DIFFERENCES)
    for side in ("subject", "reference"):
        yield from (Column(f"{side}_{name}", kind) for name, kind in _STATISTICS.items())
    for name in ("source", "code", "differences", "remarks"):
        yield Column(name, "text")


COLUMNS: tuple[Column, ...] = tuple(_columns())

_NO_METRICS: Row = (None,) * len(_METRICS)
_NO_DIFFERENCES: Row = (None,) * len(_DIFFERENCES)
_NO_STATISTICS: Row = (None,) * len(_STATISTICS)
_metrics_of = attrgetter(*_METRICS)
_statistics_of = attrgetter(*_STATISTICS)


def pair_rows(comparison: Comparison) -> Iterator[Row]:
    """Yield a row for every slot pair in the order of the calls, step by step; rows of condensed steps come in their places."""
    return in_order(comparison, call_rows, lambda row: row)


def in_order(comparison: Comparison, of_call: Callable[[JudgedCall], Iterable[T]], of_row: Callable[[Row], T]) -> Iterator[T]:
    """Apply `of_call` to each call and, in the places of condensed steps, `of_row` to each of their rows."""
    condensed = comparison.condensed
    steps = deque(condensed.steps if condensed else ())
    for call in comparison.calls:
        while condensed and steps and steps[0] < call.pair.record.step:
            yield from map(of_row, condensed.rows(steps.popleft()))
        yield from of_call(call)
    for step in steps:
        yield from map(of_row, condensed.rows(step)) if condensed else ()


def num_rows(comparison: Comparison) -> int:
    """Count the rows."""
    condensed = comparison.condensed.num_rows if comparison.condensed else 0
    return condensed + sum(max(len(call.slots), 1) for call in comparison.calls)


def call_rows(call: JudgedCall) -> Iterator[Row]:
    """Yield the slot pairs of one call as rows; a call without slots still gets a row."""
    head, tail = call_cells(call), source_cells(call)
    for slot in call.slots:
        yield _slot_row(call, slot, head, tail)
    if not call.slots:
        yield _bare_row(call, head, tail)


def call_cells(call: JudgedCall) -> Row:
    """Return the cells before `slot`."""
    record, pair = call.pair.record, call.pair
    names = (_name(pair.subject), _name(pair.reference))
    return (record.step, record.rank, record.order, record.level, record.phase, record.module, *names, pair.matched_by)


def _name(record: CallRecord | None) -> str | None:
    return None if record is None else str(record.call)


def source_cells(call: JudgedCall) -> Row:
    """Return the cells from `source` to `differences`."""
    frame = call.pair.record.source
    source = f"{frame.file}:{frame.line} in {frame.function}" if frame else None
    differences = "; ".join(f"{item.what}: {item.subject} | {item.reference}" for item in call.differences)
    return (source, frame.code if frame else None, differences or None)


def _slot_row(call: JudgedCall, slot: JudgedSlot, head: Row, tail: Row) -> Row:
    measured, remarks = measured_cells(slot.measurement)
    statistics = (*statistics_cells(slot.pair.subject), *statistics_cells(slot.pair.reference))
    return (*head, *slot_cells(call, slot), *measured, *statistics, *tail, remarks or None)


def slot_cells(call: JudgedCall, slot: JudgedSlot) -> Row:
    """Return the cells from `slot` to `reason`."""
    subject, reference, verdict = slot.pair.subject, slot.pair.reference, slot.verdict
    return (
        str(slot.pair.slot),
        None if subject is None else subject.dtype,
        None if reference is None else reference.dtype,
        None if subject is None else subject.shape,
        None if reference is None else reference.shape,
        verdict.level,
        call.contribution,
        verdict.multiple,
        verdict.rule,
        verdict.reason,
    )


def _bare_row(call: JudgedCall, head: Row, tail: Row) -> Row:
    verdict = (call.level, call.contribution, call.multiple, None, None)
    measured, remarks = measured_cells(NotMeasured("the call has no tensors"))
    return (*head, *(None,) * 5, *verdict, *measured, *_NO_STATISTICS, *_NO_STATISTICS, *tail, remarks)


def statistics_cells(tensor: TensorRecord | None) -> Row:
    return _NO_STATISTICS if tensor is None or tensor.summary is None else _statistics_of(tensor.summary)


def measured_cells(measurement: Measurement) -> tuple[Row, str]:
    """Return the cells from `measured_from` to the last difference, and the remarks."""
    match measurement:
        case TensorMeasurement():
            metrics, remarks = _defined(tuple(_METRICS), _metrics_of(measurement))
            return ("tensors", measurement.equal, *metrics, *_NO_DIFFERENCES), remarks
        case SummaryMeasurement():
            found = measurement.differences
            metrics = tuple(measurement.distance if name == "distance" else None for name in _METRICS)
            differences, remarks = _defined([f"difference_{name}" for name in _DIFFERENCES], [found.get(name) for name in _DIFFERENCES])
            return ("statistics", measurement.equal, *metrics, *differences), remarks
        case FingerprintMeasurement():
            return ("fingerprints", measurement.equal, *_NO_METRICS, *_NO_DIFFERENCES), ""
        case NotMeasured():
            return ("nothing", None, *_NO_METRICS, *_NO_DIFFERENCES), measurement.reason


def _defined(names: Any, values: Any) -> tuple[Row, str]:
    """Return the values with None in the place of undefined ones, and the reasons."""
    missing = [(name, value) for name, value in zip(names, values, strict=True) if type(value) is Undefined]
    if not missing:
        return tuple(values), ""
    kept = tuple(None if type(value) is Undefined else value for value in values)
    return kept, "; ".join(f"{name}: {value.reason}" for name, value in missing)
