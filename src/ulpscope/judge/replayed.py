# SPDX-License-Identifier: Apache-2.0
"""A result judged by replay: each side against the exact result on its own inputs, in units of what an honest kernel errs there.

Nothing here looks at how far the two sides are apart: inherited errors are no fault of the call that passes them on, however much it
magnifies them.
"""

from __future__ import annotations

from math import inf, isinf, sqrt

from ulpscope.judge.allowance.allowances import Allowance
from ulpscope.judge.allowance.sizes import distance, dtypes_of, is_equal, scale_apart
from ulpscope.judge.thresholds import threshold
from ulpscope.model import (
    DTYPES,
    Amplification,
    CallReplay,
    JudgedSlot,
    Measurement,
    PairReplay,
    Side,
    SlotPair,
    SlotReplay,
    TensorMeasurement,
    Verdict,
)

__all__ = ["errs", "is_beyond_doubt", "judge_replayed", "multiple_of", "replay_limits"]

_FEW = 64
_SMALLEST_SCALE = 2.0**-40
"""Sums in float64 do not tell a smaller change of scale from none."""


def judge_replayed(
    slot: SlotPair, found: Measurement, allowance: Allowance, replay: PairReplay, across: Verdict, *, is_free: bool = False
) -> Verdict | None:
    """The verdict by replay, or None where it cannot tell; `across` is the verdict from the distance of the two sides.

    `is_free`: the result is one of several that are as good, and each side was held against the one that it chose.

    Two sides that agree and both err beyond their limits did not do what the replay does: nothing here tells them apart.
    """
    if slot.subject is None or slot.reference is None or is_equal(found):
        return None
    ours, theirs = replay.subject.of(slot.slot), replay.reference.of(slot.slot)
    if ours is None:
        return None
    own, other = multiple_of(ours), multiple_of(theirs) if theirs is not None else 0.0
    if min(own, other) > 1 and across.level != "differs":
        return None
    if own > 1:
        return Verdict("differs", "replayed", _both("subject", ours, theirs), own, "subject")
    if theirs is not None and other > 1:
        return Verdict("differs", "replayed", _both("reference", theirs, ours), other, "reference")
    if replay.arguments is not None:
        exchanged = _arguments_verdict(slot, replay.arguments)
        if exchanged is not None or not replay.arguments.slots:
            return exchanged
    if theirs is None:
        return None
    return _honest(slot, found, ours, theirs, allowance, across, is_alike=replay.arguments is None, is_free=is_free)


def _both(side: Side, blamed: SlotReplay, other: SlotReplay | None) -> str:
    text = f"the {side} errs {errs(blamed)} what an honest {blamed.dtype} kernel errs on the same inputs"
    if other is not None:
        text += f"; the {'reference' if side == 'subject' else 'subject'} errs {errs(other, like=blamed)}"
    return f"{text}{_yardstick(blamed)}"


def _yardstick(found: SlotReplay) -> str:
    """What the figure is of, and the multiple that tables have: over the limit for honest kernels."""
    if isinf(multiple_of(found)):
        return ""
    kind, multiple = max(_multiples(found), key=lambda one: one[1])
    what = {"max": "its worst element", "rms": "all its elements", "bias": "the scale that its elements share"}[kind]
    of = "the worst element" if _is_peak(found) else "rms over its elements"
    return f" ({of}; {what} {'is' if kind != 'rms' else 'are'} {multiple / found.leeway:.3g}x the limit for honest kernels)"


def _arguments_verdict(slot: SlotPair, exchanged: CallReplay) -> Verdict | None:
    found = exchanged.of(slot.slot)
    if found is None or (multiple := multiple_of(found)) <= 1:
        return None
    return Verdict("differs", "arguments", f"the reference's arguments change it by {errs(found)} what rounding explains", multiple)


def _honest(
    slot: SlotPair,
    found: Measurement,
    ours: SlotReplay,
    theirs: SlotReplay,
    allowance: Allowance,
    across: Verdict,
    *,
    is_alike: bool,
    is_free: bool,
) -> Verdict | None:
    """Both sides did what their own inputs say; what makes their results differ then enters, is magnified, or is decided on a near tie.

    `is_alike`: the two sides were called alike. Neither a decision nor a magnified difference excuses a result whose inputs could
    not be compared. Where arguments differ and change nothing when they are exchanged, they are limits of two dtypes, and the results
    differ by these.
    """
    own = max(multiple_of(ours), multiple_of(theirs))
    sizes = f"subject errs {errs(ours)}, reference {errs(theirs)} what an honest kernel errs"
    if not allowance.inputs_agree:
        return Verdict("differs", "replayed", f"no more than its inputs explain: {sizes}", own)
    if across.level == "rounding" and across.rule != "amplified":
        return Verdict("rounding", "replayed", sizes, own)
    is_of_other_shape = slot.subject is None or slot.subject.shape != _shape(slot)
    if not allowance.inputs_known or (is_of_other_shape and not is_alike):
        if across.level != "differs":
            return None
        return Verdict("differs", "unexplained", f"each side did what it was given, and that cannot be compared: {sizes}", across.multiple)
    if is_of_other_shape or not any(one.is_floating for one in dtypes_of(slot)):
        return Verdict("rounding", "fork", f"a near tie falls the other way: {sizes}", own)
    if Amplification.of(allowance.entering, distance(found)) is None:
        if not allowance.entering and not is_free and _is_beyond_both(slot, found, ours, theirs):
            return Verdict(
                "differs", "unexplained", f"each side did what it was given, and nothing recorded differs: {sizes}", across.multiple
            )
        return Verdict("rounding", "replayed", sizes, own)
    return Verdict("rounding", "amplified", f"the call magnifies the difference of its inputs: {sizes}", own)


