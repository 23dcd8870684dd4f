# SPDX-License-Identifier: Apache-2.0
"""Follow a value that two programs compute differently to where they agree again: `x * rsqrt(v)` against `x / sqrt(v)`.

Such a value differs by its size and means nothing if everything made of it agrees. It has to agree nearly bit for bit: statistics do not
tell a tensor from a permutation of it, and the rounding of a coarser dtype may hide a difference instead of taking it away.
"""

from __future__ import annotations

from collections.abc import Sequence

from ulpscope.explain.contributions import made
from ulpscope.explain.flow import flow_of, tensor_of, value_in
from ulpscope.model import DTYPES, JudgedCall, JudgedSlot, Side, SummaryMeasurement, TensorMeasurement
from ulpscope.model.step_index import UNKNOWN, StepIndex

__all__ = ["is_written_otherwise", "values_that_vanish"]

_SIDES: tuple[Side, Side] = ("subject", "reference")
_NO_PROGRAM = ("strides of", "requires_grad of", "dtype of", "shape of", "mode ")
_NEAR = 2.0**-18
"""How near float32 and finer values are that agree: some tens of roundings."""
_UNITS = 2.0
"""The same for coarser dtypes, in their epsilons."""
_SHRINKS = 16.0
"""By how much a difference is smaller, at least, where it has gone away."""


def is_written_otherwise(call: JudgedCall) -> bool:
    """Tell whether the programs ask for something else here: another operation, or another argument."""
    return any(not one.what.startswith(_NO_PROGRAM) for one in call.differences)


def values_that_vanish(calls: Sequence[JudgedCall], at: int) -> set[str]:
    """Return the fingerprints of all values that differ because of a call, if everything made of them agrees; else nothing."""
    flows = {side: flow_of(calls, side) for side in _SIDES}
    begin = [slot for slot in made(calls[at]) if slot.verdict.level != "same"]
    waiting = [one for slot in begin for one in _values(flows, at, slot)]
    seen = set(waiting)
    while waiting:
        side, value = waiting.pop()
        if value == UNKNOWN:
            return set()
        made_of_it = [later for later in flows[side].readers(value) if later > at and _results(flows[side], later)]
        if not made_of_it:
            return set()
        for later in made_of_it:
            if calls[later].pair.subject is None or calls[later].pair.reference is None:
                found = [(side, one) for one in _results(flows[side], later)]
            else:
                apart = [slot for slot in made(calls[later]) if not any(_is_gone(slot, start) for start in begin)]
                found = [one for slot in apart for one in _values(flows, later, slot)]
            waiting += [one for one in found if one not in seen]
            seen.update(found)
    return {fingerprint for side, value in seen if (fingerprint := flows[side].tensor(value).fingerprint)}


def _results(flow: StepIndex, at: int) -> list[int]:
    record = flow.records[at]
    return [] if record is None else [flow.value(at, slot.slot) for slot in record.slots if not record.receives(slot.slot)]


def _values(flows: dict[Side, StepIndex], at: int, slot: JudgedSlot) -> list[tuple[Side, int]]:
    return [(side, value_in(flows[side], at, slot, side)) for side in _SIDES if tensor_of(slot, side) is not None]


def _is_gone(slot: JudgedSlot, start: JudgedSlot) -> bool:
    """Tell whether the two sides of a result are as near as the same arithmetic in another order, and much nearer than at the start."""
    if slot.verdict.level == "same":
        return True
    known = [DTYPES.get(side.dtype) for side in (slot.pair.subject, slot.pair.reference) if side is not None]
    begin = [DTYPES.get(side.dtype) for side in (start.pair.subject, start.pair.reference) if side is not None]
    epsilons, first = ([one.eps for one in dtypes if one is not None and one.is_floating] for dtypes in (known, begin))
    if len(known) < 2 or len(epsilons) < 2 or (first and max(epsilons) > max(first)):
        return False
    limit = max(_NEAR, _UNITS * max(epsilons))
    found, before = slot.measurement, start.measurement
    if isinstance(found, SummaryMeasurement):
        is_one = slot.pair.subject is not None and slot.pair.subject.shape in ((), (1,))
        return (found.distance > 0 or is_one) and found.distance <= limit
    size = before.distance if isinstance(before, (TensorMeasurement, SummaryMeasurement)) else 0.0
    return isinstance(found, TensorMeasurement) and found.distance <= min(limit, size / _SHRINKS if size else limit)
