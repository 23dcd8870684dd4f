# SPDX-License-Identifier: Apache-2.0
"""Define what the published standards measure and say: a result of a call against a more precise one, and two devices against each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields
from typing import Literal, TypeAlias

from ulpscope.model.check.checks import CheckStatus
from ulpscope.model.comparison.measurements import Metric
from ulpscope.model.nouns import dataclass

__all__ = [
    "STANDARD_METRICS",
    "DeviceComparison",
    "DevicePair",
    "DeviceRow",
    "Standard",
    "StandardLimits",
    "StandardMeasurement",
    "StandardVerdict",
]

Standard: TypeAlias = Literal["checker", "benchmark", "ulp", "binary", "absolute", "thousandth", "derived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardLimits:
    """The limits of the standards for one dtype.

    An element is small where the exact result is at most `small_value`. A small element is wrong if its error exceeds `small_error`
    (standard `benchmark`) or `small_atol` (`absolute`), any other if its relative error exceeds `rtol` (`absolute`). `ulp` is the number of
    units in the last place beyond which an element counts.
    """

    small_value: float
    small_error: float
    small_atol: float
    rtol: float
    ulp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardMeasurement:
    """One result against a more precise one. Shares are between 0 and 1. A metric is undefined where the dtype has no limits for it.

    `rms_error`, `max_rel` and `mean_rel` are over the elements that are finite and not small. `mismatch` is the share of elements that
    differ from the exact result rounded to the dtype. `balance` is by how much more elements are too large than too small, or the reverse.
    """

    numel: int
    cosine: Metric
    max_abs: Metric
    within_1e2: Metric
    within_1e3: Metric
    within_1e4: Metric
    mismatch: Metric
    balance: Metric
    rms_error: Metric
    small_errors: Metric
    max_rel: Metric
    mean_rel: Metric
    nonfinite_errors: Metric
    rel_errors: Metric
    abs_errors: Metric
    ulp_max: Metric
    ulp_mean: Metric
    ulp_beyond: Metric


STANDARD_METRICS: tuple[str, ...] = tuple(entry.name for entry in fields(StandardMeasurement) if entry.name != "numel")
"""The names of the metrics; tables name their columns by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardVerdict:
    """The status that a standard gives, and why in one clause. `multiple` is the worst figure over its limit; above 1 it did not pass."""

    standard: Standard
    status: CheckStatus
    reason: str = ""
    multiple: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    statuses: dict[str, CheckStatus] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One result of one call on one device, as a row in the table of a check. `call` is the name that both tables agree on.

    `error` is the rms error over the rms of the exact result, if the rules `derived` made the table. `name` is the name of the row in
    another tool's table.
    """

    call: str
    op: str
    phase: str
    slot: str
    dtype: str
    shape: str = ""
    module: str = ""
    place: str = ""
    status: str = ""
    reason: str = ""
    error: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    name: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.place, self.module, self.call, self.phase, self.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePair:
    """The same result on both devices, or on the one that has it."""

    subject: DeviceRow | None
    reference: DeviceRow | None
    verdict: StandardVerdict

    @property
    def row(self) -> DeviceRow:
        row = self.subject or self.reference
        assert row is not None
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """The checks of two devices against each other. It holds no formatting; each renderer is a function of it."""

    subject_path: str
    reference_path: str
    edition: str
    pairs: Sequence[DevicePair] = ()

    @property
    def counts(self) -> dict[CheckStatus, int]:
        statuses: tuple[CheckStatus, ...] = ("passed", "warning", "failed", "skipped")
        return {status: sum(pair.verdict.status == status for pair in self.pairs) for status in statuses}

    @property
    def calls(self) -> dict[tuple[str, str], CheckStatus]:
        """Return the status of each call and phase: that of its worst result."""
        ranking: tuple[CheckStatus, ...] = ("skipped", "passed", "warning", "failed")
        found: dict[tuple[str, str], CheckStatus] = {}
        for pair in self.pairs:
            key = pair.row.call, pair.row.phase
            found[key] = max(found.get(key, "skipped"), pair.verdict.status, key=ranking.index)
        return found

    @property
    def worst(self) -> tuple[DevicePair, ...]:
        """Return the pairs that did not pass: failures first, the largest multiple first."""
        found = [pair for pair in self.pairs if pair.verdict.status in ("failed", "warning")]
        return tuple(sorted(found, key=lambda pair: (pair.verdict.status != "failed", -(pair.verdict.multiple or 0.0))))
