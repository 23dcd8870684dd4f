# SPDX-License-Identifier: Apache-2.0
"""What replay says about one call's results becomes a status.

The device's result now and the recorded one are judged alike, in units of what an honest kernel errs on the same inputs. On the CPU
itself, the float64 result is judged too, by one that shares no kernel with it. A call is failed where any of these errs more than any
honest kernel of the zoo; which one it was, and whether the device does again what was recorded, is part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite, sqrt

from ulpscope.judge.drawing import judge_drawn
from ulpscope.judge.thresholds import Threshold, threshold
from ulpscope.model import DTYPES, CallRecord, Slot, SlotPair, SlotReplay, Summary, TensorRecord
from ulpscope.model.checks import CheckedCall, CheckedSlot, CheckRole, DrawnSlot, Overflow

__all__ = [
    "CHECK_THRESHOLDS",
    "check_limits",
    "check_multiple",
    "conclude",
    "drawn_apart",
    "errs_text",
    "judge_checked",
    "judge_overflow",
    "overflows",
    "settle",
]

_ZOO = "next power of two above the largest honest one of the zoo's calibrating half (docs/zoo.md)"
CHECK_THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        "check_max", 64.0, "largest error of one element, in units of an honest kernel's on the same inputs, float32 and wider", _ZOO
    ),
    Threshold("check_max_low", 32.0, "the same for dtypes with fewer than 23 fraction bits", _ZOO),
    Threshold("check_rms", 8.0, "the same for the rms over all elements, all dtypes", _ZOO),
    Threshold("check_bias", 64.0, "change of scale in standard errors of an honest kernel's noise, float32 and wider", _ZOO),
    Threshold("check_bias_low", 16.0, "the same for dtypes with fewer than 23 fraction bits", _ZOO),
    Threshold(
        "check_few",
        64.0,
        "elements below which rms and change of scale are not judged",
        "over fewer the one is the largest, the other chance",
    ),
    Threshold(
        "check_scale", 2.0, "units of rounding by which all elements may be off in one direction", "equal elements are rounded alike"
    ),
    Threshold(
        "check_kernel", 64.0, "times by which the CPU's own kernel may miss what nothing but itself supports", "the limit of one element"
    ),
)
_VALUES = {entry.name: entry.value for entry in CHECK_THRESHOLDS}


def check_limits(dtype: str) -> tuple[float, float]:
    """The largest and the rms ratio that an honest kernel reaches in a dtype."""
    return _VALUES[f"check_max{_low(dtype)}"], _VALUES["check_rms"]


def check_multiple(found: SlotReplay) -> float:
    """How many times its limit a result errs; above 1 no honest kernel does."""
    return max(_parts(found).values())


def _parts(found: SlotReplay) -> dict[str, float]:
    if found.num_nonfinite or found.num_flipped:
        return {"beyond": inf}
    largest, rms = check_limits(found.dtype)
    parts = {"max": found.max_ratio / largest}
    if found.numel >= _VALUES["check_few"]:
        parts["rms"] = found.rms_ratio / rms
        if found.bias is not None and abs(found.scale or 0.0) > _VALUES["check_scale"] * _unit(found.dtype):
            parts["bias"] = found.bias / _VALUES[f"check_bias{_low(found.dtype)}"]
    return parts


def _low(dtype: str) -> str:
    known = DTYPES.get(dtype)
    return "_low" if known is not None and known.is_floating and known.mantissa < 23 else ""


def _unit(dtype: str) -> float:
    known = DTYPES.get(dtype)
    return known.eps / 2 if known is not None and known.is_floating else 0.0


def errs_text(found: SlotReplay) -> str:
    """`errs 212x what an honest float32 kernel errs on these inputs`, by the statistic that is farthest beyond."""
    if found.num_nonfinite:
        return f"has {found.num_nonfinite} NaN or infinities where every honest computation is finite, or the reverse"
    if found.num_flipped:
        return f"has {found.num_flipped} values that differ and that no rounding of its inputs explains"
    honest = f"what an honest {found.dtype} kernel errs on these inputs"
    parts = _parts(found)
    worst = max(parts, key=parts.__getitem__)
    if worst == "bias":
        return f"is {1 + (found.scale or 0.0):.8g} times the exact result, a change of scale that rounding does not make"
    ratio = found.max_ratio if worst == "max" else found.rms_ratio
    return f"errs {times(ratio)} {honest}"


def times(ratio: float) -> str:
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x" if ratio < 1e5 else f"{ratio:.3g}x"


def judge_checked(slot: CheckedSlot, device: str) -> CheckedSlot:
    """The slot with its status. `device` is the name of the device under test."""
    if slot.drawn is not None:
        return _judge_drawn(slot, device)
    roles: tuple[tuple[CheckRole, SlotReplay | None], ...] = (("device", slot.device), ("recorded", slot.recorded))
    multiples = {role: check_multiple(found) for role, found in roles if found is not None}
    if not multiples:
        return replace(slot, status="skipped", reason="nothing of it can be judged")
    doubt = 0.0 if slot.second_opinion is None else check_multiple(replace(slot.second_opinion, bias=None))
    if doubt > 1 and device == "cpu":
        assert slot.second_opinion is not None
        text = f"the CPU's kernel {errs_text(slot.second_opinion)}, in float64 as well: by its own formula the result is another one"
        return replace(slot, status="failed", multiple=doubt, blamed="device", reason=text)
    blamed = max(multiples, key=multiples.__getitem__)
    multiple = multiples[blamed]
    if multiple > 1:
        found = slot.of(blamed)
        assert found is not None
        text = f"{device if blamed == 'device' else 'what was recorded'} {errs_text(found)}{_worst(found)}"
        if doubt > 1:
            text = f"{text}; but the CPU's own kernel errs as well, so that nothing sound judges it here"
        return replace(slot, status="warning" if doubt > 1 else "failed", multiple=multiple, blamed=blamed, reason=text)
    return _judge_kernel(slot, multiple) if device == "cpu" else replace(slot, status="passed", multiple=multiple)


def _worst(found: SlotReplay) -> str:
    if found.worst_index is None or found.worst_recorded is None or found.worst_exact is None or found.num_flipped:
        return ""
    return f"; worst at {list(found.worst_index)}: {found.worst_recorded:.9g}, exact {found.worst_exact:.9g}"


def _judge_kernel(slot: CheckedSlot, multiple: float) -> CheckedSlot:
    """The CPU itself under test, within the limits of its own float64 result: does anything but itself say so?"""
    other, own = slot.second_opinion, slot.device
    native = own.native_ratio if own is not None else None
    if native is not None and native > _VALUES["check_kernel"]:
        text = f"the CPU's kernel errs {times(native)} what its own formula errs"
        return replace(slot, status="failed", multiple=native / _VALUES["check_kernel"], blamed="device", reason=text)
    if own is not None and not own.is_bound and native is None and other is None and _is_loose(own):
        return replace(
            slot,
            status="warning",
            multiple=multiple,
            reason="it errs more than its inputs explain, and nothing but its own kernel judges it",
        )
    return replace(slot, status="passed", multiple=multiple)


def _is_loose(found: SlotReplay) -> bool:
    """Whether only the kernel's own error makes the yardstick long enough."""
    known = DTYPES.get(found.dtype)
    if known is None or found.honest_error is None or not known.is_floating:
        return False
    return found.honest_error > _VALUES["check_rms"] * known.eps and found.max_ratio > 0.25


