# SPDX-License-Identifier: Apache-2.0
"""The rule set of msprobe 26.x for the rows of one call: pass, warning or error, by whether the call makes an error larger.

It does not ask how large an error may be. What has no partner, and tensors whose NaN stand at different places, are never "pass".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from ulpscope.judge.published.table_limits import table_limit
from ulpscope.model.written import MeasuredPair

__all__ = ["Level", "Mode", "RowVerdict", "is_nonfinite", "no_partner", "row_verdicts"]

Mode: TypeAlias = Literal["tensor", "statistics", "md5"]
Level: TypeAlias = Literal["pass", "warning", "error"]
RowVerdict: TypeAlias = tuple[Level, list[str]]
_Finding: TypeAlias = tuple[int, Level, str]
_Rule: TypeAlias = Callable[[Sequence[MeasuredPair]], Iterator[_Finding]]

_NORM = 3
_IGNORED = frozenset({"numpy", "to", "__setitem__"})
_IGNORED_STARTS = ("empty", "new_empty")
_IGNORED_INPUTS = frozenset({"_reduce_scatter_base", "_all_gather_base", "all_to_all_single", "batch_isend_irecv"})


def row_verdicts(rows: Sequence[MeasuredPair], call: str, mode: Mode) -> list[RowVerdict]:
    """Judge each row of one call, with why."""
    found: list[RowVerdict] = [("pass", []) for _ in rows]
    operation = _operation(call)
    is_ignored = operation in _IGNORED or operation.startswith(_IGNORED_STARTS)
    ranking: tuple[Level, ...] = ("pass", "warning", "error")
    for rule in (_unmatched,) if is_ignored else _RULES[mode]:
        for at, level, text in rule(rows):
            if operation in _IGNORED_INPUTS and (rows[at].value.role != "output" or rule in _FROM_INPUTS):
                continue
            found[at] = (max(found[at][0], level, key=ranking.index), [*found[at][1], f"{level}: {text}"])
    return found


def _operation(call: str) -> str:
    parts = call.split(".")
    return parts[1] if len(parts) > 2 and parts[0] not in ("Module", "Cell") else ""


def no_partner(row: MeasuredPair) -> str:
    """Say why nothing could be compared; empty where both sides have the row."""
    if row.is_matched:
        return ""
    return "No bench data matched." if row.pair.reference is None else "No NPU data matched."


def is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _unmatched(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        if not row.is_matched:
            yield at, "warning", f"{no_partner(row)} It was not compared."


def _nonfinite(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        (high, low), (other_high, other_low) = ((pair[side] for pair in row.statistics[:2]) for side in (0, 1))
        if row.pair.subject and (is_nonfinite(high) or is_nonfinite(low)) and not (is_nonfinite(other_high) or is_nonfinite(other_low)):
            yield at, "error", "the maximum or minimum of NPU is NaN or infinite, that of the bench is not"


def _described(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    """What the dumps say of two rows: requires_grad, plain arguments, dtypes and shapes."""
    for at, row in enumerate(rows):
        subject, reference = row.pair.subject, row.pair.reference
        if subject is None or reference is None:
            continue
        if None not in (subject.requires_grad, reference.requires_grad) and subject.requires_grad != reference.requires_grad:
            yield at, "error", "requires_grad of NPU and bench differ"
        if subject.is_plain and reference.is_plain and subject.statistics[0] != reference.statistics[0]:
            yield at, "error", "the plain argument of NPU and bench differs"
        if subject.dtype != reference.dtype:
            yield at, "error", "the dtypes of NPU and bench differ"
        if subject.shape != reference.shape:
            yield at, "error", "the shapes of NPU and bench differ"


def _unmeasured(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        if row.numbers is None or not row.is_matched:
            continue
        if row.numbers.disagreeing:
            yield at, "error", f"NaN or infinities disagree at {row.numbers.disagreeing} positions."
        elif row.numbers.failure:
            yield at, "warning", row.numbers.failure


def _thousandths(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    most, least = table_limit("thousandth_in"), table_limit("thousandth_out")
    first = _first_output(rows)
    inputs, outputs = (_smallest(rows, "within_1e3", is_input) for is_input in (True, False))
    if first is not None and inputs > most and outputs < least:
        yield first, "error", f"the One Thousandth Err Ratio of the inputs is above {most}, that of the output below {least}"


def _cosines(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    least, drop = table_limit("cosine_in"), table_limit("cosine_drop")
    first = _first_output(rows)
    inputs, outputs = (_smallest(rows, "cosine", is_input) for is_input in (True, False))
    if first is not None and inputs > least and inputs - outputs > drop:
        yield first, "warning", f"the Cosine of the inputs is above {least}, that of the output lower by more than {drop}"


def _norms(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    most = table_limit("norm_out")
    if _largest_norm(rows, is_input=True) < table_limit("norm_in"):
        for at, row in enumerate(rows):
            if row.value.role == "output" and (row.relative[_NORM] or 0.0) > most:
                yield at, "error", f"the NormRelativeErr of the output is above {most}"


def _norm_growth(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    most = table_limit("norm_growth")
    first = _first_output(rows)
    inputs, outputs = _largest_norm(rows, is_input=True), _largest_norm(rows, is_input=False)
    grows = outputs > table_limit("norm_from_nothing") if inputs == 0 else math.isfinite(inputs) and outputs / inputs > most
    if first is not None and grows:
        yield first, "warning", f"the NormRelativeErr of the output is more than {most:g} times that of the inputs"


def _checksums(rows: Sequence[MeasuredPair]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        subject, reference = row.pair.subject, row.pair.reference
        if subject is None or reference is None or subject.checksum == reference.checksum:
            continue
        if subject.checksum is None or reference.checksum is None:
            yield at, "warning", "only one side has a checksum"
        else:
            yield at, "error", "the checksums of NPU and bench differ"


def _first_output(rows: Sequence[MeasuredPair]) -> int | None:
    return next((at for at, row in enumerate(rows) if row.value.role == "output" and row.pair.subject is not None), None)


def _smallest(rows: Sequence[MeasuredPair], number: Literal["within_1e3", "cosine"], is_input: bool) -> float:
    """The smallest number of the inputs and parameters, or of the outputs; 1 where there is none."""
    found = (getattr(row.numbers, number) for row in rows if row.numbers and _is_side(row, is_input))
    return min((value for value in found if value is not None), default=1.0)


def _largest_norm(rows: Sequence[MeasuredPair], is_input: bool) -> float:
    found = (row.relative[_NORM] for row in rows if _is_side(row, is_input) and not row.value.is_plain)
    return max((value for value in found if value is not None), default=0.0)


def _is_side(row: MeasuredPair, is_input: bool) -> bool:
    return row.value.role in ("input", "parameter") if is_input else row.value.role == "output"


_FROM_INPUTS: tuple[_Rule, ...] = (_thousandths, _cosines, _norms, _norm_growth)
_RULES: dict[Mode, tuple[_Rule, ...]] = {
    "tensor": (_unmatched, _nonfinite, _thousandths, _described, _unmeasured, _cosines),
    "statistics": (_unmatched, _nonfinite, _norms, _described, _norm_growth),
    "md5": (_unmatched, _checksums, _described),
}
