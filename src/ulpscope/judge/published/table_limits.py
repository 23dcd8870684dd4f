# SPDX-License-Identifier: Apache-2.0
"""Every number at which a row of the older tools' tables changes its word or its colour. docs/standards.md shows the same table."""

from __future__ import annotations

from ulpscope.judge.thresholds import Threshold

__all__ = ["TABLE_LIMITS", "table_limit"]

_GUIDE_26 = "msprobe 26.x, guide of compare"
_GUIDE_1 = "msprobe 1.x, guide of compare"

TABLE_LIMITS: tuple[Threshold, ...] = (
    Threshold("thousandth_in", 0.9, "26.x and red in 1.x: One Thousandth Err Ratio of the inputs above it", f"{_GUIDE_26} and of 1.x"),
    Threshold(
        "thousandth_out",
        0.6,
        "and that of an output below it: error",
        f"{_GUIDE_26} and of 1.x; the code of 26.2 looks for 0.1 and prints 0.6",
    ),
    Threshold("cosine_in", 0.9, "26.x: Cosine of the inputs above it", _GUIDE_26),
    Threshold("cosine_drop", 0.1, "and that of the output lower by more than this: warning", _GUIDE_26),
    Threshold("norm_in", 0.1, "26.x: NormRelativeErr of all inputs below it", _GUIDE_26),
    Threshold("norm_out", 0.5, "and that of an output above it: error", _GUIDE_26),
    Threshold("norm_growth", 10.0, "26.x: NormRelativeErr of the outputs over that of the inputs above it: warning", _GUIDE_26),
    Threshold("norm_from_nothing", 0.1, "the same where the inputs have none: that of the outputs above it", _GUIDE_26),
    Threshold("old_warning", 0.5, "1.x, statistics: a difference over the larger of the two numbers above it: Warning", _GUIDE_1),
    Threshold("red_difference", 1e10, "1.x: Max diff or MaxAbsErr above it: red", _GUIDE_1),
    Threshold("red_relative", 0.5, "1.x: Max diff of an output over the bench's maximum above it: red", _GUIDE_1),
    Threshold("least_maximum", 0.01, "the bench's maximum counts as at least this", _GUIDE_1),
    Threshold("yellow_relative_out", 0.1, "1.x: the same of an output above it", _GUIDE_1),
    Threshold("yellow_relative_in", 0.01, "and of an input below it: yellow", _GUIDE_1),
    Threshold("yellow_difference", 1.0, "1.x: Max diff or MaxAbsErr of input and output above it", _GUIDE_1),
    Threshold("yellow_growth", 10.0, "and that of the output at least this many times that of the input: yellow", _GUIDE_1),
    Threshold("yellow_drop", 0.1, "1.x: One Thousandth Err Ratio or Cosine of an output lower than an input's by more: yellow", _GUIDE_1),
)
_VALUES = {entry.name: entry.value for entry in TABLE_LIMITS}


def table_limit(name: str) -> float:
    return _VALUES[name]