def _is_beyond_both(slot: SlotPair, found: Measurement, ours: SlotReplay, theirs: SlotReplay) -> bool:
    """Whether two sides are farther apart than both are from what their inputs give: then they were not given the same.

    That is the triangle inequality for the rms, to which one element adds the root of the number of elements at most.
    """
    apart = distance(found)
    if apart is None or ours.error is None or theirs.error is None:
        return False
    return apart > 2 * (ours.error + theirs.error) * max(1.0, sqrt(ours.numel) / threshold("peak"))


def _shape(slot: SlotPair) -> tuple[int, ...] | None:
    return slot.reference.shape if slot.reference else None


def is_beyond_doubt(slot: JudgedSlot) -> bool:
    """Whether a result that was judged without a replay is so near that no replay would blame a side.

    One that errs beyond its limit errs by that many units of the size of the result at least, and the other side does not err alike. An
    element counts by at least a quarter of the size of the tensor (the pooling of the yardstick), and a change of scale needs a mean error
    of its own size, so no element shows it: it is told by how much of the one side the other is.
    """
    found, verdict, known = slot.measurement, slot.verdict, dtypes_of(slot.pair)
    if is_equal(found) or verdict.level == "same":
        return True
    if not isinstance(found, TensorMeasurement) or (verdict.level, verdict.rule) != ("rounding", "derived"):
        return False
    if found.num_nan_disagree or found.num_inf_disagree or not all(one.is_floating for one in known):
        return False
    finest = min(known, key=lambda one: one.eps)
    units = found.distance / (finest.eps / 2)
    if finest.mantissa < 23:
        return units <= threshold("foreseen_low")
    if found.numel >= _FEW and scale_apart(found) > threshold("foreseen_scale") * finest.eps / 2 > _SMALLEST_SCALE:
        return False
    is_well_within = (verdict.multiple or 0.0) <= threshold("foreseen_share")
    return units <= threshold("foreseen_far" if is_well_within else "foreseen")


def multiple_of(found: SlotReplay) -> float:
    """How many times its limit a side errs; above 1 no honest kernel does."""
    if found.num_nonfinite or found.num_flipped:
        return inf
    return max(multiple for _, multiple in _multiples(found)) / (1.0 if found.is_rounding else found.leeway)


def replay_limits(dtype: str) -> tuple[float, float]:
    """The largest and the rms ratio that an honest kernel reaches in a dtype."""
    return _limit("max", dtype), _limit("rms", dtype)


def errs(found: SlotReplay, *, like: SlotReplay | None = None) -> str:
    """`212x`: the rms ratio, or the largest where only that is beyond its limit; of two sides the same for both."""
    if found.num_nonfinite or found.num_flipped:
        return "beyond all measure"
    ratio = found.max_ratio if _is_peak(like or found) else found.rms_ratio
    if ratio >= 10:
        return f"{ratio:.0f}x" if ratio < 1e5 else f"{ratio:.3g}x"
    return f"{'less than ' if found.is_bound and ratio else ''}{ratio:.2g}x"


def _is_peak(found: SlotReplay) -> bool:
    """Whether only the largest error of an element is beyond its limit."""
    multiples = dict(_multiples(found))
    return multiples["max"] > 1 >= max(multiples.get("rms", 0.0), multiples.get("bias", 0.0))


def _multiples(found: SlotReplay) -> list[tuple[str, float]]:
    """Each statistic over its limit; over a few elements only the largest tells more than chance."""
    limit = _limit_of_rounding if found.is_rounding else _limit
    room = found.leeway if found.is_rounding else 1.0
    multiples = [("max", found.max_ratio / limit("max", found.dtype) / room)]
    if found.numel >= _FEW:
        multiples.append(("rms", found.rms_ratio / limit("rms", found.dtype) / room))
        multiples.append(("bias", (found.bias or 0.0) / sqrt(found.numel) / limit("bias", found.dtype)))
    return multiples


def _limit_of_rounding(kind: str, dtype: str) -> float:
    """The same in units of what rounding the operands of products changes, whatever the dtype."""
    return threshold(f"operands_{kind}")


def _limit(kind: str, dtype: str) -> float:
    known = DTYPES.get(dtype)
    low = "_low" if known is not None and known.is_floating and known.mantissa < 23 else ""
    return threshold(f"replay_{kind}{low}")
