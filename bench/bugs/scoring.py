# SPDX-License-Identifier: Apache-2.0
"""Score an answer: the call that was blamed, against the culprit. Any tool's answer is a list of `Blame` in its own order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.bugs.case import Case

__all__ = ["Blame", "Score", "Totals", "kinds_of", "score", "totals"]


@dataclass(frozen=True, kw_only=True)
class Blame:
    """One accusation; None stands for a field that the tool does not tell. `is_fault` is False for a mere remark."""

    call: str | None
    module: str | None = None
    slot: str | None = None
    phase: str | None = None
    kind: str | None = None
    step: int | None = None
    rank: int | None = None
    is_fault: bool = True
    headline: str = ""

    @classmethod
    def of_finding(cls, finding: Any) -> Blame:
        return cls(
            call=finding.call,
            module=finding.module,
            slot=finding.slot,
            phase=finding.phase,
            kind=finding.kind,
            step=finding.step,
            rank=finding.rank,
            is_fault=finding.level == "fault",
            headline=finding.headline,
        )


def kinds_of(phase: str | None) -> str:
    """Return the kinds of finding that a tool means by a phase where it tells no kinds."""
    return {"backward": "backward|calls", "optimizer": "optimizer|arguments", "forward": "contributed|arguments|calls"}.get(phase or "", "")


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one tool on one case. The first four say nothing on a clean pair, `false_alarm` and `unknown` nothing on a fault.

    `unknown` says that the tool could not tell of a clean pair that it is clean: no alarm, and no quiet either.
    """

    detected: bool
    top1: bool
    top3: bool
    phase: bool
    num_wrongly_blamed: int
    false_alarm: bool
    blamed: str
    unknown: bool = False

    @property
    def is_quiet(self) -> bool:
        return not (self.false_alarm or self.unknown)


def score(case: Case, blames: Iterable[Blame], *, is_unknown: bool = False) -> Score:
    """Score a tool's answer. Faults come before remarks, each in the order given; the first three of them count for top-3."""
    ranked = sorted(blames, key=lambda blame: not blame.is_fault)
    faults = [blame for blame in ranked if blame.is_fault]
    blamed = faults[0].headline if faults else ""
    if case.expected is None:
        return Score(
            detected=False,
            top1=False,
            top3=False,
            phase=False,
            num_wrongly_blamed=0,
            false_alarm=bool(faults),
            blamed=blamed,
            unknown=is_unknown and not faults,
        )
    right = [case.expected.matches(blame) for blame in ranked]
    return Score(
        detected=bool(faults),
        top1=bool(faults) and right[0],
        top3=bool(faults) and any(right[:3]),
        phase=bool(faults) and case.expected.has_phase_of(faults[0]),
        num_wrongly_blamed=right[: len(faults)].count(False),
        false_alarm=False,
        blamed=blamed,
    )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """One tool over many cases; shares are of the faults."""

    num_faults: int
    num_clean: int
    detected: int
    top1: int
    top3: int
    phase: int
    wrongly_blamed: int
    false_alarms: int
    unknown: int = 0

    def share(self, count: int) -> float:
        return count / self.num_faults if self.num_faults else 1.0


def totals(scored: Sequence[tuple[Case, Score]]) -> Totals:
    faults = [score for case, score in scored if not case.is_clean]
    return Totals(
        num_faults=len(faults),
        num_clean=len(scored) - len(faults),
        detected=sum(score.detected for score in faults),
        top1=sum(score.top1 for score in faults),
        top3=sum(score.top3 for score in faults),
        phase=sum(score.phase for score in faults),
        wrongly_blamed=sum(score.num_wrongly_blamed for score in faults),
        false_alarms=sum(score.false_alarm for _, score in scored),
        unknown=sum(score.unknown for _, score in scored),
    )
