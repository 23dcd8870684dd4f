# SPDX-License-Identifier: Apache-2.0
"""Define the nouns of the hunt for inf and NaN: its options, the events, and the near misses."""

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
"""made: a call with finite inputs made it; given: it came with the data or another tensor from outside; received: from another rank;
swallowed: made, and gone before it reached the loss or a gradient; masked: -inf that the program asked for; expected: GradScaler skipped
the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """The options of the hunt for inf and NaN: `Capture(..., watch=NonFinite(limit=3))`.

    After `limit` faults the hunt stops; None means never. `ring` calls before a fault and after it are kept as summaries. `raise_error`
    raises `NonFiniteError` where the value was made, or before the optimizer would use it. `saturation` counts the dtype's largest number
    as an overflow; None asks each device whether it stops there. `calls` watches every call (True) or every module (False); None watches
    every call on the CPU and every module on an accelerator, where a call costs too much. `passed_on` keeps wholly, and counts for `limit`,
    every call with a non-finite result, even if an input was non-finite already; `raise_error` then raises at the limit. `at_once` looks at
    each result before its call returns, and waits for an accelerator to do so. `on_event` is called with each call that is kept wholly, as
    a `NonFiniteCall`; an exception from it reaches the program at that call.
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

    `kind` is what the call did: it made the values, was given them from outside, received them from another rank, passed them on, made -inf
    that may be meant ("soft"), or handled a mask. Only the end of the step shows whether that does harm. `tensors` are its inputs and
    results themselves, except inputs that were overwritten since; do not write to them.
    """

    kind: Literal["made", "given", "received", "passed", "soft", "masked"]
    record: CallRecord
    tensors: Mapping[Slot, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteEvent:
    """One call at which non-finite values began, and what became of them.

    `needed` is the largest magnitude of the exact result, `limit` the largest that the dtype holds. `num_passed` counts the later calls of
    the step that passed the values on; `reached` names where they arrived: loss, gradients, parameters.
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
    """How near one call came to the ends of its dtype's range, over all steps and ranks.

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
    """Where inf and NaN began in one run: the events of all ranks in order of time, and the near misses. `first` is the first fault."""

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
        """Return the first fault across all ranks; None where there is none."""
        return next(iter(self.faults), None)
