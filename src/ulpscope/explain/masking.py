# SPDX-License-Identifier: Apache-2.0
"""One side masks with minus infinity, the other with the lowest number of its dtype: what comes of it tells whether that matters."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

from ulpscope.explain.contributions import entered, made
from ulpscope.model import DTYPES, ArgumentDifference, JudgedCall, TensorRecord

__all__ = ["values_of_another_mask"]

_PRINTED = 2.0**-20


def values_of_another_mask(call: JudgedCall, later: Sequence[JudgedCall]) -> set[str]:
    """The subject's values that differ because of such a number alone, where every call that takes them comes to the same result at last.

    A softmax does. A row that is masked wholly is NaN on one side then, and that is passed on: there are no such values then.
    """
    telling = [one for one in call.differences if not one.what.startswith(("strides of", "requires_grad of", "dtype of", "mode "))]
    sides = [record for slot in call.slots for record in (slot.pair.subject, slot.pair.reference) if record is not None]
    largest = {DTYPES[record.dtype].max for record in sides if record.dtype in DTYPES}
    if not telling or not all(_is_infinity(one, largest) for one in telling):
        return set()
    return _followed(call, later)


def _is_infinity(difference: ArgumentDifference, largest: set[float]) -> bool:
    try:
        ours, theirs = float(difference.subject), float(difference.reference)
    except ValueError:
        return False
    if isinf(ours) == isinf(theirs) or (ours < 0) != (theirs < 0):
        return False
    finite = theirs if isinf(ours) else ours
    return any(one and abs(abs(finite) - one) <= _PRINTED * one for one in largest)


def _followed(call: JudgedCall, later: Sequence[JudgedCall]) -> set[str]:
    """All values that differ in consequence; none if one of them is never taken, for then it is a result."""
    differing, taken = _values(call), set[str]()
    for other in later:
        record = other.pair.record
        if record.phase != "forward" or record.level != call.pair.record.level:
            continue
        found = {one for slot in entered(other) if (one := _value(slot.pair.subject)) in differing}
        if found:
            taken |= found
            differing |= _values(other)
    return differing if taken == differing else set()


def _values(call: JudgedCall) -> set[str]:
    return {value for slot in made(call) if slot.verdict.level == "differs" and (value := _value(slot.pair.subject)) is not None}


def _value(record: TensorRecord | None) -> str | None:
    return record.fingerprint if record is not None else None
