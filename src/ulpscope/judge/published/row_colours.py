# SPDX-License-Identifier: Apache-2.0
"""The rule set of msprobe 1.x for the rows of one call: the word in the column `Result`, and which rows are red or yellow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from ulpscope.judge.published.error_growth import Mode, is_nonfinite
from ulpscope.judge.published.table_limits import table_limit
from ulpscope.model.written import MeasuredPair, WrittenPair

__all__ = ["Colour", "checksum_word", "row_colours", "statistics_word"]

Colour: TypeAlias = Literal["red", "yellow"]


def checksum_word(pair: WrittenPair) -> str:
    """`Pass`, `Different`, or `Nan` where a side has no checksum; the word of ptdbg too."""
    if pair.subject is None or pair.reference is None:
        return "Nan"
    subject, reference = pair.subject.checksum, pair.reference.checksum
    return "Pass" if subject == reference else "Nan" if None in (subject, reference) else "Different"


def statistics_word(row: MeasuredPair) -> str:
    """`Warning` where a statistic differs by more than half, `Unmatched`, or nothing."""
    if not row.is_matched:
        return "Unmatched"
    return "Warning" if any(_is_far(*pair) for pair in row.statistics) else ""


def _is_far(subject: Any, reference: Any) -> bool:
    if not all(isinstance(value, (bool, int, float)) for value in (subject, reference)) or subject == reference:
        return False
    try:
        difference, size = abs(subject - reference), max(abs(subject), abs(reference)) + 1e-10
    except OverflowError:  # an integer that no float holds, beside another number
        return True
    if not math.isfinite(size):
        return not (math.isnan(subject) and math.isnan(reference))
    return bool(difference / size > table_limit("old_warning"))


def row_colours(rows: Sequence[MeasuredPair], mode: Mode) -> list[Colour | None]:
    """Colour each row of one call."""
    if mode == "md5":
        return [None] * len(rows)
    found: list[Colour | None] = ["red" if _is_red_alone(row, mode) else None for row in rows]
    inputs = [row for row in rows if row.value.role in ("input", "parameter") and _has_numbers(row, mode)]
    for at, output in enumerate(rows):
        if output.value.role == "output" and found[at] is None and _has_numbers(output, mode):
            found[at] = _strongest([_pair_colour(entering, output, mode) for entering in inputs])
    return found


def _strongest(colours: Sequence[Colour | None]) -> Colour | None:
    return "red" if "red" in colours else "yellow" if "yellow" in colours else None


def _is_red_alone(row: MeasuredPair, mode: Mode) -> bool:
    if row.pair.subject is None:
        return False
    high, low = row.pair.subject.statistics[:2]
    return is_nonfinite(high) or is_nonfinite(low) or (_largest_difference(row, mode) or 0.0) > table_limit("red_difference")


def _largest_difference(row: MeasuredPair, mode: Mode) -> float | None:
    """Max diff of statistics, MaxAbsErr of tensors."""
    if mode == "statistics":
        difference = row.differences[0]
        return None if difference is None else abs(difference)
    return row.numbers.max_abs if row.numbers else None


def _has_numbers(row: MeasuredPair, mode: Mode) -> bool:
    return row.is_matched and not row.value.is_plain and _largest_difference(row, mode) is not None


def _pair_colour(entering: MeasuredPair, output: MeasuredPair, mode: Mode) -> Colour | None:
    rules: tuple[_Rule, ...] = (_by_thousandths, _by_cosine) if mode == "tensor" else (_by_relative,)
    found = [rule(entering, output) for rule in rules]
    into, out = _largest_difference(entering, mode) or 0.0, _largest_difference(output, mode) or 0.0
    if min(into, out) > table_limit("yellow_difference") and out >= table_limit("yellow_growth") * into:
        found.append("yellow")
    return _strongest(found)


_Rule: TypeAlias = Callable[[MeasuredPair, MeasuredPair], Colour | None]


def _by_thousandths(entering: MeasuredPair, output: MeasuredPair) -> Colour | None:
    into, out = (row.numbers.within_1e3 if row.numbers else None for row in (entering, output))
    if into is None or out is None:
        return None
    if into > table_limit("thousandth_in") and out < table_limit("thousandth_out"):
        return "red"
    return "yellow" if into - out > table_limit("yellow_drop") else None


def _by_cosine(entering: MeasuredPair, output: MeasuredPair) -> Colour | None:
    into, out = (row.numbers.cosine if row.numbers else None for row in (entering, output))
    return "yellow" if into is not None and out is not None and into - out > table_limit("yellow_drop") else None


def _by_relative(entering: MeasuredPair, output: MeasuredPair) -> Colour | None:
    into, out = (_floored_relative(row) for row in (entering, output))
    if out > table_limit("red_relative"):
        return "red"
    return "yellow" if out > table_limit("yellow_relative_out") and into < table_limit("yellow_relative_in") else None


def _floored_relative(row: MeasuredPair) -> float:
    """Max diff over the bench's maximum, which counts as at least 0.01."""
    assert row.pair.reference is not None
    return abs(row.differences[0] or 0.0) / max(table_limit("least_maximum"), float(row.pair.reference.statistics[0]))
