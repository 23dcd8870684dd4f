# SPDX-License-Identifier: Apache-2.0
"""Define how far two tensors are apart. An undefined metric is a type with a reason, never a number or a text in a number's place."""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from ulpscope.model.nouns import dataclass

__all__ = ["FingerprintMeasurement", "Measurement", "Metric", "NotMeasured", "SummaryMeasurement", "TensorMeasurement", "Undefined"]


@dataclass(frozen=True, slots=True)
class Undefined:
    """A metric that has no value here, and why."""

    reason: str


Metric: TypeAlias = float | Undefined


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeasurement:
    """A measurement of the values themselves: one pass, summed in float64 over the positions where both sides are finite.

    `distance` is max(rms_error, max_abs / 8) / rms of the reference, the one number that verdicts look at. It is infinite where NaN or
    infinities disagree, or where the reference is all zero and the subject is not.
    """

    numel: int
    equal: bool
    distance: float
    max_abs: Metric
    max_rel: Metric
    mean_abs: Metric
    rms_error: Metric
    rel_l2: Metric
    cosine: Metric
    snr_db: Metric
    within_1e4: Metric
    within_1e3: Metric
    within_5e3: Metric
    ulp_max: Metric
    ulp_p50: Metric
    ulp_p99: Metric
    num_different: int
    num_sign_flips: int
    num_nan_disagree: int
    num_inf_disagree: int
    worst_index: tuple[int, ...] | None = None
    worst_subject: float | None = None
    worst_reference: float | None = None
    rms_subject: float = 0.0
    rms_reference: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryMeasurement:
    """A measurement of statistics: `distance` is a lower bound of the true one. `equal` is None where fingerprints cannot decide it."""

    equal: bool | None
    distance: float
    differences: dict[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintMeasurement:
    """A measurement of fingerprints alone: it says whether the values are equal, and not how far apart they are."""

    equal: bool


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """The reason why no measurement was possible."""

    reason: str


Measurement: TypeAlias = TensorMeasurement | SummaryMeasurement | FingerprintMeasurement | NotMeasured
