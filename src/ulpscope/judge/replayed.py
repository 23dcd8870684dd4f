# SPDX-License-Identifier: Apache-2.0
"""A result judged by replay: each side against the exact result on its own inputs, in units of what an honest kernel errs there.

Nothing here looks at how far the two sides are apart: inherited errors are no fault of the call that passes them on, however much it
magnifies them.
"""

from __future__ import annotations

from math import inf, sqrt

from ulpscope.judge.allowances import Allowance
from ulpscope.judge.sizes import dtypes_of, is_equal
from ulpscope.judge.thresholds import threshold
from ulpscope.model import DTYPES, CallReplay, JudgedSlot, Measurement, PairReplay, Side, SlotPair, SlotReplay, TensorMeasurement, Verdict

__all__ = ["errs", "is_beyond_doubt", "judge_replayed", "multiple_of", "replay_limits"]

_FEW = 64


def judge_replayed(slot: SlotPair, found: Measurement, allowance: Allowance, replay: PairReplay, across: Verdict) -> Verdict | None:
    """The verdict by replay, or None where it cannot tell; `across` is the verdict from the distance of the two sides.

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
    return _honest(slot, ours, theirs, allowance, across) if theirs is not None else None


def _both(side: Side, blamed: SlotReplay, other: SlotReplay | None) -> str:
    text = f"the {side} errs {errs(blamed)} what an honest {blamed.dtype} kernel errs on the same inputs"
    if other is None:
        return text
    return f"{text}; the {'reference' if side == 'subject' else 'subject'} errs {errs(other, like=blamed)}"


def _arguments_verdict(slot: SlotPair, exchanged: CallReplay) -> Verdict | None:
    found = exchanged.of(slot.slot)
    if found is None or (multiple := multiple_of(found)) <= 1:
        return None
    return Verdict("differs", "arguments", f"the reference's arguments change it by {errs(found)} what rounding explains", multiple)


def _honest(slot: SlotPair, ours: SlotReplay, theirs: SlotReplay, allowance: Allowance, across: Verdict) -> Verdict:
    own = max(multiple_of(ours), multiple_of(theirs))
    sizes = f"subject errs {errs(ours)}, reference {errs(theirs)} what an honest kernel errs"
    if not allowance.inputs_agree:
        return Verdict("differs", "replayed", f"no more than its inputs explain: {sizes}", own)
    if across.level == "rounding" and across.rule != "amplified":
        return Verdict("rounding", "replayed", sizes, own)
    is_decision = not any(one.is_floating for one in dtypes_of(slot)) or slot.subject is None or slot.subject.shape != _shape(slot)
    what = "a near tie falls the other way" if is_decision else "the call magnifies the difference of its inputs"
    return Verdict("rounding", "fork" if is_decision else "amplified", f"{what}: {sizes}", own)


def _shape(slot: SlotPair) -> tuple[int, ...] | None:
    return slot.reference.shape if slot.reference else None


def is_beyond_doubt(slot: JudgedSlot) -> bool:
    """Whether a result that was judged without a replay is so near that no replay would blame a side.

    One that errs beyond its limit errs by that many units of the size of the result at least, and the other side does not err alike.
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
    is_well_within = (verdict.multiple or 0.0) <= threshold("foreseen_share")
    return units <= threshold("foreseen_far" if is_well_within else "foreseen")


def multiple_of(found: SlotReplay) -> float:
    """How many times its limit a side errs; above 1 no honest kernel does."""
    if found.num_nonfinite or found.num_flipped:
        return inf
    return max(multiple for _, multiple in _multiples(found)) / found.leeway


def replay_limits(dtype: str) -> tuple[float, float]:
    """The largest and the rms ratio that an honest kernel reaches in a dtype."""
    return _limit("max", dtype), _limit("rms", dtype)


def errs(found: SlotReplay, *, like: SlotReplay | None = None) -> str:
    """`212x`: the rms ratio, or the largest where only that is beyond its limit; of two sides the same for both."""
    if found.num_nonfinite or found.num_flipped:
        return "beyond all measure"
    multiples = dict(_multiples(like or found))
    is_peak = multiples["max"] > 1 >= max(multiples.get("rms", 0.0), multiples.get("bias", 0.0))
    ratio = found.max_ratio if is_peak else found.rms_ratio
    return f"{'less than ' if found.is_bound else ''}{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x" if ratio < 1e5 else f"{ratio:.3g}x"


def _multiples(found: SlotReplay) -> list[tuple[str, float]]:
    """Each statistic over its limit; over a few elements only the largest tells more than chance."""
    multiples = [("max", found.max_ratio / _limit("max", found.dtype))]
    if found.numel >= _FEW:
        multiples.append(("rms", found.rms_ratio / _limit("rms", found.dtype)))
        multiples.append(("bias", (found.bias or 0.0) / sqrt(found.numel) / _limit("bias", found.dtype)))
    return multiples


def _limit(kind: str, dtype: str) -> float:
    known = DTYPES.get(dtype)
    low = "_low" if known is not None and known.is_floating and known.mantissa < 23 else ""
    return threshold(f"replay_{kind}{low}")
