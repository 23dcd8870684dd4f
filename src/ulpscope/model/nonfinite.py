# SPDX-License-Identifier: Apache-2.0
"""The nouns of the non-finite watch: how to watch, what happened, and what nearly did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal, TypeAlias

from ulpscope.model.comparison.findings import FindingLevel
from ulpscope.model.names import Slot
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import CallRecord, Frame, Phase
from ulpscope.model.runs import RunInfo

__all__ = ["NearMiss", "NonFinite", "NonFiniteCall", "NonFiniteEvent", "NonFiniteKind", "NonFiniteReport"]

NonFiniteKind: TypeAlias = Literal["made", "given", "received", "swallowed", "masked", "expected"]
"""made: a call with finite inputs; given: it came with the data or another tensor from outside; received: from another rank;
swallowed: made, and gone before it reached the loss or a gradient; masked: -inf that someone asked for; expected: GradScaler skipped the
step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """How to watch for inf and NaN: `Capture(..., watch=NonFinite(limit=3))`.

    After `limit` faults the watch takes itself off; None means never. `ring` is how many calls before and after are kept as summaries.
    `raise_error` raises `NonFiniteError` where the value was made, or before the optimizer would use it. `saturation` counts the dtype's
    largest number as an overflow; None asks each device whether it stops there. `calls` watches every call (True) or every module (False);
    None watches every call on the CPU and every module on an accelerator, where a call costs too much. `passed_on` keeps wholly, and counts
    for `limit`, every call that leaves something non-finite, also one that was given it; `raise_error` then raises at the limit.
    `at_once` looks at each result before its call returns, and waits for an accelerator to do so. `on_event` is called with each call that
    is kept wholly, as a `NonFiniteCall`; what it raises is raised in the program, at that call.
    """

    limit: int | None = 1
    ring: int = 32
    raise_error: bool = False
    saturation: bool | None = None
    calls: bool | None = None
    passed_on: bool = False
    at_once: bool = False
    on_event: Callable[[NonFiniteCall], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteCall:
    """One call that is kept wholly, as `NonFinite(on_event=...)` is told of it while it happens.

    `kind` is what it did: made the values, was given them from outside, received them from another rank, passed them on, made -inf that
    may be meant ("soft"), or handled a mask. Whether that does harm is known when the step is over. `tensors` are its inputs and results
    themselves, as far as they still hold what the call was given; nobody may write to them.
    """

    kind: Literal["made", "given", "received", "passed", "soft", "masked"]
    record: CallRecord
    tensors: Mapping[Slot, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteEvent:
    """One call that is where non-finite values began, and what became of them.

    `needed` is the largest magnitude that the exact result has, `limit` the largest that the dtype holds. `num_passed` counts the later
    calls of the step that passed the values on; `reached` names what they got to: loss, gradients, parameters.
    """

    kind: NonFiniteKind
    level: FindingLevel
    rank: int
    step: int
    order: int
    phase: Phase
    module: str
    call: str
    slot: str
    dtype: str
    headline: str
    numel: int = 0
    num_nan: int | None = None
    num_posinf: int | None = None
    num_neginf: int | None = None
    cause: str = ""
    remedy: str = ""
    needed: float | None = None
    limit: float | None = None
    num_passed: int = 0
    swallowed_by: str = ""
    reached: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    source: Frame | None = None
    stack: tuple[Frame, ...] = ()
    next: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """How near one call came to the ends of its dtype, over all steps and ranks.

    `headroom` is the dtype's largest number over the largest magnitude seen; the shares are of elements.
    """

    module: str
    call: str
    phase: Phase
    slot: str
    dtype: str
    step: int
    rank: int
    largest: float
    headroom: float
    subnormal_share: float = 0.0
    zero_share: float = 0.0
    source: Frame | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteReport:
    """Where inf and NaN began in one run: events in order of time, the faults among them first across all ranks, and the near misses."""

    path: str
    info: RunInfo
    events: tuple[NonFiniteEvent, ...]
    near_misses: tuple[NearMiss, ...] = ()
    num_calls: int = 0
    num_unknown: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def faults(self) -> tuple[NonFiniteEvent, ...]:
        return tuple(event for event in self.events if event.level == "fault")

    @property
    def first(self) -> NonFiniteEvent | None:
        """The first maker across all ranks; None where nothing is wrong."""
        return next(iter(self.faults), None)
