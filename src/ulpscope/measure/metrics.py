# SPDX-License-Identifier: Apache-2.0
"""Define each number of a measurement in one table of metrics. `docs/metrics.md` explains it at length.

n is a value of the subject, b the value of the reference at the same place, d = n - b.
"""

from __future__ import annotations

from typing import Literal

from ulpscope.model.nouns import dataclass

__all__ = ["METRICS", "MetricEntry"]


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """One metric. `id` is the field of TensorMeasurement, `format` a format specification for a number, `better` the good direction."""

    id: str
    symbol: str
    meaning: str
    format: str
    better: Literal["lower", "higher", "neither"]


_ENTRIES = (
    MetricEntry(
        "distance", "max(rms d, max|d|/8) / rms b", "How far apart, relative to the reference: what verdicts look at.", ".3g", "lower"
    ),
    MetricEntry("max_abs", "max|d|", "The largest absolute error.", ".4g", "lower"),
    MetricEntry("max_rel", "max|d|/|b|", "The largest relative error among elements whose reference is not zero.", ".4g", "lower"),
    MetricEntry("mean_abs", "mean|d|", "The mean absolute error.", ".4g", "lower"),
    MetricEntry("rms_error", "rms d", "The root of the mean squared error.", ".4g", "lower"),
    MetricEntry("rel_l2", "‖d‖/‖b‖", "The length of the difference relative to that of the reference.", ".4g", "lower"),
    MetricEntry("cosine", "n·b/(‖n‖‖b‖)", "The cosine of the angle between both tensors as vectors.", ".8f", "higher"),
    MetricEntry("snr_db", "20 log10(‖b‖/‖d‖)", "Signal to noise in decibels; 20 more mean one more decimal digit.", ".1f", "higher"),
    MetricEntry("within_1e4", "|d| ≤ 1e-4|b|", "The share of elements with a relative error of at most 0.01 %.", ".2%", "higher"),
    MetricEntry("within_1e3", "|d| ≤ 1e-3|b|", "The share of elements with a relative error of at most 0.1 %.", ".2%", "higher"),
    MetricEntry("within_5e3", "|d| ≤ 5e-3|b|", "The share of elements with a relative error of at most 0.5 %.", ".2%", "higher"),
    MetricEntry("ulp_max", "max ulp", "The largest distance in units in the last place of the coarser dtype.", ".0f", "lower"),
    MetricEntry(
        "ulp_p50", "median ulp", "The distance in units in the last place that half of the elements do not exceed.", ".0f", "lower"
    ),
    MetricEntry("ulp_p99", "99 % ulp", "The distance in units in the last place that 99 % of the elements do not exceed.", ".0f", "lower"),
    MetricEntry("num_different", "#(n ≠ b)", "How many elements have another value.", "d", "lower"),
    MetricEntry("num_sign_flips", "#(n b < 0)", "How many elements are positive on one side and negative on the other.", "d", "lower"),
    MetricEntry("num_nan_disagree", "#NaN one side", "How many elements are NaN on exactly one side.", "d", "lower"),
    MetricEntry(
        "num_inf_disagree", "#inf differs", "How many elements are infinite on one side only, or with opposite signs.", "d", "lower"
    ),
    MetricEntry("rms_subject", "rms n", "The root mean square of the subject.", ".4g", "neither"),
    MetricEntry("rms_reference", "rms b", "The root mean square of the reference.", ".4g", "neither"),
)
METRICS: dict[str, MetricEntry] = {entry.id: entry for entry in _ENTRIES}
