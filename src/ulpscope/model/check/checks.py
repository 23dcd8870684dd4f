# SPDX-License-Identifier: Apache-2.0
"""Define a checked run: its calls executed again one by one, the device's result now, the recorded result, and which of them is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from math import inf
from typing import Literal, TypeAlias

from ulpscope.model.comparison.findings import Finding
from ulpscope.model.comparison.replays import OperandFormat, SlotReplay
from ulpscope.model.names import CallName, Slot
from ulpscope.model.nouns import dataclass
from ulpscope.model.records import CallRecord, Frame, Level, Phase
from ulpscope.model.runs import RunInfo

__all__ = [
    "Check",
    "CheckData",
    "CheckRole",
    "CheckStatus",
    "CheckVerdict",
    "CheckedCall",
    "CheckedSlot",
    "DrawnSlot",
    "FamilyPrecision",
    "Overflow",
    "num_checked",
]

CheckStatus: TypeAlias = Literal["passed", "failed", "warning", "skipped"]
CheckVerdict: TypeAlias = Literal["sound", "wrong", "unknown"]
"""sound: no checked call fails; wrong: at least one fails; unknown: no call was checked, or none inside the modules."""
CheckData: TypeAlias = Literal["recorded", "generated", ""]
"""The values that a call was run on: the recorded ones, or values drawn to fit their statistics."""
CheckRole: TypeAlias = Literal["device", "recorded"]
"""The result that is judged: the one that the device gives now, or the recorded one."""
Overflow: TypeAlias = Literal["normal", "abnormal", "not reproduced"]
"""A call with finite inputs gave inf or NaN. normal: the reference overflows too; abnormal: the reference stays finite; not reproduced: the
device stays finite when it runs the call again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSlot:
    """How far the result of a call that draws random numbers is from its distribution; `reason` names the property that is off.

    `distance` is in standard errors: a normally distributed value is as seldom that far off. It is infinite for a result that no honest
    draw gives.
    """

    distance: float
    reason: str
    role: CheckRole = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSlot:
    """One result of one call.

    `device` says how far the device's result now is from the exact one, `recorded` the recorded result, both by replay. `second_opinion` is
    the same for the CPU's own float64 result, against one that shares no kernel with it, where that was asked for and possible. `multiple`
    is the error over what is allowed: above 1 the slot failed. `metrics` are further figures of a rule set, by name, and `golden_dtype` is
    the dtype of the exact result that they compare with.
    """

    slot: Slot
    dtype: str
    shape: tuple[int, ...]
    device: SlotReplay | None = None
    recorded: SlotReplay | None = None
    drawn: DrawnSlot | None = None
    second_opinion: SlotReplay | None = None
    status: CheckStatus = "passed"
    multiple: float | None = None
    blamed: CheckRole | None = None
    reason: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)
    golden_dtype: str = ""

    def of(self, role: CheckRole) -> SlotReplay | None:
        return self.device if role == "device" else self.recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """One phase of one call, checked. `reason` is one clause: why it failed, or why it was skipped.

    `is_reproduced` says whether the device errs now as the recorded result does; None where one of the two errors is unknown. `is_opaque`
    marks a module whose inside was not recorded. It stands for `stands_for` calls, the fewest that it can have made.
    """

    rank: int
    step: int
    order: int
    call: CallName
    phase: Phase
    level: Level = "api"
    module: str = ""
    device: str = ""
    data: CheckData = ""
    status: CheckStatus = "skipped"
    reason: str = ""
    slots: tuple[CheckedSlot, ...] = ()
    overflow: Overflow | None = None
    is_reproduced: bool | None = None
    is_random: bool = False
    is_opaque: bool = False
    stands_for: int = 1
    device_operands: OperandFormat | None = None
    recorded_operands: OperandFormat | None = None
    source: Frame | None = None
    elapsed_s: float = 0.0
    recorded_as: str = ""

    @classmethod
    def of(cls, record: CallRecord, device: str) -> CheckedCall:
        """Name a call that was not checked yet."""
        return cls(
            rank=record.rank,
            step=record.step,
            order=record.order,
            call=record.call,
            phase=record.phase,
            level=record.level,
            module=record.module,
            device=device,
            source=record.source,
            recorded_as=record.recorded_as,
        )

    @property
    def name(self) -> str:
        """Return the text that `select` globs match: `module/call`."""
        return f"{self.module}/{self.call}"

    @property
    def key(self) -> tuple[int, int, int]:
        return self.rank, self.step, self.order

    @property
    def worst(self) -> CheckedSlot | None:
        return max(self.slots, key=lambda slot: (slot.status == "failed", slot.multiple or 0.0), default=None)

    @property
    def multiple(self) -> float | None:
        return max((slot.multiple for slot in self.slots if slot.multiple is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyPrecision:
    """A family of matrix products that rounds its operands to a narrower format: a property, not a fault.

    Of its `num_calls` calls, `num_like` err beyond their limits and no more than such operands make them.
    """

    family: str
    operands: OperandFormat
    role: CheckRole = "device"
    num_calls: int = 0
    num_like: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The whole result of a check. It holds no formatting; each renderer is a function of it.

    `is_all_opaque` says that every layer lies inside an opaque module: only calls around the model were checked.
    """

    info: RunInfo
    path: str
    device: str
    rules: str = "derived"
    seed: int = 0
    calls: Sequence[CheckedCall] = field(default_factory=tuple)
    is_all_opaque: bool = False
    findings: tuple[Finding, ...] = ()
    precision: tuple[FamilyPrecision, ...] = ()
    num_resumed: int = 0
    elapsed_s: float = 0.0

    @property
    def counts(self) -> dict[CheckStatus, int]:
        found = Counter(call.status for call in self.calls)
        statuses: tuple[CheckStatus, ...] = ("passed", "failed", "warning", "skipped")
        return {status: found[status] for status in statuses}

    @property
    def num_calls(self) -> int:
        """Count the calls that ran, each phase by itself: one for each record, and for an opaque module the fewest calls that it can have
        made.
        """
        return sum(call.stands_for for call in self.calls)

    @property
    def num_checked(self) -> int:
        return num_checked(self.calls, self.rules)

    @property
    def coverage(self) -> float:
        """Return the checked share of the calls that ran. It is an upper bound where a module is opaque: such a module may have made more
        calls.
        """
        return self.num_checked / self.num_calls if self.calls else 0.0

    @property
    def opaque(self) -> tuple[str, ...]:
        """Name the modules whose inside was not recorded, each once."""
        found = ((call.module, call.call.short) for call in self.calls if call.is_opaque)
        return tuple(dict.fromkeys(f"{module} ({kind})" if module and module != kind else kind for module, kind in found))

    @property
    def verdict(self) -> CheckVerdict:
        if self.counts["failed"]:
            return "wrong"
        if self.calls and (not self.num_checked or self.is_all_opaque):
            return "unknown"
        return "sound"

    @property
    def failures(self) -> tuple[CheckedCall, ...]:
        """Return the failed calls, worst first."""
        failed = [call for call in self.calls if call.status == "failed"]
        return tuple(sorted(failed, key=lambda call: (-(inf if call.multiple is None else call.multiple), call.key)))

    @property
    def reasons(self) -> dict[str, int]:
        """Count the reasons for skipped calls, the most frequent first."""
        return dict(Counter(call.reason for call in self.calls if call.status == "skipped").most_common())


def num_checked(calls: Sequence[CheckedCall], rules: str = "derived") -> int:
    """Count the calls that have a verdict.

    A warning says that a call could not be settled, which is no verdict; it is one under published rules, and for an overflow.
    """
    return sum(
        call.status in ("passed", "failed") or (call.status == "warning" and (rules != "derived" or call.overflow is not None))
        for call in calls
    )
