# SPDX-License-Identifier: Apache-2.0
"""Checked calls become findings: one for each operation and phase that fails, one for each family with narrower operands, one for what
was not covered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf

from ulpscope.explain.wording import count, listed
from ulpscope.model import DTYPES, Finding
from ulpscope.model.checks import CheckedCall, FamilyPrecision

__all__ = ["explain_check"]

_MOST_REASONS = 6
_NAMES = {"float16": "float16", "tf32": "TF32", "bfloat16": "bfloat16"}


def explain_check(
    calls: Sequence[CheckedCall], precision: Sequence[FamilyPrecision], *, device: str, path: str, complete: Sequence[str] = ()
) -> tuple[Finding, ...]:
    """Faults, the worst first, then notes."""
    groups: defaultdict[tuple[str, str], list[CheckedCall]] = defaultdict(list)
    for call in calls:
        groups[call.call.op, call.phase].append(call)
    faults = [_fault(group, path) for group in groups.values() if any(call.status == "failed" for call in group)]
    faults.sort(key=lambda pair: -pair[0])
    notes = [_precision_note(one, device) for one in precision]
    notes += _warnings(calls)
    notes += _coverage(calls)
    if complete:
        notes.append(
            Finding(level="note", kind="coverage", headline=f"recording was cut off in {listed(list(complete))}; what is there was checked")
        )
    return (*(finding for _, finding in faults), *notes)


def _fault(group: Sequence[CheckedCall], path: str) -> tuple[float, Finding]:
    failed = sorted((call for call in group if call.status == "failed"), key=_badness, reverse=True)
    worst = failed[0]
    judged = sum(call.status != "skipped" for call in group)
    many = "" if judged == 1 else f" in {len(failed)} of {judged} calls"
    headline = f"{worst.call.short} {worst.phase} is wrong on {_where(worst)}{many}; worst: {_place(worst)}"
    slot = worst.worst
    evidence = [worst.reason, f"inputs: {'as recorded' if worst.data == 'recorded' else 'made from the recorded statistics'}"]
    if len(failed) > 1:
        evidence.append(f"also {listed([str(call.call) for call in failed[1:]])}")
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
        next=f"ulpscope check {path} --device {worst.device} --select '{worst.call}' --save-failures failures",
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
    return Finding(
        level="note",
        kind="precision",
        headline=f"{found.family}s {who} compute with about {bits} significant bits ({_NAMES[found.operands]} operands)",
        evidence=(f"every {found.family} errs as such operands do; they are judged by that, and one that errs more is still seen",),
        next="for full precision set torch.set_float32_matmul_precision('highest'), or the like of the device",
    )


def _warnings(calls: Sequence[CheckedCall]) -> list[Finding]:
    warned = [call for call in calls if call.status == "warning"]
    if not warned:
        return []
    reasons = Counter(call.reason.partition(": ")[2] or call.reason for call in warned)
    evidence = tuple(f"{count(many, 'call')}: {reason}" for reason, many in reasons.most_common(_MOST_REASONS))
    names = listed([str(call.call) for call in warned])
    return [Finding(level="note", kind="doubt", headline=f"{count(len(warned), 'call')} could not be settled: {names}", evidence=evidence)]


def _coverage(calls: Sequence[CheckedCall]) -> list[Finding]:
    skipped = [call for call in calls if call.status == "skipped"]
    if not skipped:
        return []
    reasons = Counter(call.reason for call in skipped).most_common()
    evidence = [f"{count(many, 'call')}: {reason}" for reason, many in reasons[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        evidence.append(f"and {len(reasons) - _MOST_REASONS} more reasons")
    covered = 1 - len(skipped) / len(calls)
    headline = (
        f"{count(len(skipped), 'call')} of {len(calls)} {'was' if len(skipped) == 1 else 'were'} not checked; coverage is {covered:.1%}"
    )
    return [Finding(level="note", kind="coverage", headline=headline, evidence=tuple(evidence))]
