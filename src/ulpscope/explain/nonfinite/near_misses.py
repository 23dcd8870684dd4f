# SPDX-License-Identifier: Apache-2.0
"""How near calls came to the ends of their dtypes while all was well: headroom to overflow, and what sank into subnormals or to zero."""

from __future__ import annotations

from collections.abc import Iterable

from ulpscope.model import DTYPES, CallRecord, NearMiss, Phase, TensorRecord
from ulpscope.numerics.nonfinite_rule import kinds_of

__all__ = ["NearMisses"]

_MOST = 40
_AMPLE = 2.0**16
# Where a zero in the result that no input had can only be a value that sank below the smallest number.
_SHRINKING = frozenset("mul mul_ __mul__ exp softmax square pow div div_ __truediv__ sigmoid to half bfloat16 _to_copy prod".split())


class NearMisses:
    """Collects the tightest moment of each call over steps and ranks."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, str], NearMiss] = {}

    def take(self, record: CallRecord) -> None:
        if record.call.op == "state.range":
            for slot in record.slots:
                self._add(_of_range(record, slot))
        elif record.level != "state":
            for slot in record.slots:
                if not record.receives(slot.slot):
                    self._add(_of_slot(record, slot))

    def ranked(self) -> tuple[NearMiss, ...]:
        """The least headroom first, then the largest shares that sank; what is far from every end is left out."""
        worth = [miss for miss in self._found.values() if miss.headroom < _AMPLE or miss.subnormal_share > 0 or miss.zero_share > 0]
        tight = sorted((miss for miss in worth if miss.headroom < _AMPLE), key=lambda miss: miss.headroom)
        sunk = sorted((miss for miss in worth if miss not in tight), key=lambda miss: -max(miss.subnormal_share, miss.zero_share))
        return tuple((tight + sunk)[:_MOST])

    def _add(self, miss: NearMiss | None) -> None:
        if miss is None:
            return
        key = (miss.module, miss.call, miss.phase, miss.slot)
        known = self._found.get(key)
        if known is None or _rank(miss) < _rank(known):
            self._found[key] = miss


def _rank(miss: NearMiss) -> tuple[float, float]:
    return miss.headroom, -max(miss.subnormal_share, miss.zero_share)


def _of_slot(record: CallRecord, slot: TensorRecord) -> NearMiss | None:
    summary, entry = slot.summary, DTYPES.get(slot.dtype)
    if summary is None or entry is None or not entry.is_floating or kinds_of(summary, slot.dtype):
        return None
    largest = summary.abs_max if summary.abs_max is not None else summary.max
    if not largest or not summary.numel:
        return None
    return NearMiss(
        module=record.module,
        call=str(record.call),
        phase=record.phase,
        slot=str(slot.slot),
        dtype=slot.dtype,
        step=record.step,
        rank=record.rank,
        largest=largest,
        headroom=entry.max / largest,
        subnormal_share=(summary.num_subnormal or 0) / summary.numel,
        zero_share=_sunk(record, slot),
        source=record.source,
    )


def _sunk(record: CallRecord, slot: TensorRecord) -> float:
    """The share of elements that became zero in this call, where nothing but rounding makes a zero of them."""
    summary = slot.summary
    if summary is None or not summary.num_zero or record.call.short not in _SHRINKING or record.phase != "forward":
        return 0.0
    entered = [other.summary for other in record.slots if record.receives(other.slot)]
    if not entered or any(other is None or other.num_zero != 0 or other.num_neginf for other in entered) or _has_zero_factor(record):
        return 0.0
    return summary.num_zero / summary.numel


def _has_zero_factor(record: CallRecord) -> bool:
    values: Iterable[object] = record.arguments.args if record.arguments is not None else ()
    return any(isinstance(value, (int, float)) and value == 0 for value in values)


def _of_range(record: CallRecord, slot: TensorRecord) -> NearMiss | None:
    """What the watch remembers of each call: its path is module, operation, phase."""
    entry, summary = DTYPES.get(slot.dtype), slot.summary
    if entry is None or summary is None or len(slot.slot.path) != 3 or summary.max is None:
        return None
    module, op, phase = (str(part) for part in slot.slot.path)
    largest = summary.abs_max if summary.abs_max is not None else summary.max
    if not largest:
        return None
    step = slot.note.removeprefix("step ")
    return NearMiss(
        module=module,
        call=op,
        phase=_phase(phase),
        slot="output",
        dtype=slot.dtype,
        step=int(step) if step.isdigit() else record.step,
        rank=record.rank,
        largest=largest,
        headroom=entry.max / largest,
    )


def _phase(text: str) -> Phase:
    return "backward" if text == "backward" else "forward"
