# SPDX-License-Identifier: Apache-2.0
"""What two runs have in common: ranks pair by number, steps by number; the rest is said, never dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from ulpscope._shell import as_path, command_line
from ulpscope.errors import NothingComparableError
from ulpscope.model import Gap, PartKind, Run
from ulpscope.model.nouns import dataclass

__all__ = ["Overlap", "match_steps"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The (rank, step) parts that both runs have, step by step, and a sentence and a gap for each part that only one has.

    `totals` says how many ranks and steps either run has.
    """

    common: tuple[tuple[int, int], ...]
    notes: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()
    totals: dict[PartKind, int] = field(default_factory=dict)


def match_steps(subject: Run, reference: Run) -> Overlap:
    """Pair the parts of two runs, or say why nothing pairs."""
    both = sorted(set(subject.ranks()) & set(reference.ranks()))
    common = [(rank, step) for rank in both for step in set(subject.steps(rank)) & set(reference.steps(rank))]
    if not common:
        raise NothingComparableError(
            f"nothing to compare: the subject {subject.path} holds {_contents(subject)}, the reference {reference.path} holds "
            f"{_contents(reference)}, and no rank and step is in both; {_advice(subject, reference)}"
        )
    common.sort(key=lambda part: (part[1], part[0]))
    ranks, steps = _lone_ranks(subject, reference), _lone_steps(subject, reference, both)
    notes = [f"{_count('rank', lone)} only in the {side}: not compared" for side, lone in ranks.items()]
    notes += [f"{_count('step', lone)} of {_count('rank', on)} only in the {side}: not compared" for (side, lone), on in steps.items()]
    gaps = [Gap(kind="rank", why=f"only in the {side}", many=len(lone), places=(_count("rank", lone),)) for side, lone in ranks.items()]
    gaps += [
        Gap(kind="step", why=f"only in the {side}", many=len(lone), places=(f"{_count('step', lone)} of {_count('rank', on)}",))
        for (side, lone), on in steps.items()
    ]
    return Overlap(tuple(common), tuple(notes), tuple(gaps), _totals(subject, reference, both))


def _advice(subject: Run, reference: Run) -> str:
    watched = [run.path for run in (subject, reference) if run.info.options.get("watch") == "health"]
    if len(watched) == 2:
        command = command_line("ulpscope", "compare-health", *map(as_path, watched))
        return f"both watched the health of a training and recorded no calls: use '{command}'"
    if watched:
        return f"{watched[0]} watched the health of a training and recorded no calls: record it again without --watch health"
    return "record the same steps and ranks on both sides"


def _totals(subject: Run, reference: Run, ranks: Iterable[int]) -> dict[PartKind, int]:
    steps = {step for rank in ranks for run in (subject, reference) for step in run.steps(rank)}
    return {"rank": len(set(subject.ranks()) | set(reference.ranks())), "step": len(steps)}


def _lone_ranks(subject: Run, reference: Run) -> dict[str, set[int]]:
    left, right = set(subject.ranks()), set(reference.ranks())
    return {side: lone for side, lone in (("subject", left - right), ("reference", right - left)) if lone}


def _lone_steps(subject: Run, reference: Run, ranks: Iterable[int]) -> dict[tuple[str, tuple[int, ...]], list[int]]:
    """Steps of one side only, with the ranks that miss the same ones."""
    lone: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in ranks:
        left, right = set(subject.steps(rank)), set(reference.steps(rank))
        for side, steps in (("subject", left - right), ("reference", right - left)):
            if steps:
                lone.setdefault((side, tuple(sorted(steps))), []).append(rank)
    return lone


def _contents(run: Run) -> str:
    parts = [f"rank {rank} with {_count('step', run.steps(rank))}" for rank in run.ranks()[:4]]
    if not parts:
        return "no rank at all"
    rest = len(run.ranks()) - len(parts)
    return ", ".join(parts) + (f" and {rest} more ranks" if rest > 0 else "")


def _count(noun: str, numbers: Iterable[int]) -> str:
    """`step 3`, `steps 0-4, 7`, `no steps`."""
    ordered = sorted(numbers)
    if not ordered:
        return f"no {noun}s"
    spans: list[list[int]] = []
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in spans]
    shown = ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
    return f"{noun} {shown}" if len(ordered) == 1 else f"{noun}s {shown}"
