# SPDX-License-Identifier: Apache-2.0
"""Constants that programs write as a limit of a dtype: `torch.finfo(x.dtype).min` as a mask, its `eps` or `tiny` as a guard.

In bfloat16 and in float32 these are two numbers and one argument. What counts is that each is the same limit of a dtype that its own side
works in, so that a limit of some other dtype, or any other large number, stays a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ulpscope.model import DTYPES, Arguments, CallRecord, DType

__all__ = ["are_same_limit", "with_own_limits"]

_MOST_TIMES = 16
"""Programs take a few epsilons, or ten of the smallest number, but whole ones: 0.8 and 0.1 are no multiples of two epsilons."""
_LEAST_PART = 1 / 1024
"""They take half of the largest number, or a tenth, where it is so large that nothing else is meant."""
_LARGE = 1e4
_FEW_BITS = 7
"""With fewer fraction bits than bfloat16 an epsilon is a quarter or an eighth, which programs write for other reasons."""
_FLOATING = tuple(DTYPES[name] for name in ("float64", "float32", "float16", "bfloat16"))
_PRINTED = 2.0**-20
"""How exactly a limit is met, relative to its size: some tools write arguments with seven digits."""


def are_same_limit(ours: Any, theirs: Any, subject: CallRecord, reference: CallRecord) -> bool:
    """Tell whether two numbers are the same limit, or the same multiple of one, each of a dtype of its own side."""
    if not (_is_number(ours) and _is_number(theirs)):
        return False
    return any(
        _is_same_multiple(ours, theirs, own, other)
        for one in _dtypes_of(subject)
        for another in _dtypes_of(reference)
        for own, other in zip(_limits(one), _limits(another), strict=False)
        if one.is_floating == another.is_floating
    )


def with_own_limits(subject: CallRecord, reference: CallRecord) -> Arguments | None:
    """The reference's arguments, with the subject's numbers where both are the same limit of their dtypes."""
    ours, theirs = subject.arguments, reference.arguments
    if ours is None or theirs is None:
        return theirs
    args, kwargs = (_mixed(one, other, subject, reference) for one, other in ((ours.args, theirs.args), (ours.kwargs, theirs.kwargs)))
    return replace(theirs, args=args, kwargs=kwargs)


def _mixed(ours: Any, theirs: Any, subject: CallRecord, reference: CallRecord) -> Any:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return {key: _mixed(ours.get(key), value, subject, reference) for key, value in theirs.items()}
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)) and len(ours) == len(theirs):
        return type(theirs)(_mixed(one, other, subject, reference) for one, other in zip(ours, theirs, strict=True))
    return ours if ours != theirs and are_same_limit(ours, theirs, subject, reference) else theirs


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dtypes_of(record: CallRecord) -> list[DType]:
    """The dtypes that a side works in around a call; where nothing tells, for a constant that is made from nothing, all that there are."""
    modes, arguments = record.modes, record.arguments
    names = {slot.dtype for slot in record.slots}
    names |= {modes.autocast.rpartition(":")[2]} if modes is not None and modes.autocast else set()
    names |= set(_named_dtypes([*arguments.args, *(arguments.kwargs or {}).values()])) if arguments is not None else set()
    known = [DTYPES[name] for name in sorted(names) if name in DTYPES]
    if any(slot.slot.role == "input" and DTYPES[slot.dtype].is_floating for slot in record.slots if slot.dtype in DTYPES):
        return known
    return [*_FLOATING, *(one for one in known if not one.is_floating)]


def _named_dtypes(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, dict) and isinstance(value.get("$dtype"), str):
            yield value["$dtype"].removeprefix("torch.")


def _limits(dtype: DType) -> tuple[float, ...]:
    """The largest and the smallest number and the epsilon of a floating dtype; the largest and the lowest integer of another."""
    if dtype.is_floating and dtype.mantissa < _FEW_BITS:
        return (dtype.max,)
    if dtype.is_floating:
        return dtype.max, dtype.tiny, dtype.eps, dtype.tiny * dtype.eps
    bits = 8 * dtype.size_bytes
    return (2.0**bits - 1, 0.0) if dtype.kind == "uint" else (2.0 ** (bits - 1) - 1, -(2.0 ** (bits - 1))) if dtype.kind == "int" else ()


def _is_same_multiple(ours: float, theirs: float, own: float, other: float) -> bool:
    if not own or not other:
        return ours == own and theirs == other
    times = theirs / other
    is_part = min(own, other) > _LARGE and _LEAST_PART <= abs(times) <= 1
    is_multiple = max(own, other) < 1 and 1 <= times <= _MOST_TIMES and _is_near(times, round(times))
    return (is_part or is_multiple or _is_near(abs(times), 1.0)) and _is_near(ours / own, times)


def _is_near(value: float, other: float) -> bool:
    return abs(value - other) <= _PRINTED * abs(other)
