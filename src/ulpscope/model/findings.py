# SPDX-License-Identifier: Apache-2.0
"""The answer: findings in order of cause, and the comparison they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ulpscope.model.records import Frame, Phase
from ulpscope.model.replays import SystemicPrecision
from ulpscope.model.runs import RunInfo
from ulpscope.model.verdicts import JudgedCall

__all__ = ["Comparison", "ComparisonVerdict", "Finding", "FindingLevel", "Histogram"]

FindingLevel: TypeAlias = Literal["fault", "note"]
ComparisonVerdict: TypeAlias = Literal["same", "rounding", "unknown", "diverges"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values between edges, for one tensor of the culprit: `what` is subject, reference or difference."""

    what: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a person should know, with the evidence and the next step. `repro` is the path of a script that shows it.

    `kind` is one of batch, rng, parameters, arguments, calls, contributed, backward, optimizer, bitwise, fork, amplified,
    precision, coverage.
    """

    level: FindingLevel
    kind: str
    headline: str
    step: int | None = None
    rank: int | None = None
    phase: Phase | None = None
    module: str = ""
    call: str = ""
    slot: str = ""
    source: Frame | None = None
    evidence: tuple[str, ...] = ()
    next: str = ""
    stack: tuple[Frame, ...] = ()
    order: int | None = None
    histograms: tuple[Histogram, ...] = ()
    repro: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole result. It holds no formatting; each renderer is a function of it."""

    subject: RunInfo
    reference: RunInfo
    subject_path: str
    reference_path: str
    rules: str
    findings: tuple[Finding, ...]
    calls: Sequence[JudgedCall] = field(default_factory=tuple)
    elapsed_s: float = 0.0
    precision: tuple[SystemicPrecision, ...] = ()

    @property
    def verdict(self) -> ComparisonVerdict:
        """`unknown`: no fault, but bits are known to differ and nothing tells by how much."""
        if any(finding.level == "fault" for finding in self.findings):
            return "diverges"
        if any(slot.differs_by_unknown for call in self.calls for slot in call.slots):
            return "unknown"
        return "same" if all(call.level == "same" for call in self.calls) else "rounding"

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "fault")
