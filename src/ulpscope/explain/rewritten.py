# SPDX-License-Identifier: Apache-2.0
"""Follow a value that two programs compute differently to where they agree again: `x * rsqrt(v)` against `x / sqrt(v)`.

Such a value differs by its size and means nothing if everything made of it agrees. It has to agree nearly bit for bit: statistics do not
tell a tensor from a permutation of it, and the rounding of a coarser dtype may hide a difference instead of taking it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

from ulpscope.explain.contributions import made
from ulpscope.explain.flow import flow_of, tensor_of, value_in
from ulpscope.model import DTYPES, JudgedCall, JudgedSlot, Side, SummaryMeasurement, TensorMeasurement
from ulpscope.model.step_index import UNKNOWN, StepIndex

__all__ = ["is_written_otherwise", "values_that_vanish"]

_SIDES: tuple[Side, Side] = ("subject", "reference")
_NO_PROGRAM = ("strides of", "requires_grad of", "dtype of", "shape of", "mode ")
_NEAR = 2.0**-18
"""How near values are that agree: some tens of roundings in float32. Coarser dtypes have to agree bit for bit."""
_NEAR_SUM = 2.0**-22
"""How near a sum of them is, over a few of which differences even out that are no rounding."""
_DISCRETE = frozenset("round floor ceil trunc fix sign sgn heaviside floor_divide".split())
_SHRINKS = 16.0
"""By how much a difference is smaller, at least, where it has gone away."""


def is_written_otherwise(call: JudgedCall) -> bool:
    """Tell whether the programs ask for something else here: another operation, or another argument."""
    return any(not one.what.startswith(_NO_PROGRAM) for one in call.differences)


def values_that_vanish(calls: Sequence[JudgedCall], at: int) -> set[str]:
    """Return the fingerprints of all values that differ because of a call, if everything made of them agrees; else nothing.

    A backward pass also reads values that the forward pass has left, which no record says: so it has to end in agreement too.
    """
    flows = {side: flow_of(calls, side) for side in _SIDES}
    if not _ends_alike(calls, flows):
        return set()
    begin = [slot for slot in made(calls[at]) if slot.verdict.level != "same"]
    waiting = [one for slot in begin for one in _values(flows, at, slot)]
    seen = set(waiting)
    ends: dict[Side, set[str | None]] = {"subject": set(), "reference": set()}
    while waiting:
        side, value = waiting.pop()
        if value == UNKNOWN:
            return set()
        made_of_it = [later for later in flows[side].readers(value) if later > at and _results(flows[side], later)]
        if not made_of_it:
            ends[side].add(flows[side].tensor(value).fingerprint)
        for later in made_of_it:
            if calls[later].pair.subject is None or calls[later].pair.reference is None:
                found = [(side, one) for one in _results(flows[side], later)]
            elif _hides(calls[later]):
                return set()
            else:
                apart = [slot for slot in made(calls[later]) if not any(_is_gone(slot, start) for start in begin)]
                found = [one for slot in apart for one in _values(flows, later, slot)]
            waiting += [one for one in found if one not in seen]
            seen.update(found)
    if ends["subject"] != ends["reference"] or None in ends["subject"]:  # no call takes these: they have to be the same bits
        return set()
    return {fingerprint for side, value in seen if (fingerprint := flows[side].tensor(value).fingerprint)}


def _ends_alike(calls: Sequence[JudgedCall], flows: dict[Side, StepIndex]) -> bool:
    """Tell whether gradients that no call takes agree, nearly by the size of the largest, and optimizers make nothing else of them."""
    last: list[JudgedSlot] = []
    for at, call in enumerate(calls):
        phase = call.pair.record.phase
        if phase == "optimizer":
            if call.pair.subject is None or call.pair.reference is None or any(_is_apart(slot) for slot in made(call)):
                return False
            last += [slot for slot in call.slots if slot.pair.slot.role == "gradient"]
        elif phase == "backward":
            last += [slot for slot in made(call) if not any(flows[side].readers(one) for side, one in _values(flows, at, slot))]
    largest = max(map(_rms, last), default=0.0)
    return not any(_is_apart(slot) or _distance(slot) * _rms(slot) > _NEAR * largest for slot in last)


def _is_apart(slot: JudgedSlot) -> bool:
    return slot.verdict.level not in ("same", "rounding")


def _distance(slot: JudgedSlot) -> float:
    """Return how far the two sides are apart, at least; infinity where nothing tells."""
    if slot.verdict.level == "same":
        return 0.0
    return slot.measurement.distance if isinstance(slot.measurement, (TensorMeasurement, SummaryMeasurement)) else inf


def _rms(slot: JudgedSlot) -> float:
    summary = slot.pair.reference.summary if slot.pair.reference is not None else None
    return summary.rms or 0.0 if summary is not None else 0.0


def _numel(slot: JudgedSlot) -> int:
    return prod(slot.pair.subject.shape) if slot.pair.subject is not None else 0


def _results(flow: StepIndex, at: int) -> list[int]:
    record = flow.records[at]
    return [] if record is None else [flow.value(at, slot.slot) for slot in record.slots if not record.receives(slot.slot)]


def _hides(call: JudgedCall) -> bool:
    """Tell whether a call gives the same for values that differ: a comparison, a rounded number."""
    results = [side for slot in made(call) for side in (slot.pair.subject, slot.pair.reference) if side is not None]
    kinds = [DTYPES.get(side.dtype) for side in results]
    return call.pair.record.call.short.rstrip("_") in _DISCRETE or any(one is None or not one.is_floating for one in kinds)


def _values(flows: dict[Side, StepIndex], at: int, slot: JudgedSlot) -> list[tuple[Side, int]]:
    return [(side, value_in(flows[side], at, slot, side)) for side in _SIDES if tensor_of(slot, side) is not None]


def _is_gone(slot: JudgedSlot, start: JudgedSlot) -> bool:
    """Tell whether the two sides of a result are as near as the same arithmetic in another order, and much nearer than at the start."""
    if slot.verdict.level == "same":
        return True
    found, before = slot.measurement, start.measurement
    size = before.distance if isinstance(before, (TensorMeasurement, SummaryMeasurement)) else 0.0
    limit = _NEAR_SUM if 8 * _numel(slot) <= _numel(start) else _NEAR
    limit = min(limit, size / _SHRINKS if size else limit)
    if isinstance(found, SummaryMeasurement):
        is_one = slot.pair.subject is not None and slot.pair.subject.shape in ((), (1,))
        return (found.distance > 0 or is_one) and found.distance <= limit
    return isinstance(found, TensorMeasurement) and found.distance <= limit
