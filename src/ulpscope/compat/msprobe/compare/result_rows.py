# SPDX-License-Identifier: Apache-2.0
"""Fill the result files of msprobe, 1.x and 26.x: their columns and each cell. `NPU` is the target, `Bench` the golden side."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ulpscope.compat.ptdbg.compare.columns import NAN, cosine_word, message_of
from ulpscope.compat.sheets import Cell
from ulpscope.judge.published.cosine_rule import accuracy_word
from ulpscope.judge.published.error_growth import Mode, no_partner, row_verdicts
from ulpscope.judge.published.row_colours import Colour, checksum_word, row_colours, statistics_word
from ulpscope.model.written import NOT_THERE, MeasuredPair, OldNumbers, WrittenCallPair, WrittenValue

__all__ = ["Cell", "Edition", "ResultRow", "columns", "is_good", "number_cells", "result_rows"]

Edition: TypeAlias = Literal["1.x", "26.x"]

_NAMES = ("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape")
_REQUIRES_GRAD = ("NPU Requires_grad", "Bench Requires_grad")
_STATISTICS = ("max", "min", "mean", "l2norm")
_EIGHT = tuple(f"{side} {statistic}" for side in ("NPU", "Bench") for statistic in _STATISTICS)
_DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
_RELATIVE = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
_ERRORS = ("MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")
_CHECKSUMS = ("NPU MD5", "BENCH MD5")
_END = ("Requires_grad Consistent", "Result", "Err_message")

_COLUMNS: dict[tuple[Edition, Mode], tuple[str, ...]] = {
    ("1.x", "tensor"): (*_NAMES, "Cosine", *_ERRORS, *_EIGHT, "Accuracy Reached or Not", "Err_message"),
    ("1.x", "statistics"): (*_NAMES, *_DIFFERENCES, *_RELATIVE, *_EIGHT, "Result", "Err_message"),
    ("1.x", "md5"): (*_NAMES, *_CHECKSUMS, "Result"),
    ("26.x", "tensor"): (*_NAMES, *_REQUIRES_GRAD, "Cosine", "EucDist", *_ERRORS, *_EIGHT, *_END),
    ("26.x", "statistics"): (*_NAMES, *_REQUIRES_GRAD, *_DIFFERENCES, *_RELATIVE, *_EIGHT, *_END),
    ("26.x", "md5"): (*_NAMES, *_REQUIRES_GRAD, *_CHECKSUMS, *_END),
}
_STACK, _DATA_NAME = "NPU_Stack_Info", "Data_name"
_UNSUPPORTED = "unsupported"
_LOOK_AGAIN = "Need double check api accuracy."


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One line of a result: its cells in the order of the columns, the word of its verdict, and its colour (None: not coloured)."""

    cells: tuple[Cell, ...]
    verdict: str
    colour: Colour | None = None


def columns(edition: Edition, mode: Mode, *, stacks: bool) -> tuple[str, ...]:
    """Return the headings of a result file."""
    extra = (*((_STACK,) if stacks else ()), *((_DATA_NAME,) if (edition, mode) == ("26.x", "tensor") else ()))
    return (*_COLUMNS[edition, mode], *extra)


def result_rows(call: WrittenCallPair, rows: Sequence[MeasuredPair], edition: Edition, mode: Mode, *, stacks: bool) -> Iterator[ResultRow]:
    """Yield the lines of one call."""
    stack = call.subject.stack if call.subject else ""
    judge = _old_endings if edition == "1.x" else _new_endings
    for at, (row, ending) in enumerate(zip(rows, judge(call, rows, mode), strict=True)):
        cells = [*_names(row), *(_requires_grad(row) if edition == "26.x" else ()), *_MIDDLES[mode](row, edition), *ending.cells]
        if stacks:
            cells.append(stack if at == 0 and stack else NOT_THERE if edition == "26.x" else "None")
        if (edition, mode) == ("26.x", "tensor"):
            cells.append(str([(side.file if side else None) or "-1" for side in (row.pair.subject, row.pair.reference)]))
        yield ResultRow(tuple(cells), ending.verdict, ending.colour)


def _names(row: MeasuredPair) -> list[Cell]:
    sides = row.pair.subject, row.pair.reference
    return [getattr(side, what) if side else NOT_THERE for what in ("name", "dtype", "shape") for side in sides]


def _requires_grad(row: MeasuredPair) -> list[Cell]:
    return [_or_nothing(side.requires_grad if side else None) for side in (row.pair.subject, row.pair.reference)]


def _or_nothing(value: Cell) -> Cell:
    return NOT_THERE if value is None else value


def _eight(row: MeasuredPair) -> list[Cell]:
    return [cell for side in (row.pair.subject, row.pair.reference) for cell in _statistics(side)]


