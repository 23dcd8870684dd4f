# SPDX-License-Identifier: Apache-2.0
"""What replay says about one call's results becomes a status.

The device's result now and the recorded one are judged alike, in units of what an honest kernel errs on the same inputs. On the CPU
itself, the float64 result is judged too, by one that shares no kernel with it. A call is failed where any of these errs more than any
honest kernel of the zoo; which one it was, and whether the device does again what was recorded, is part of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, sqrt

from ulpscope.judge.replayed import errs, multiple_of, replay_limits
from ulpscope.judge.thresholds import threshold
from ulpscope.model import DTYPES, CallName, CallRecord, Phase, SlotReplay, TensorRecord
from ulpscope.model.check.checks import CheckedCall, CheckedSlot, CheckRole, Overflow
from ulpscope.numerics.nonfinite_rule import kinds_of

__all__ = [
    "check_limits",
    "check_multiple",
    "conclude",
    "errs_text",
    "judge_checked",
    "judge_overflow",
    "overflows",
    "settle",
    "with_own_leeway",
]

_MOSTLY = 0.9
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())


def check_limits(dtype: str) -> tuple[float, float]:
    """The largest and the rms ratio up to which a result needs no closer look."""
    largest, rms = replay_limits(dtype)
    return largest, min(rms, threshold("check_rms"))


def check_multiple(found: SlotReplay, phase: Phase) -> float:
    """How many times its limit a result errs; above 1 no honest kernel does.

    Fused optimizers are what the limits of a comparison have to be wide for; here a step is judged by these and all else by its own.
    """
    multiple = multiple_of(found)
    if phase == "optimizer" or found.numel < threshold("check_few"):
        return multiple
    rms, bias = found.rms_ratio / threshold("check_rms"), (found.bias or 0.0) / sqrt(found.numel) / threshold("check_bias")
    return max(multiple, rms / found.leeway, bias / found.leeway)


def with_own_leeway(found: SlotReplay, call: CallName) -> SlotReplay:
    """Machines compute the gates of recurrent layers with functions of their own, step after step."""
    is_wide = (known := DTYPES.get(found.dtype)) is not None and known.mantissa >= 23
    return replace(found, leeway=max(found.leeway, threshold("check_recurrent"))) if is_wide and call.short in _RECURRENT else found


def errs_text(found: SlotReplay) -> str:
    """`errs 212x what an honest float32 kernel errs on these inputs`, and the change of scale where that is most of it."""
    if found.num_nonfinite:
        return f"has {found.num_nonfinite} NaN or infinities where every honest computation is finite, or the reverse"
    if found.num_flipped:
        return f"has {found.num_flipped} values that differ and that no rounding of its inputs explains"
    text = f"errs {errs(found)} what an honest {found.dtype} kernel errs on these inputs"
    is_scaled = found.scale is not None and found.error is not None and abs(found.scale) > _MOSTLY * found.error
    return f"{text}: it is {1 + (found.scale or 0.0):.8g} times the exact result" if is_scaled else text


def judge_checked(slot: CheckedSlot, device: str, phase: Phase = "forward") -> CheckedSlot:
    """The slot with its status. `device` is the name of the device under test."""
    if slot.drawn is not None:
        return _judge_drawn(slot, device)
    roles: tuple[tuple[CheckRole, SlotReplay | None], ...] = (("device", slot.device), ("recorded", slot.recorded))
    multiples = {role: check_multiple(found, phase) for role, found in roles if found is not None}
    if not multiples:
        return replace(slot, status="skipped", reason="nothing of it can be judged")
    doubt = 0.0 if slot.second_opinion is None else check_multiple(slot.second_opinion, phase)
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
    own = slot.device
    if own is None or slot.second_opinion is not None:
        return replace(slot, status="passed", multiple=multiple)
    native = own.native_ratio
    if native is not None and native > (limit := replay_limits(own.dtype)[0]):
        text = f"the CPU's kernel errs {native:.3g}x what its own formula errs"
        return replace(slot, status="failed", multiple=native / limit, blamed="device", reason=text)
    if not own.is_bound and native is None and _is_loose(own):
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
    return found.honest_error > replay_limits(found.dtype)[1] * known.eps and found.max_ratio > 0.25


def _judge_drawn(slot: CheckedSlot, device: str) -> CheckedSlot:
    assert slot.drawn is not None
    multiple = slot.drawn.distance / threshold("drawn")
    if multiple > 1:
        who = device if slot.drawn.role == "device" else "what was recorded"
        size = f" ({slot.drawn.distance:.3g} standard errors)" if isfinite(slot.drawn.distance) else ""
        return replace(slot, status="failed", multiple=multiple, blamed=slot.drawn.role, reason=f"{who} {slot.drawn.reason}{size}")
    return replace(slot, status="passed", multiple=multiple)


def conclude(call: CheckedCall) -> CheckedCall:
    """The call with the status of its worst slot, the reason, and whether what was recorded happens again."""
    judged = [slot for slot in call.slots if slot.status != "skipped"]
    if not judged:
        return replace(call, status="skipped", reason=call.reason or "none of its results can be judged")
    failed = [slot for slot in judged if slot.status == "failed"]
    warned = [slot for slot in judged if slot.status == "warning"]
    again = _is_reproduced(judged, call.phase)
    worst = max(failed or warned or judged, key=lambda slot: slot.multiple or 0.0)
    reason = f"{worst.slot}: {worst.reason}" if failed or warned else ""
    if failed and again is False:
        here = "is not reproduced here" if worst.blamed == "recorded" else "was not so when it was recorded"
        reason += f"; this {here}"
    return replace(call, status="failed" if failed else "warning" if warned else "passed", reason=reason, is_reproduced=again)


def _is_reproduced(slots: Sequence[CheckedSlot], phase: Phase) -> bool | None:
    known = [
        (check_multiple(one.device, phase) > 1, check_multiple(one.recorded, phase) > 1) for one in slots if one.device and one.recorded
    ]
    blamed = [slot.device for slot in slots if slot.status == "failed" and slot.blamed == "device" and slot.device]
    if not known or any(check_multiple(one, phase) <= 1 for one in blamed):
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


def overflows(record: CallRecord, forward: CallRecord | None = None, *, with_results: bool = True) -> bool:
    """Whether a call was recorded with clean inputs and a result that is not finite; `forward` is the call of a backward record.

    A tool that keeps no results kept those calls of which it knew that they overflow.
    """
    given = [slot for slot in record.slots if record.receives(slot.slot)]
    given += [slot for slot in forward.slots if forward.receives(slot.slot)] if forward is not None else []
    made = [slot for slot in record.slots if not record.receives(slot.slot)]
    return bool(given) and (not with_results or any(map(_is_nonfinite, made))) and not any(map(_is_nonfinite, given))


def _is_nonfinite(slot: TensorRecord) -> bool:
    return bool(kinds_of(slot.summary))


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
