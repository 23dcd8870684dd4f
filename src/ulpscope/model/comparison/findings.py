# SPDX-License-Identifier: Apache-2.0
"""Define the answer: findings in order of cause, and the comparison that holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, Literal, Protocol, TypeAlias

from ulpscope.model.comparison.coverage import Coverage, Gap
from ulpscope.model.comparison.replays import SystemicPrecision
from ulpscope.model.comparison.verdicts import JudgedCall
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import Frame, Phase
from ulpscope.model.runs import RunInfo

__all__ = ["Comparison", "ComparisonVerdict", "CondensedSteps", "Finding", "FindingLevel", "Histogram"]

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


class CondensedSteps(Protocol):
    """Steps of a long comparison without a finding, kept as counts and table rows only."""

    levels: Counter[str]
    """Calls that both sides have, by verdict."""
    lone: Counter[str]
    """Calls that only the `subject` or the `reference` has."""
    states: Counter[str]
    """Calls by what their verdict and contribution come to (`report.counts.call_state`)."""
    modules: Counter[tuple[str, str, str]]
    """Calls by module, phase and state."""
    num_slots: int
    num_rows: int
    is_in_doubt: bool
    gaps: list[Gap]
    num_opaque: int

    @property
    def num_calls(self) -> int: ...

    @property
    def steps(self) -> tuple[int, ...]: ...

    def rows(self, step: int) -> Iterator[tuple[Any, ...]]:
        """Return the rows that `report.rows` made of the step's calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole result. It holds no formatting; each renderer is a function of it.

    `calls` are all calls; in a long comparison, the calls of the steps that are not `condensed`. `coverage` says which share of the
    recorded calls they are.
    """

    subject: RunInfo
    reference: RunInfo
    subject_path: str
    reference_path: str
    rules: str
    findings: tuple[Finding, ...]
    calls: Sequence[JudgedCall] = field(default_factory=tuple)
    condensed: CondensedSteps | None = None
    elapsed_s: float = 0.0
    precision: tuple[SystemicPrecision, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def verdict(self) -> ComparisonVerdict:
        """Return the verdict. `unknown`: no fault, but a recorded part was not compared, or bits differ by an unknown distance."""
        if any(finding.level == "fault" for finding in self.findings):
            return "diverges"
        if self.coverage.leaves_doubt or self.is_in_doubt:
            return "unknown"
        condensed = self.condensed
        is_same = all(call.level == "same" for call in self.calls) and (condensed is None or set(condensed.levels) <= {"same"})
        return "same" if is_same else "rounding"

    @property
    def is_in_doubt(self) -> bool:
        """Tell whether bits differ somewhere by an unknown distance."""
        condensed = self.condensed
        return bool(condensed and condensed.is_in_doubt) or any(slot.differs_by_unknown for call in self.calls for slot in call.slots)

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level == "fault")
