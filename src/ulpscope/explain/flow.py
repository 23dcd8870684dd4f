# SPDX-License-Identifier: Apache-2.0
"""The data flow of each side of a judged step, at the positions of its calls."""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.model import JudgedCall, JudgedSlot, Side, TensorRecord
from ulpscope.model.step_index import UNKNOWN, StepIndex

__all__ = ["Flows", "flow_of", "tensor_of", "value_in"]


def flow_of(calls: Sequence[JudgedCall], side: Side) -> StepIndex:
    """Index one side of the calls of one rank and step, given in execution order."""
    return StepIndex(call.pair.subject if side == "subject" else call.pair.reference for call in calls)


def tensor_of(slot: JudgedSlot, side: Side) -> TensorRecord | None:
    return slot.pair.subject if side == "subject" else slot.pair.reference


def value_in(flow: StepIndex, at: int, slot: JudgedSlot, side: Side) -> int:
    """Return the value that one side has in a slot of the call at a position."""
    tensor = tensor_of(slot, side)
    return UNKNOWN if tensor is None else flow.value(at, tensor.slot)


class Flows:
    """The flows of a step, each made when it is first asked for."""

    __slots__ = ("_made", "_positions")

    def __init__(self) -> None:
        self._made: dict[Side, StepIndex] = {}
        self._positions: dict[int, int] = {}

    def of(self, calls: Sequence[JudgedCall], side: Side) -> StepIndex:
        if side not in self._made:
            self._made[side] = flow_of(calls, side)
        return self._made[side]

    def position(self, calls: Sequence[JudgedCall], call: JudgedCall) -> int:
        if not self._positions:
            self._positions = {id(one): at for at, one in enumerate(calls)}
        return self._positions[id(call)]