def _judge_drawn(slot: CheckedSlot, device: str) -> CheckedSlot:
    assert slot.drawn is not None
    multiple = slot.drawn.distance / threshold("drawn")
    if multiple > 1:
        return replace(slot, status="failed", multiple=multiple, blamed="device", reason=f"{device} {slot.drawn.reason}")
    return replace(slot, status="passed", multiple=multiple)


def drawn_apart(device: Summary, other: Summary, *, dropped: float | None = None, num_candidates: int = 0) -> DrawnSlot:
    """Two draws of one distribution: their zeros, sizes and means against each other; with `dropped`, the zeros against that share."""
    slots = [TensorRecord(slot=Slot("output", (0,)), dtype="float32", shape=(one.numel,), summary=one) for one in (device, other)]
    found = judge_drawn(SlotPair(slot=Slot("output", (0,)), subject=slots[0], reference=slots[1]))
    apart = (found.multiple or 0.0) * threshold("drawn")
    reasons = [
        (apart, "draws another distribution than the CPU: share of zeros or size differ"),
        (_means_apart(device, other), "draws another mean"),
    ]
    if dropped is not None and num_candidates and device.num_zero is not None:
        zeros = device.num_zero - (device.numel - num_candidates)
        spread = sqrt(max(dropped * (1 - dropped) * num_candidates, 1.0))
        reasons.append(
            (abs(zeros - dropped * num_candidates) / spread, f"drops {zeros / num_candidates:.3g} of the elements where p is {dropped:.3g}")
        )
    worst = max(reasons, key=lambda one: one[0])
    return DrawnSlot(distance=worst[0], reason=f"{worst[1]} ({worst[0]:.3g} standard errors)")


