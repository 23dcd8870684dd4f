# SPDX-License-Identifier: Apache-2.0
"""Checked calls become findings: one for each operation and phase that fails, one for each family with narrower operands, one for what
was not covered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf

from ulpscope._shell import as_path, command_line
from ulpscope.explain.wording import count, listed
from ulpscope.model import DTYPES, Finding
from ulpscope.model.check.checks import CheckedCall, FamilyPrecision, num_checked

__all__ = ["explain_check"]

_MOST_REASONS = 6
_NAMES = {"float16": "float16", "tf32": "TF32", "bfloat16": "bfloat16"}


def explain_check(
    calls: Sequence[CheckedCall],
    precision: Sequence[FamilyPrecision],
    *,
    device: str,
    path: str,
    rules: str = "derived",
    complete: Sequence[str] = (),
    absent: str = "",
) -> tuple[Finding, ...]:
    """Faults, the worst first, then notes. By published rules a call fails or is a warning; what it is in truth is not said.

    `absent` is the device that the run was recorded on, where it is not here.
    """
    groups: defaultdict[tuple[str, str], list[CheckedCall]] = defaultdict(list)
    for call in calls:
        groups[call.call.op, call.phase].append(call)
    faults = [_fault(group, path, rules) for group in groups.values() if any(call.status == "failed" for call in group)]
    faults.sort(key=lambda pair: -pair[0])
    notes = [_precision_note(one, device) for one in precision]
    notes += _warnings(calls, rules)
    notes += _coverage(calls, rules)
    if absent:
        notes.append(
            Finding(
                level="note",
                kind="coverage",
                headline=f"recorded on {absent}, which is not here: what was recorded is judged, and the kernels of {device}",
                next=command_line("ulpscope", "check", as_path(path), "--device", absent) + ", on a machine that has it",
            )
        )
    if complete:
        notes.append(
            Finding(level="note", kind="coverage", headline=f"recording was cut off in {listed(list(complete))}; what is there was checked")
        )
    return (*(finding for _, finding in faults), *notes)


def _fault(group: Sequence[CheckedCall], path: str, rules: str) -> tuple[float, Finding]:
    failed = sorted((call for call in group if call.status == "failed"), key=_badness, reverse=True)
    worst = failed[0]
    judged = sum(call.status != "skipped" for call in group)
    many = "" if judged == 1 else f" in {len(failed)} of {judged} calls"
    verb = "is wrong" if rules == "derived" else f"fails by the rules {rules}"
    headline = f"{worst.call.short} {worst.phase} {verb} on {_where(worst)}{many}; worst: {_place(worst)}"
    slot = worst.worst
    evidence = [worst.reason, f"inputs: {'as recorded' if worst.data == 'recorded' else 'made from the recorded statistics'}"]
    if len(failed) > 1:
        evidence.append(f"also {listed(_names(failed[1:]))}")
    return _badness(worst), Finding(
        level="fault",
        kind="kernel",
        headline=headline,
        step=worst.step,
        rank=worst.rank,
        phase=worst.phase,
        module=worst.module,
        call=str(worst.call),
        slot=str(slot.slot) if slot is not None else "",
        source=worst.source,
        order=worst.order,
        evidence=tuple(evidence),
        next=_next(path, worst, rules),
    )


def _where(call: CheckedCall) -> str:
    slot = call.worst
    return "the device that recorded it" if slot is not None and slot.blamed == "recorded" else call.device


def _badness(call: CheckedCall) -> float:
    return inf if call.multiple is None else call.multiple


def _place(call: CheckedCall) -> str:
    module = f"{call.module}  " if call.module else ""
    return f"{module}{call.call.short} (call {call.call.index}), step {call.step}, rank {call.rank}"


def _precision_note(found: FamilyPrecision, device: str) -> Finding:
    bits = DTYPES["bfloat16" if found.operands == "bfloat16" else "float16"].mantissa + 1
    who = f"on {device}" if found.role == "device" else "as recorded"
    many = f"{found.num_like} of {found.num_calls} " if found.num_like < found.num_calls else ""
    verb = "computes" if many and found.num_like == 1 else "compute"
    return Finding(
        level="note",
        kind="precision",
        headline=f"{many}{found.family}s {who} {verb} with about {bits} significant bits ({_NAMES[found.operands]} operands)",
        evidence=("they err as such operands make them, and are judged by that; one that errs more still fails",),
        next="for full precision set torch.set_float32_matmul_precision('highest'), or the like of the device",
    )


def _next(path: str, call: CheckedCall, rules: str) -> str:
    words = ["ulpscope", "check", as_path(path), "--device", call.device, *(() if rules == "derived" else ("--rules", rules))]
    return command_line(*words, "--select", str(call.call), "--save-failures", "failures")


def _names(calls: Sequence[CheckedCall]) -> list[str]:
    """Each call by its name, with the step where they are of several."""
    several = len({(call.rank, call.step) for call in calls}) > 1
    return [f"{call.call} (step {call.step}, rank {call.rank})" if several else str(call.call) for call in calls]


def _warnings(calls: Sequence[CheckedCall], rules: str) -> list[Finding]:
    warned = [call for call in calls if call.status == "warning"]
    if not warned:
        return []
    reasons = Counter(call.reason.partition(": ")[2] or call.reason for call in warned)
    evidence = tuple(f"{count(many, 'call')}: {reason}" for reason, many in reasons.most_common(_MOST_REASONS))
    what = (
        "could not be settled" if rules == "derived" else f"{'is a warning' if len(warned) == 1 else 'are warnings'} by the rules {rules}"
    )
    headline = f"{count(len(warned), 'call')} {what}: {listed(_names(warned))}"
    return [Finding(level="note", kind="doubt", headline=headline, evidence=evidence)]


def _operations(calls: Sequence[CheckedCall], reason: str) -> str:
    return listed(list(dict.fromkeys(call.call.op for call in calls if call.reason == reason)))


def _coverage(calls: Sequence[CheckedCall], rules: str) -> list[Finding]:
    skipped = [call for call in calls if call.status == "skipped"]
    if not skipped:
        return []
    reasons: Counter[str] = Counter()
    for call in skipped:
        reasons[call.reason] += call.stands_for
    total, unchecked = sum(call.stands_for for call in calls), reasons.total()
    least = "at least " if any(call.is_opaque for call in skipped) else ""
    evidence = [
        f"{_how_many(skipped, reason)} of {_operations(skipped, reason)}: {reason}" for reason, _ in reasons.most_common(_MOST_REASONS)
    ]
    if len(reasons) > _MOST_REASONS:
        evidence.append(f"and {len(reasons) - _MOST_REASONS} more reasons")
    if least:
        evidence.append("an opaque module counts as one call for each of its layers with parameters, the fewest that it can have made")
    covered = num_checked(calls, rules) / total
    was = "was" if unchecked == 1 else "were"
    headline = f"{least}{count(unchecked, 'call')} of {total} {was} not checked; coverage is {least and 'at most '}{covered:.1%}"
    next_step = "record without torch.compile to see inside" if least else ""
    return [Finding(level="note", kind="coverage", headline=headline, evidence=tuple(evidence), next=next_step)]


def _how_many(skipped: Sequence[CheckedCall], reason: str) -> str:
    many = sum(call.stands_for for call in skipped if call.reason == reason)
    is_least = any(call.is_opaque for call in skipped if call.reason == reason)
    return f"{'at least ' if is_least else ''}{count(many, 'call')}"
