# SPDX-License-Identifier: Apache-2.0
"""Which rows of a result are bad: `Result` of 26.x (pass, warning, error), and the colours and `Result` of 1.x, by their documented limits.

Both ask whether a call makes an error larger, not how large an error may be; our own finding is printed beside them for that. What has no
partner, and tensors whose NaN stand at different places, are never "pass".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

from ulpscope.compat.msprobe.compare.numbers import Compared

__all__ = ["Colour", "Level", "Mode", "Verdict", "colours", "old_result", "verdicts"]

Mode: TypeAlias = Literal["tensor", "statistics", "md5"]
Level: TypeAlias = Literal["pass", "warning", "error"]
Colour: TypeAlias = Literal["red", "yellow"]
Verdict: TypeAlias = tuple[Level, list[str]]
_Finding: TypeAlias = tuple[int, Level, str]
_Rule: TypeAlias = Callable[[Sequence[Compared]], Iterator[_Finding]]

# The documents of 26.x say 0.6 for the outputs; its code looks for 0.1 and prints 0.6.
THOUSANDTH_IN, THOUSANDTH_OUT = 0.9, 0.6
COSINE_IN, COSINE_DROP = 0.9, 0.1
NORM_IN, NORM_OUT = 0.1, 0.5
NORM_GROWTH, NORM_FROM_NOTHING = 10.0, 0.1

OLD_WARNING = 0.5
RED_DIFFERENCE = 1e10
RED_RELATIVE, RED_FLOOR = 0.5, 0.01
YELLOW_RELATIVE_OUT, YELLOW_RELATIVE_IN = 0.1, 0.01
YELLOW_DIFFERENCE, YELLOW_GROWTH = 1.0, 10.0
YELLOW_DROP = 0.1

_NORM = 3
_IGNORED = frozenset({"numpy", "to", "__setitem__"})
_IGNORED_STARTS = ("empty", "new_empty")
_IGNORED_INPUTS = frozenset({"_reduce_scatter_base", "_all_gather_base", "all_to_all_single", "batch_isend_irecv"})


# --- 26.x


def verdicts(rows: Sequence[Compared], call: str, mode: Mode) -> list[Verdict]:
    """The result of each row of one call, with why."""
    found: list[Verdict] = [("pass", []) for _ in rows]
    operation = _operation(call)
    if operation in _IGNORED or operation.startswith(_IGNORED_STARTS):
        rules: tuple[_Rule, ...] = (_unmatched,)
    else:
        rules = _RULES[mode]
    ranking: tuple[Level, ...] = ("pass", "warning", "error")
    for rule in rules:
        for at, level, text in rule(rows):
            if operation in _IGNORED_INPUTS and (rows[at].role != "output" or rule in _FROM_INPUTS):
                continue
            found[at] = (max(found[at][0], level, key=ranking.index), [*found[at][1], f"{level}: {text}"])
    return found


def _operation(call: str) -> str:
    parts = call.split(".")
    return parts[1] if len(parts) > 2 and parts[0] not in ("Module", "Cell") else ""


def _unmatched(rows: Sequence[Compared]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        if not row.is_matched:
            yield at, "warning", f"{row.no_partner} It was not compared."


def _nonfinite(rows: Sequence[Compared]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        (high, low), (other_high, other_low) = ((pair[side] for pair in row.statistics[:2]) for side in (0, 1))
        if row.pair.target and (_is_nonfinite(high) or _is_nonfinite(low)) and not (_is_nonfinite(other_high) or _is_nonfinite(other_low)):
            yield at, "error", "the maximum or minimum of NPU is NaN or infinite, that of the bench is not"


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _described(rows: Sequence[Compared]) -> Iterator[_Finding]:
    """What the dumps say of two rows: requires_grad, plain arguments, dtypes and shapes."""
    for at, row in enumerate(rows):
        target, golden = row.pair.target, row.pair.golden
        if target is None or golden is None:
            continue
        if None not in (target.requires_grad, golden.requires_grad) and target.requires_grad != golden.requires_grad:
            yield at, "error", "requires_grad of NPU and bench differ"
        if target.is_plain and golden.is_plain and target.statistics[0] != golden.statistics[0]:
            yield at, "error", "the plain argument of NPU and bench differs"
        if target.dtype != golden.dtype:
            yield at, "error", "the dtypes of NPU and bench differ"
        if target.shape != golden.shape:
            yield at, "error", "the shapes of NPU and bench differ"


def _unmeasured(rows: Sequence[Compared]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        if row.numbers is None or not row.is_matched:
            continue
        if row.numbers.disagrees:
            yield at, "error", row.numbers.old.message
        elif row.numbers.old.cosine == "Nan" and isinstance(row.numbers.max_abs, str):
            yield at, "warning", row.numbers.old.message


def _thousandths(rows: Sequence[Compared]) -> Iterator[_Finding]:
    first = _first_output(rows)
    inputs, outputs = (_smallest(rows, lambda row: row.numbers and row.numbers.within_1e3, is_input) for is_input in (True, False))
    if first is not None and inputs > THOUSANDTH_IN and outputs < THOUSANDTH_OUT:
        yield (
            first,
            "error",
            f"the One Thousandth Err Ratio of the inputs is above {THOUSANDTH_IN}, that of the output below {THOUSANDTH_OUT}",
        )


def _cosines(rows: Sequence[Compared]) -> Iterator[_Finding]:
    first = _first_output(rows)
    inputs, outputs = (_smallest(rows, lambda row: row.numbers and row.numbers.cosine, is_input) for is_input in (True, False))
    if first is not None and inputs > COSINE_IN and inputs - outputs > COSINE_DROP:
        yield first, "warning", f"the Cosine of the inputs is above {COSINE_IN}, that of the output lower by more than {COSINE_DROP}"


def _norms(rows: Sequence[Compared]) -> Iterator[_Finding]:
    if _largest_norm(rows, is_input=True) < NORM_IN:
        for at, row in enumerate(rows):
            if row.role == "output" and (row.relative[_NORM] or 0.0) > NORM_OUT:
                yield at, "error", f"the NormRelativeErr of the output is above {NORM_OUT}"


def _norm_growth(rows: Sequence[Compared]) -> Iterator[_Finding]:
    first = _first_output(rows)
    inputs, outputs = _largest_norm(rows, is_input=True), _largest_norm(rows, is_input=False)
    grows = outputs > NORM_FROM_NOTHING if inputs == 0 else outputs / inputs > NORM_GROWTH if math.isfinite(inputs) else False
    if first is not None and grows:
        yield first, "warning", f"the NormRelativeErr of the output is more than {NORM_GROWTH:g} times that of the inputs"


def _checksums(rows: Sequence[Compared]) -> Iterator[_Finding]:
    for at, row in enumerate(rows):
        target, golden = row.pair.target, row.pair.golden
        if target is None or golden is None or target.checksum == golden.checksum:
            continue
        if target.checksum is None or golden.checksum is None:
            yield at, "warning", "only one side has a checksum"
        else:
            yield at, "error", "the checksums of NPU and bench differ"


def _first_output(rows: Sequence[Compared]) -> int | None:
    return next((at for at, row in enumerate(rows) if row.role == "output" and row.pair.target is not None), None)


def _smallest(rows: Sequence[Compared], number: Callable[[Compared], Any], is_input: bool) -> float:
    """The smallest number of the inputs and parameters, or of the outputs; 1 where there is none."""
    found = (number(row) for row in rows if _is_side(row, is_input))
    return min((value for value in found if isinstance(value, float)), default=1.0)


def _largest_norm(rows: Sequence[Compared], is_input: bool) -> float:
    found = (row.relative[_NORM] for row in rows if _is_side(row, is_input) and not row.row.is_plain)
    return max((value for value in found if value is not None), default=0.0)


def _is_side(row: Compared, is_input: bool) -> bool:
    return row.role in ("input", "parameter") if is_input else row.role == "output"


_FROM_INPUTS: tuple[_Rule, ...] = (_thousandths, _cosines, _norms, _norm_growth)
_RULES: dict[Mode, tuple[_Rule, ...]] = {
    "tensor": (_unmatched, _nonfinite, _thousandths, _described, _unmeasured, _cosines),
    "statistics": (_unmatched, _nonfinite, _norms, _described, _norm_growth),
    "md5": (_unmatched, _checksums, _described),
}


# --- 1.x


def old_result(row: Compared, mode: Mode) -> str:
    """The word of 1.x for a row: `Warning` or nothing by statistics, Pass, Different or Nan by checksums."""
    if not row.is_matched:
        return "Nan" if mode == "md5" else "Unmatched"
    if mode == "md5":
        target, golden = (side.checksum if side else None for side in (row.pair.target, row.pair.golden))
        return "Pass" if target == golden else "Nan" if None in (target, golden) else "Different"
    return "Warning" if any(_is_far(*pair) for pair in row.statistics) else ""


def _is_far(target: Any, golden: Any) -> bool:
    if not all(isinstance(value, (bool, int, float)) for value in (target, golden)) or target == golden:
        return False
    difference, size = abs(target - golden), max(abs(target), abs(golden)) + 1e-10
    return difference / size > OLD_WARNING if math.isfinite(size) else not (math.isnan(target) and math.isnan(golden))


def colours(rows: Sequence[Compared], mode: Mode) -> list[Colour | None]:
    """The colour of each row of one call in the xlsx file of 1.x."""
    if mode == "md5":
        return [None] * len(rows)
    found: list[Colour | None] = ["red" if _is_red_alone(row, mode) else None for row in rows]
    inputs = [row for row in rows if _is_side(row, is_input=True) and _has_numbers(row, mode)]
    for at, output in enumerate(rows):
        if output.role == "output" and found[at] is None and _has_numbers(output, mode):
            pairs = [_pair_colour(entering, output, mode) for entering in inputs]
            found[at] = "red" if "red" in pairs else "yellow" if "yellow" in pairs else None
    return found


def _is_red_alone(row: Compared, mode: Mode) -> bool:
    if row.pair.target is None:
        return False
    high, low = row.pair.target.statistics[:2]
    return _is_nonfinite(high) or _is_nonfinite(low) or (_largest_difference(row, mode) or 0.0) > RED_DIFFERENCE


def _largest_difference(row: Compared, mode: Mode) -> float | None:
    """Max diff of statistics, MaxAbsErr of tensors."""
    if mode == "statistics":
        difference = row.differences[0]
        return None if difference is None else abs(difference)
    return row.numbers.max_abs if row.numbers and isinstance(row.numbers.max_abs, float) else None


def _has_numbers(row: Compared, mode: Mode) -> bool:
    return row.is_matched and not row.row.is_plain and _largest_difference(row, mode) is not None


def _pair_colour(entering: Compared, output: Compared, mode: Mode) -> Colour | None:
    rules = (_by_thousandths, _by_cosine) if mode == "tensor" else (_by_relative,)
    found = [rule(entering, output) for rule in rules]
    into, out = _largest_difference(entering, mode) or 0.0, _largest_difference(output, mode) or 0.0
    if min(into, out) > YELLOW_DIFFERENCE and out >= YELLOW_GROWTH * into:
        found.append("yellow")
    return "red" if "red" in found else "yellow" if "yellow" in found else None


def _by_thousandths(entering: Compared, output: Compared) -> Colour | None:
    assert entering.numbers is not None
    assert output.numbers is not None
    into, out = entering.numbers.within_1e3, output.numbers.within_1e3
    if isinstance(into, str) or isinstance(out, str):
        return None
    if into > THOUSANDTH_IN and out < THOUSANDTH_OUT:
        return "red"
    return "yellow" if into - out > YELLOW_DROP else None


def _by_cosine(entering: Compared, output: Compared) -> Colour | None:
    assert entering.numbers is not None
    assert output.numbers is not None
    into, out = entering.numbers.cosine, output.numbers.cosine
    return "yellow" if isinstance(into, float) and isinstance(out, float) and into - out > YELLOW_DROP else None


def _by_relative(entering: Compared, output: Compared) -> Colour | None:
    into, out = (_floored_relative(row) for row in (entering, output))
    if out > RED_RELATIVE:
        return "red"
    return "yellow" if out > YELLOW_RELATIVE_OUT and into < YELLOW_RELATIVE_IN else None


def _floored_relative(row: Compared) -> float:
    """Max diff over the bench's maximum, which counts as at least 0.01."""
    assert row.pair.golden is not None
    high = row.pair.golden.statistics[0]
    return abs(row.differences[0] or 0.0) / max(RED_FLOOR, float(high))
