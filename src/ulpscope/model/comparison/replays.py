# SPDX-License-Identifier: Apache-2.0
"""Define what a replay finds: one side's call computed again in a higher precision, on that side's own recorded inputs."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from ulpscope.model.names import Slot
from ulpscope.model.nouns import dataclass

__all__ = ["REPLAY_MODES", "CallReplay", "OperandFormat", "PairReplay", "ReplayMode", "SlotReplay", "SystemicPrecision"]

OperandFormat: TypeAlias = Literal["float16", "tf32", "bfloat16"]
"""The formats to which a machine may round the operands of matrix products."""
ReplayMode: TypeAlias = Literal["needed", "all", "none"]
"""Which calls of a comparison are replayed: differing calls until a fault is found, all differing calls, or none."""
REPLAY_MODES: tuple[ReplayMode, ...] = get_args(ReplayMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReplay:
    """How far one recorded result is from the exact one, in units of what an honest kernel errs on the same inputs.

    `max_ratio` and `rms_ratio` are over the elements. With `is_bound` they are upper bounds: small enough that no closer look was needed.
    `bias` is the projection statistic (a change of scale that no element shows by itself) and `scale` that change: recorded is (1 + scale)
    times exact. `num_nonfinite` counts NaN or infinities that stand where every honest computation is finite, or the reverse; `num_flipped`
    counts integers or booleans that differ although no probe changes them. `dtype` is the coarsest floating dtype of inputs and result.
    `error` is the rms error over the rms of the exact result, `honest_error` the same of the yardstick. `native_ratio` is the rms ratio of
    this machine's own kernel without its own error in the yardstick; None where nothing independent judges it. `leeway` multiplies the
    limits of the dtype where real machines are known to add up more coarsely. With `is_rounding` the units are other ones: what rounding
    the operands of products to a narrower format changes.
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
    """One side of one call, replayed. `why_not` says why no slot can be judged; `is_random`, that the call draws random numbers.

    `operands` is the format to which the operands of its products were rounded; `has_products` says whether it computes products.
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
    """The replays of both sides of a pair, each on its own inputs.

    `arguments` is the subject's call with the reference's arguments, measured against the subject's own exact result: the effect of a
    difference in arguments, in the same units. It is None where the arguments agree or cannot be exchanged.
    """

    subject: CallReplay
    reference: CallReplay
    arguments: CallReplay | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemicPrecision:
    """A family of calls that errs as operands in a narrower format do; `side` is None where only the distance between the sides is known.

    With `calls`, only these among the `num_family` calls of the family err so, and each was found by itself.
    """

    family: str
    operands: OperandFormat
    side: Literal["subject", "reference"] | None = None
    calls: tuple[str, ...] = ()
    num_family: int = 0
