# SPDX-License-Identifier: Apache-2.0
"""Fill the columns of the old result files, with the words in them.

`NPU` is the subject and `Bench` the reference. Numbers get twelve decimals. Old scripts look for these words: `Nan` (not available),
`unsupported` (no direction), `shape unmatched`, `N/A` (NaN or infinities disagree).
"""

from __future__ import annotations

from typing import Any

from ulpscope.measure.written import difference_of
from ulpscope.model.written import OldNumbers

__all__ = [
    "MD5_COLUMNS",
    "NAN",
    "STACK_COLUMN",
    "SUMMARY_COLUMNS",
    "TENSOR_COLUMNS",
    "cosine_word",
    "difference_cell",
    "message_of",
    "number_cells",
    "statistic_cell",
]

_NAMES = ("NPU Name", "Bench Name", "NPU Tensor Dtype", "Bench Tensor Dtype", "NPU Tensor Shape", "Bench Tensor Shape")
TENSOR_COLUMNS = (
    *_NAMES,
    *("Cosine", "MaxAbsErr", "MaxRelativeErr", "NPU max", "NPU min", "NPU mean", "Bench max", "Bench min", "Bench mean"),
    *("Accuracy Reached or Not", "Err_message"),
)
SUMMARY_COLUMNS = (
    *_NAMES,
    *("Max diff", "Min diff", "Mean diff", "L2norm diff", "NPU max", "NPU min", "NPU mean", "NPU l2norm"),
    *("Bench max", "Bench min", "Bench mean", "Bench l2norm"),
)
MD5_COLUMNS = (*_NAMES, "NPU MD5", "BENCH MD5", "Result")
STACK_COLUMN = "NPU_Stack_Info"

NAN = "Nan"
_LONGEST_CELL = 100


def number_cells(found: OldNumbers) -> tuple[str, str, str]:
    """Return cosine, largest absolute and largest relative error."""
    if found.numel is None or found.disagreeing:
        return (cosine_word(found),) * 3
    if not found.numel:
        return cosine_word(found), "0", "0"
    cosine = "1.0" if found.old_cosine == 1.0 else cosine_word(found) if found.old_cosine is None else _decimals(found.old_cosine)
    return cosine, _decimals(found.max_abs), _decimals(found.max_rel)


def cosine_word(found: OldNumbers) -> str:
    """Return the word for a missing cosine."""
    if found.numel is None:
        return NAN if found.failure else "shape unmatched"
    if found.disagreeing:
        return "N/A"
    return "unsupported" if found.numel < 2 else NAN


def message_of(found: OldNumbers) -> str:
    """Say why a number is missing."""
    if found.numel is None:
        return found.failure or f"The shapes {list(found.shapes[0])} and {list(found.shapes[1])} cannot be compared."
    if not found.numel:
        return "The tensor is empty."
    if found.disagreeing:
        return f"NaN or infinities disagree at {found.disagreeing} positions."
    if found.shapes[0] == ():
        return "A number has no direction: no cosine."
    if found.numel == 1:
        return "A single element has no direction: no cosine."
    if found.old_cosine is not None:
        return ""
    if any(found.zeros):
        return f"Cosine is not defined: all of the {'NPU' if found.zeros[0] else 'bench'} data is zero."
    return f"Cosine is not defined: {found.no_cosine}."


def _decimals(value: float | None) -> str:
    """Write twelve decimals, or the word for a missing number.

    >>> _decimals(12345.6789)
    '12345.678900000001'
    """
    return NAN if value is None else f"{value:.12f}"


def statistic_cell(value: Any) -> str:
    """Write a statistic as the dump has it; `Nan` where it has none."""
    return NAN if value is None else str(value)[:_LONGEST_CELL]


def difference_cell(npu: Any, bench: Any) -> str:
    """Write NPU less bench, `Nan` where either is no number."""
    difference = None if isinstance(npu, bool) or isinstance(bench, bool) else difference_of(npu, bench)
    return NAN if difference is None else repr(difference)
