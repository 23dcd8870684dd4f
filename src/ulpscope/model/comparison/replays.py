# SPDX-License-Identifier: Apache-2.0
"""What replaying one side's call in a higher precision, on that side's own recorded inputs, says about what it recorded."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from ulpscope.model.names import Slot
from ulpscope.model.nouns import dataclass

__all__ = ["REPLAY_MODES", "CallReplay", "OperandFormat", "PairReplay", "ReplayMode", "SlotReplay", "SystemicPrecision"]

OperandFormat: TypeAlias = Literal["float16", "tf32", "bfloat16"]
"""What a machine may round the operands of matrix products to."""
ReplayMode: TypeAlias = Literal["needed", "all", "none"]
"""Which calls of a comparison are replayed: what differs until a fault is found, all that differs, or nothing."""
REPLAY_MODES: tuple[ReplayMode, ...] = get_args(ReplayMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReplay:
    """How far one recorded result is from the exact one, in units of what an honest kernel errs on the same inputs.

    `max_ratio` and `rms_ratio` are over the elements; `is_bound` says that they are upper bounds, small enough without looking closer.
    `bias` is the projection statistic (a change of scale that no element shows by itself) and `scale` that change: recorded is
    (1 + scale) times exact. `num_nonfinite` counts NaN or infinities that stand where every honest computation is finite, or the
    reverse; `num_flipped` integers or booleans that differ while no probe changes them. `dtype` is the coarsest floating dtype of inputs
    and result. `error` is the rms error over the rms of the exact result, `honest_error` the same of the yardstick.
    `native_ratio` is the rms ratio of this machine's own kernel without its own error in the yardstick; None where nothing
    independent judges it. `leeway` multiplies the limits of the dtype where real machines are known to add up more coarsely.
    With `is_rounding` the units are other ones: what rounding the operands of products to a narrower format changes.
    """

    slot: Slot
    dtype: str
    numel: int
    max_ratio: float
    rms_ratio: float
    is_bound: bool = False
    bias: float | None = None
    scale: float | None = None
    num_nonfinite: int = 0
    num_flipped: int = 0
    error: float | None = None
    honest_error: float | None = None
    native_ratio: float | None = None
    leeway: float = 1.0
    is_rounding: bool = False
    worst_index: tuple[int, ...] | None = None
    worst_recorded: float | None = None
    worst_exact: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReplay:
    """One side of one call, replayed. `why_not` says why there is nothing to judge by; `is_random` that the call draws numbers.

    `operands` is the format to which the operands of its products were rounded, `has_products` says whether there are any.
    """

    slots: tuple[SlotReplay, ...] = ()
    why_not: str = ""
    is_random: bool = False
    operands: OperandFormat | None = None
    has_products: bool = False

    def of(self, slot: Slot) -> SlotReplay | None:
        return next((one for one in self.slots if one.slot == slot), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReplay:
    """Both sides of a pair, each by its own inputs.

    `arguments` is the subject's call once more with the reference's arguments, against the subject's own exact result: what a difference
    in arguments does, in the same units; None where they do not differ or cannot be exchanged.
    """

    subject: CallReplay
    reference: CallReplay
    arguments: CallReplay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemicPrecision:
    """A whole family of calls that errs as operands in a narrower format do; `side` is None where only their distance is known.

    With `calls` it is those alone that do, each of which was found by itself, among `num_family` of the family.
    """

    family: str
    operands: OperandFormat
    side: Literal["subject", "reference"] | None = None
    calls: tuple[str, ...] = ()
    num_family: int = 0
