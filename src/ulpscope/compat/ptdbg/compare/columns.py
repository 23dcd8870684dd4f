# SPDX-License-Identifier: Apache-2.0
"""The columns of the old result files and the words and numbers in them.

`NPU` is our subject and `Bench` our reference. Numbers come from the one measurement of two tensors; here they get twelve decimals and the
words that old scripts look for: `Nan` (not to be had), `unsupported` (no direction), `shape unmatched`, `N/A` (NaN or infinities disagree).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ulpscope.judge.thresholds import threshold
from ulpscope.model import TensorMeasurement

__all__ = [
    "MD5_COLUMNS",
    "NAN",
    "STACK_COLUMN",
    "SUMMARY_COLUMNS",
    "TENSOR_COLUMNS",
    "Numbers",
    "accuracy_reached",
    "difference_cell",
    "no_numbers",
    "numbers",
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
_UNSUPPORTED = "unsupported"
_SHAPES_DIFFER = "shape unmatched"
_DISAGREE = "N/A"
_SAME_DIRECTION = 0.99999
_ZERO_LENGTH = 2.220446049250313e-16
_LONGEST_CELL = 100


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one row says about two tensors; `message` is why a number is missing."""

    cosine: str
    max_abs: str
    max_rel: str
    message: str = ""


def no_numbers(message: str) -> Numbers:
    return Numbers(NAN, NAN, NAN, message)


def numbers(shapes: tuple[tuple[int, ...], tuple[int, ...]], found: TensorMeasurement | None, at_zeros: float = 0.0) -> Numbers:
    """The numbers of a row. `found` is None where the shapes differ; `at_zeros` is the largest relative error where the bench is zero."""
    if found is None:
        return Numbers(
            _SHAPES_DIFFER, _SHAPES_DIFFER, _SHAPES_DIFFER, f"The shapes {list(shapes[0])} and {list(shapes[1])} cannot be compared."
        )
    if not found.numel:
        return Numbers(_UNSUPPORTED, "0", "0", "The tensor is empty.")
    if found.num_nan_disagree or found.num_inf_disagree:
        disagreeing = found.num_nan_disagree + found.num_inf_disagree
        return Numbers(_DISAGREE, _DISAGREE, _DISAGREE, f"NaN or infinities disagree at {disagreeing} positions.")
    cosine, message = _cosine(found)
    if shapes[0] == ():
        message = "A number has no direction: no cosine."
    return Numbers(cosine, decimals(found.max_abs), decimals(_largest(found.max_rel, at_zeros)), message)


def _cosine(found: TensorMeasurement) -> tuple[str, str]:
    if found.numel == 1:
        return _UNSUPPORTED, "A single element has no direction: no cosine."
    root = math.sqrt(found.numel)
    is_zero = [rms * root <= _ZERO_LENGTH for rms in (found.rms_subject, found.rms_reference)]
    if all(is_zero):
        return "1.0", ""
    if any(is_zero):
        return NAN, f"Cosine is not defined: all of the {'NPU' if is_zero[0] else 'bench'} data is zero."
    if not isinstance(found.cosine, float):
        return NAN, f"Cosine is not defined: {found.cosine.reason}."
    return ("1.0" if found.cosine > _SAME_DIRECTION else decimals(found.cosine)), ""


def _largest(relative: object, at_zeros: float) -> float:
    return max(relative if isinstance(relative, float) else 0.0, at_zeros)


def decimals(value: object) -> str:
    """Twelve decimals, or the word for what is no number.

    >>> decimals(12345.6789)
    '12345.678900000000'
    """
    if not isinstance(value, float):
        return "0.000000000000"
    return NAN if math.isnan(value) else f"{value:.12f}"


def accuracy_reached(row: Numbers) -> str:
    """`Yes`, `No`, `Nan` or `Unmatched` by the limits of the guide. An error above the last limit is `No` with or without a cosine."""
    if row.cosine == _SHAPES_DIFFER:
        return "Unmatched"
    if row.cosine == _DISAGREE:
        return "No"
    largest = _value(row.max_abs)
    if largest is not None and largest > threshold("ptdbg_max_abs_alone"):
        return "No"
    cosine = _value(row.cosine)
    if cosine is None or largest is None:
        return NAN
    is_far = cosine < threshold("ptdbg_cosine") and largest > threshold("ptdbg_max_abs")
    return "No" if is_far or cosine < threshold("ptdbg_cosine_alone") else "Yes"


def _value(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def statistic_cell(value: Any) -> str:
    """A statistic as the dump has it; `Nan` where it has none."""
    return NAN if value is None else str(value)[:_LONGEST_CELL]


def difference_cell(npu: Any, bench: Any) -> str:
    """NPU less bench, `Nan` where either is no number."""
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in (npu, bench)):
        return NAN
    try:
        difference = float(npu) - float(bench)
    except OverflowError:
        return NAN
    return NAN if math.isnan(difference) else repr(difference)
