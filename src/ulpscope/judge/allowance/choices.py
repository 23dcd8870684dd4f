# SPDX-License-Identifier: Apache-2.0
"""Results that nothing determines fully: an honest machine may choose otherwise. Asked only where no replay can tell.

The factors of a matrix are unique up to signs (or a rotation), which leave their rms alone. A sort may put equal keys in
any order, which leaves every statistic of its indices alone; a search may find any of several equal elements. What does not agree in
that is no choice but a fault.
"""

from __future__ import annotations

from math import isfinite

from ulpscope.judge.allowance.allowances import Allowance
from ulpscope.judge.allowance.conditioning import plain_name
from ulpscope.judge.allowance.sizes import dtypes_of
from ulpscope.model import DTYPES, Pair, SlotPair, Summary, TensorRecord

__all__ = ["free_choice"]

_SORTS = frozenset(("sort", "argsort", "msort"))
_SEARCHES = frozenset(
    "topk kthvalue mode median nanmedian max min argmax argmin cummax cummin max_pool1d_with_indices max_pool2d_with_indices "
    "max_pool3d_with_indices adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices".split()
)


def free_choice(pair: Pair, slot: SlotPair, allowance: Allowance) -> str:
    """Why what was recorded may be another choice that is as good; empty where it cannot be."""
    if slot.subject is None or slot.reference is None or slot.subject.summary is None or slot.reference.summary is None:
        return ""
    if pair.record.phase != "forward" or pair.record.level == "module":
        return ""
    ours, theirs = slot.subject.summary, slot.reference.summary
    if slot.slot.path[:1] and slot.slot.path[0] in pair.record.call.free_signs:
        return "the same but for signs, which nothing determines" if _same_size(ours, theirs, allowance) else ""
    if _is_index(slot) and not allowance.entering and _other_results_agree(pair, slot):
        return _free_index(pair, ours, theirs)
    return ""


def _same_size(ours: Summary, theirs: Summary, allowance: Allowance) -> bool:
    if ours.rms is None or theirs.rms is None or ours.num_nonfinite != theirs.num_nonfinite:
        return False
    return isfinite(ours.rms) and abs(ours.rms - theirs.rms) <= allowance.limit


def _is_index(slot: SlotPair) -> bool:
    return all(one.kind in ("int", "uint") for one in dtypes_of(slot))


def _free_index(pair: Pair, ours: Summary, theirs: Summary) -> str:
    name = plain_name(pair.record.call)
    if name in _SORTS and _moments(ours) == _moments(theirs):
        return "the same indices in another order, which is free among equal keys"
    given = next((one.subject for one in pair.slots if pair.record.receives(one.slot)), None)
    if name in _SEARCHES and given is not None and _may_repeat(given) and all(_is_inside(one, given) for one in (ours, theirs)):
        return "other indices of what may be equal elements"
    return ""


def _moments(summary: Summary) -> tuple[float | None, ...]:
    return summary.min, summary.max, summary.mean, summary.rms


def _other_results_agree(pair: Pair, slot: SlotPair) -> bool:
    """Bitwise: what was picked is what the other side picked."""
    others = [one for one in pair.slots if one is not slot and not pair.record.receives(one.slot)]
    return all(one.subject and one.reference and _bits(one.subject) == _bits(one.reference) for one in others)


def _bits(record: TensorRecord) -> tuple[str | None, str]:
    return record.fingerprint, record.dtype


def _may_repeat(given: TensorRecord) -> bool:
    """Whether elements are equal for certain (more integers than values, several zeros) or most likely (few fraction bits)."""
    summary, dtype = given.summary, DTYPES.get(given.dtype)
    if summary is None or dtype is None or summary.min is None or summary.max is None:
        return False
    if not dtype.is_floating:
        return summary.numel > summary.max - summary.min + 1
    return dtype.mantissa < DTYPES["float32"].mantissa or (summary.num_zero or 0) > 1


def _is_inside(index: Summary, given: TensorRecord) -> bool:
    size = given.summary.numel if given.summary else 0
    return index.min is not None and index.max is not None and index.min >= 0 and index.max < size
