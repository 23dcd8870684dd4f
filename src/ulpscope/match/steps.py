# SPDX-License-Identifier: Apache-2.0
"""What two runs have in common: ranks pair by number, steps by number; the rest is said, never dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable

from ulpscope.errors import NothingComparableError
from ulpscope.model import Run
from ulpscope.model.nouns import dataclass

__all__ = ["Overlap", "match_steps"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The (rank, step) parts that both runs have, step by step, and a sentence for each part that only one has."""

    common: tuple[tuple[int, int], ...]
    notes: tuple[str, ...] = ()


def match_steps(subject: Run, reference: Run) -> Overlap:
    """Pair the parts of two runs, or say why nothing pairs."""
    both = sorted(set(subject.ranks()) & set(reference.ranks()))
    common = [(rank, step) for rank in both for step in set(subject.steps(rank)) & set(reference.steps(rank))]
    if not common:
        raise NothingComparableError(
            f"nothing to compare: the subject {subject.path} holds {_contents(subject)}, the reference {reference.path} holds "
            f"{_contents(reference)}, and no rank and step is in both; record the same steps and ranks on both sides"
        )
    common.sort(key=lambda part: (part[1], part[0]))
    return Overlap(tuple(common), (*_lone_ranks(subject, reference), *_lone_steps(subject, reference, both)))


def _lone_ranks(subject: Run, reference: Run) -> list[str]:
    left, right = set(subject.ranks()), set(reference.ranks())
    sides = (("subject", left - right), ("reference", right - left))
    return [f"{_count('rank', lone)} only in the {side}: not compared" for side, lone in sides if lone]


def _lone_steps(subject: Run, reference: Run, ranks: Iterable[int]) -> list[str]:
    lone: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank in ranks:
        left, right = set(subject.steps(rank)), set(reference.steps(rank))
        for side, steps in (("subject", left - right), ("reference", right - left)):
            if steps:
                lone.setdefault((side, tuple(sorted(steps))), []).append(rank)
    return [f"{_count('step', steps)} of {_count('rank', on)} only in the {side}: not compared" for (side, steps), on in lone.items()]


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