def _statistics(side: WrittenValue | None) -> list[Cell]:
    if side is None:
        return [NOT_THERE] * 4
    return ["None" if value is None else _shown(value) for value in side.statistics]


def _shown(value: Cell) -> Cell:
    """Return a number as it is; NaN and infinities become the words that a table can hold."""
    if type(value) is float and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


# --- the middle of a row: its numbers


def _tensor_middle(row: MeasuredPair, edition: Edition) -> list[Cell]:
    found = row.numbers
    if found is None:
        cells: list[Cell] = [_UNSUPPORTED if row.is_matched else NOT_THERE] * 6
        old_cosine: Cell = NAN
    else:
        cells = number_cells(found)
        old_cosine = 1.0 if found.old_cosine == 1.0 else cosine_word(found) if found.cosine is None else found.cosine
    return [*map(_shown, cells if edition == "26.x" else (old_cosine, *cells[2:])), *_eight(row)]


def number_cells(found: OldNumbers) -> list[Cell]:
    """Return Cosine, distance, MaxAbsErr, MaxRelativeErr and the two shares, or the word for a missing number."""
    word = _UNSUPPORTED if found.failure else cosine_word(found)
    numbers = (found.cosine, found.euclidean, found.max_abs, found.max_rel, found.within_1e3, found.within_5e3)
    return [word if number is None else number for number in numbers]


def _statistics_middle(row: MeasuredPair, edition: Edition) -> list[Cell]:
    if not row.is_matched:
        return [NOT_THERE] * 8 + _eight(row)
    if row.value.is_plain:
        same: Cell = 0 if row.statistics[0][0] == row.statistics[0][1] else "Diff"
        if same == "Diff" and row.differences[0] is None:
            return ["Diff"] * 8 + _eight(row)
    differences = [_difference(row, at) for at in range(4)]
    return [*differences, *(_percent(row, at, edition) for at in range(4)), *_eight(row)]


def _difference(row: MeasuredPair, at: int) -> Cell:
    target, golden = row.statistics[at]
    found = row.differences[at]
    if found is not None:
        return 0 if found == 0 else _shown(found)
    return 0 if (target is None and golden is None) or target == golden else NAN


def _percent(row: MeasuredPair, at: int, edition: Edition) -> Cell:
    found = row.relative[at]
    if found is None:
        target, golden = row.statistics[at]
        return 0 if target == golden else NAN
    if found == 0:
        return 0 if edition == "26.x" else "0.0%"
    if math.isinf(found):
        return "inf" if edition == "26.x" else NOT_THERE
    return f"{found * 100}%"


def _checksum_middle(row: MeasuredPair, edition: Edition) -> list[Cell]:
    return [_or_nothing(side.checksum if side else None) for side in (row.pair.subject, row.pair.reference)]


_MIDDLES: dict[Mode, Callable[[MeasuredPair, Edition], list[Cell]]] = {
    "tensor": _tensor_middle,
    "statistics": _statistics_middle,
    "md5": _checksum_middle,
}


# --- the end of a row: what it means


def _new_endings(call: WrittenCallPair, rows: Sequence[MeasuredPair], mode: Mode) -> Iterator[ResultRow]:
    for row, (level, why) in zip(rows, row_verdicts(rows, call.name, mode), strict=True):
        subject, reference = (side.requires_grad if side else None for side in (row.pair.subject, row.pair.reference))
        yield ResultRow((row.is_matched and subject == reference, level, json.dumps(why, ensure_ascii=False)), level)


def _old_endings(call: WrittenCallPair, rows: Sequence[MeasuredPair], mode: Mode) -> Iterator[ResultRow]:
    for row, colour in zip(rows, row_colours(rows, mode), strict=True):
        if mode == "md5":
            word = checksum_word(row.pair)
            yield ResultRow((word,), word)
        elif mode == "statistics":
            word = statistics_word(row)
            yield ResultRow((word, no_partner(row) or (_LOOK_AGAIN if word else "")), word, colour)
        else:
            word, message = _old_accuracy(row)
            yield ResultRow((word, message), word, colour)


def _old_accuracy(row: MeasuredPair) -> tuple[str, str]:
    if not row.is_matched:
        return "Unmatched", no_partner(row)
    if row.numbers is None:
        subject, reference = row.statistics[0]
        return ("No", "The plain argument of NPU and bench differs.") if row.value.is_plain and subject != reference else (NAN, "")
    return accuracy_word(row.numbers), message_of(row.numbers)


def is_good(value: Any) -> bool:
    """Tell whether the word of a row means that nothing is wrong with it."""
    return value in ("pass", "Pass", "Yes", "")
