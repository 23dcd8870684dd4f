# SPDX-License-Identifier: Apache-2.0
"""One side masks with minus infinity, the other with the lowest number of its dtype: what comes of it tells whether that matters."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

from ulpscope.explain.contributions import entered, made
from ulpscope.explain.flow import flow_of, value_in
from ulpscope.model import DTYPES, ArgumentDifference, JudgedCall
from ulpscope.model.step_index import UNKNOWN, StepIndex

__all__ = ["values_of_another_mask"]

_PRINTED = 2.0**-20


def values_of_another_mask(calls: Sequence[JudgedCall], at: int) -> set[str]:
    """The subject's values that differ because of such a number in one call alone, as fingerprints.

    There are some where every call that takes them comes to the same result at last.
    A softmax does. A row that is masked wholly is NaN on one side then, and that is passed on: there are no such values then.
    """
    call = calls[at]
    telling = [one for one in call.differences if not one.what.startswith(("strides of", "requires_grad of", "dtype of", "mode "))]
    sides = [record for slot in call.slots for record in (slot.pair.subject, slot.pair.reference) if record is not None]
    largest = {DTYPES[record.dtype].max for record in sides if record.dtype in DTYPES}
    if not telling or not all(_is_infinity(one, largest) for one in telling):
        return set()
    return _followed(calls, at)


def _is_infinity(difference: ArgumentDifference, largest: set[float]) -> bool:
    try:
        ours, theirs = float(difference.subject), float(difference.reference)
    except ValueError:
        return False
    if isinf(ours) == isinf(theirs) or (ours < 0) != (theirs < 0):
        return False
    finite = theirs if isinf(ours) else ours
    return any(one and abs(abs(finite) - one) <= _PRINTED * one for one in largest)


def _followed(calls: Sequence[JudgedCall], at: int) -> set[str]:
    """All values that differ in consequence; none if one of them is never taken, for then it is a result."""
    flow = flow_of(calls, "subject")
    differing, taken = set(_made_otherwise(flow, calls, at)), set[int]()
    for later in range(at + 1, len(calls)):
        record = calls[later].pair.record
        if record.phase != "forward" or record.level != calls[at].pair.record.level:
            continue
        found = differing.intersection(value_in(flow, later, slot, "subject") for slot in entered(calls[later]))
        if found:
            taken |= found
            differing.update(_made_otherwise(flow, calls, later))
    return {flow.tensor(value).fingerprint or "" for value in differing} if taken == differing else set()


def _made_otherwise(flow: StepIndex, calls: Sequence[JudgedCall], at: int) -> list[int]:
    values = (value_in(flow, at, slot, "subject") for slot in made(calls[at]) if slot.verdict.level == "differs")
    return [value for value in values if value != UNKNOWN]
