# SPDX-License-Identifier: Apache-2.0
"""Write the answer of a comparison in words that every report shares: what was not compared comes first, then the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ulpscope.model import PART_KINDS, Comparison, Coverage, Gap, PartKind
from ulpscope.report.comparison.counts import Counts

__all__ = ["answer_text", "coverage_data", "gaps_text", "opaque_text"]

_MOST_REASONS = 3


def answer_text(comparison: Comparison, counts: Counts) -> str:
    """Return the text that follows the verdict's word and the names of both sides."""
    compared = _plural(counts.compared, "call") + " compared"
    opaque = opaque_text(comparison.coverage)
    rest = f"; {opaque}" if opaque else ""
    match comparison.verdict:
        case "same":
            return f"{compared}, no difference{rest}"
        case "rounding":
            return f"{compared}, {_harmless_text(counts)}{rest}"
        case "unknown":
            doubt = ", but something differs bitwise by an unknown amount" if comparison.is_in_doubt else " in what was compared"
            return f"{compared}, no fault{doubt}{rest}"
        case "diverges":
            return f"{compared}, {_plural(len(comparison.faults), 'fault')}{rest}"


def _harmless_text(counts: Counts) -> str:
    if not counts.differs:
        return "no difference beyond rounding"
    verb, them = ("differs", "it") if counts.differs == 1 else ("differ", "them")
    differ = f"{_plural(counts.differs, 'call')} {verb} by more than rounding explains"
    return f"{differ}, no call is to blame, and all that is made of {them} agrees"


def gaps_text(coverage: Coverage) -> str:
    """Name what was not compared and out of how many, as a clause; empty where everything was compared."""
    if coverage.is_whole:
        return ""
    counted = [_of(coverage, kind) for kind in PART_KINDS if any(gap.kind == kind for gap in coverage.gaps)]
    listed = f"{', '.join(counted[:-1])} and {counted[-1]}" if len(counted) > 1 else counted[0]
    is_one = len(coverage.gaps) == 1 and coverage.gaps[0].many == 1
    reasons = [_reason(gap) for gap in coverage.gaps[:_MOST_REASONS]]
    more = f"; {_plural(len(coverage.gaps) - _MOST_REASONS, 'more reason')}" if len(coverage.gaps) > _MOST_REASONS else ""
    return f"{listed} {'was' if is_one else 'were'} not compared ({'; '.join(reasons)}{more})"


def opaque_text(coverage: Coverage) -> str:
    """Say how many of the calls were compared from outside only; empty where none were."""
    if not coverage.num_opaque:
        return ""
    share = f"{coverage.num_opaque} of {_plural(coverage.totals.get('call', 0), 'call')}"
    return f"inside {share} no recording looks: {'its' if coverage.num_opaque == 1 else 'their'} inputs and outputs were compared"


def coverage_data(coverage: Coverage) -> dict[str, Any]:
    """Return the coverage for JSON; `parts` has an entry for each kind of part that is counted or missing."""
    kinds = [kind for kind in PART_KINDS if kind in coverage.totals or coverage.missing(kind)]
    return {
        "is_whole": coverage.is_whole,
        "is_partial": coverage.is_partial,
        "text": gaps_text(coverage),
        "parts": [{"kind": kind, "total": coverage.totals.get(kind), "not_compared": coverage.missing(kind)} for kind in kinds],
        "opaque_calls": coverage.num_opaque,
        "gaps": [asdict(gap) for gap in coverage.gaps],
    }


def _of(coverage: Coverage, kind: PartKind) -> str:
    many, total = coverage.missing(kind), coverage.totals.get(kind)
    return _plural(many, kind) if total is None else f"{many} of {_plural(total, kind)}"


def _reason(gap: Gap) -> str:
    """Name one gap: `rank 1 only in the reference`, `300 calls: only in the subject, first mul.0`."""
    if gap.kind in ("rank", "step", "phase", "file"):
        return f"{', '.join(gap.places)} {gap.why}"
    first = f", first {gap.places[0]}" if gap.places else ""
    return f"{_plural(gap.many, gap.kind)}: {gap.why}{first}"


def _plural(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"