def _means_apart(ours: Summary, theirs: Summary) -> float:
    values = (ours.mean, theirs.mean, ours.abs_max, theirs.abs_max)
    if any(value is None or not isfinite(value) for value in values) or not ours.numel or not theirs.numel:
        return 0.0
    size = max(ours.abs_max or 0.0, theirs.abs_max or 0.0)
    return abs((ours.mean or 0.0) - (theirs.mean or 0.0)) / (size * sqrt(1 / ours.numel + 1 / theirs.numel)) if size else 0.0


def conclude(call: CheckedCall) -> CheckedCall:
    """The call with the status of its worst slot, the reason, and whether what was recorded happens again."""
    judged = [slot for slot in call.slots if slot.status != "skipped"]
    if not judged:
        return replace(call, status="skipped", reason=call.reason or "none of its results can be judged")
    failed = [slot for slot in judged if slot.status == "failed"]
    warned = [slot for slot in judged if slot.status == "warning"]
    again = _is_reproduced(judged)
    worst = max(failed or warned or judged, key=lambda slot: slot.multiple or 0.0)
    reason = f"{worst.slot}: {worst.reason}" if failed or warned else ""
    if failed and again is False:
        here = "is not reproduced here" if worst.blamed == "recorded" else "was not so when it was recorded"
        reason += f"; this {here}"
    return replace(call, status="failed" if failed else "warning" if warned else "passed", reason=reason, is_reproduced=again)


def _is_reproduced(slots: Sequence[CheckedSlot]) -> bool | None:
    known = [(check_multiple(slot.device) > 1, check_multiple(slot.recorded) > 1) for slot in slots if slot.device and slot.recorded]
    is_doubted = any(
        slot.status == "failed" and slot.device and check_multiple(slot.device) <= 1 for slot in slots if slot.blamed == "device"
    )
    if not known or is_doubted:
        return None
    return any(now for now, _ in known) == any(then for _, then in known)


def settle(calls: Sequence[CheckedCall]) -> tuple[CheckedCall, ...]:
    """All calls, where a backward is not blamed for the forward result of the same call that it computes with."""
    wrong = {(call.rank, call.step, call.module, call.call) for call in calls if call.status == "failed" and call.phase == "forward"}

    def settled(call: CheckedCall) -> CheckedCall:
        is_inherited = call.status == "failed" and call.phase == "backward" and call.overflow is None and call.slots
        if not is_inherited or (call.rank, call.step, call.module, call.call) not in wrong:
            return call
        return replace(call, status="warning", reason=f"its forward fails already, and a gradient uses that result; {call.reason}")

    return tuple(map(settled, calls))


# ------------------------------------------------------------------------------------------------------------- overflow


def overflows(record: CallRecord, forward: CallRecord | None = None) -> bool:
    """Whether a call was recorded with clean inputs and a result that is not finite; `forward` is the call of a backward record."""
    given = [slot for slot in record.slots if record.receives(slot.slot)]
    given += [slot for slot in forward.slots if forward.receives(slot.slot)] if forward is not None else []
    made = [slot for slot in record.slots if not record.receives(slot.slot)]
    return bool(given) and any(_is_nonfinite(slot) for slot in made) and not any(_is_nonfinite(slot) for slot in given)


def _is_nonfinite(slot: TensorRecord) -> bool:
    summary = slot.summary
    if summary is None:
        return False
    ends = (summary.min, summary.max)
    return bool(summary.num_nonfinite) or any(end is not None and not isfinite(end) for end in ends)


def judge_overflow(call: CheckedCall, *, device_overflows: bool, is_same_device: bool) -> CheckedCall:
    """Normal where the reference overflows too in that dtype, abnormal where it does not, else not reproduced."""
    if call.status == "skipped":
        return call
    is_known = any(slot.recorded is not None for slot in call.slots)
    if not device_overflows and (is_same_device or not is_known):
        reason = f"{call.device} gives finite numbers now" + ("" if is_known else ", on inputs made from statistics")
        return _with_overflow(call, "not reproduced", reason)
    role: CheckRole = "device" if device_overflows else "recorded"
    found = [one for slot in call.slots if (one := slot.of(role)) is not None]
    if any(one.num_nonfinite for one in found):
        return _with_overflow(call, "abnormal", "the reference stays finite in that dtype where this does not")
    return _with_overflow(call, "normal", "the reference overflows in that dtype as well")


def _with_overflow(call: CheckedCall, kind: Overflow, reason: str) -> CheckedCall:
    status = {"normal": "passed", "abnormal": "failed", "not reproduced": "warning"}
    return replace(call, overflow=kind, status=status[kind], reason=reason)  # type: ignore[arg-type]
