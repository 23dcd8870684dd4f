# SPDX-License-Identifier: Apache-2.0
"""+0 and -0 are equal numbers, and not the same input to what jumps at zero: a quotient, an angle, a sign, a branch cut.

By mathematics these are the functions whose limits from the two sides of zero differ, or whose derivative's do. All others give equal
results on both zeros, up to the sign of a zero that they return.
"""

from __future__ import annotations

from ulpscope.judge.allowance.conditioning import plain_name
from ulpscope.model import DTYPES, CallRecord, Measurement, NotMeasured, SlotPair

__all__ = ["has_other_zeros", "tells_zeros_apart"]

_QUOTIENTS = "div divide true_divide truediv rtruediv itruediv rdiv idiv floor_divide floordiv reciprocal rsqrt addcdiv"
_POWERS = "pow float_power rpow ipow"
_SIGNS = "signbit copysign atan2 arctan2 angle arg view"  # a view may be of the same bits in another dtype
_POLES = "digamma psi polygamma lgamma gammaln"
_BRANCHES = "sqrt log log2 log10 asin arcsin acos arccos atan arctan asinh arcsinh acosh arccosh atanh arctanh"
_TELLING = frozenset(f"{_QUOTIENTS} {_POWERS} {_SIGNS} {_POLES} {_BRANCHES}".split())


def tells_zeros_apart(record: CallRecord) -> bool:
    """Whether a call, or the derivative of what it computes, gives something else for +0 than for -0."""
    return record.level != "module" and plain_name(record.call).removeprefix("_foreach_").removeprefix("foreach_") in _TELLING


def has_other_zeros(slot: SlotPair, measurement: Measurement) -> bool:
    """Whether two values are equal number by number, and not bit by bit."""
    ours, theirs = slot.subject, slot.reference
    if isinstance(measurement, NotMeasured) or measurement.equal is False or ours is None or theirs is None:
        return False
    if not ours.fingerprint or not theirs.fingerprint or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    known = DTYPES.get(ours.dtype)
    is_floating = known is not None and (known.is_floating or known.kind == "complex")
    same_scheme = ours.fingerprint.partition(":")[0] == theirs.fingerprint.partition(":")[0]
    zeros = ours.summary.num_zero if ours.summary is not None else None
    return is_floating and same_scheme and ours.fingerprint != theirs.fingerprint and zeros != 0
