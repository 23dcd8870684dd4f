# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a fault look like: lines that are added to its evidence, and never a fault by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ulpscope.explain.clues.constants import clue_constant
from ulpscope.explain.clues.factors import clue_gradients, clue_ratio
from ulpscope.explain.clues.recomputing import clue_recompute
from ulpscope.explain.clues.stale import clue_stale
from ulpscope.explain.entries.batch import clue_batch
from ulpscope.explain.entries.replicas import clue_replicas
from ulpscope.explain.programs.draws import clue_generators
from ulpscope.explain.suspects import Suspect, suspects_of
from ulpscope.explain.views import StepView
from ulpscope.model import Finding

__all__ = ["with_clues"]

SlotClue: TypeAlias = Callable[[Suspect, Sequence[StepView]], list[str]]
FaultClue: TypeAlias = Callable[[Finding, Sequence[StepView]], list[str]]

_OF_SLOTS: tuple[tuple[SlotClue, ...], ...] = ((clue_stale, clue_constant), (clue_ratio,))
"""Of each group the first that has something to say."""
_OF_FAULTS: tuple[FaultClue, ...] = (clue_gradients, clue_recompute, clue_replicas, clue_batch, clue_generators)


def with_clues(fault: Finding, views: Sequence[StepView]) -> Finding:
    """The fault with what is telling about its values; `views` are all ranks and steps."""
    suspects = suspects_of(fault, views)
    lines: list[str] = []
    for group in _OF_SLOTS:
        lines += next((found for clue in group for suspect in suspects if (found := clue(suspect, views))), [])
    lines += [line for of_fault in _OF_FAULTS for line in of_fault(fault, views)]
    new = [line for line in dict.fromkeys(lines) if line not in fault.evidence]
    return replace(fault, evidence=(*fault.evidence, *new))
