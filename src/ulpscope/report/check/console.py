# SPDX-License-Identifier: Apache-2.0
"""Print a check on a terminal: the answer, the failures with the worst first, and what was not checked and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ulpscope.model import Finding
from ulpscope.model.check.checks import Check, CheckedCall
from ulpscope.report.escaping import shortened

__all__ = ["render_check", "verdict_line"]

_MOST_FAULTS = 5
_MOST_ROWS = 20
_LONGEST = 400
_LONGEST_NAME = 60
_MOST_NAMES = 3


def render_check(check: Check, console: Console) -> None:
    _print(console, verdict_line(check), verdict_style(check))
    faults = [finding for finding in check.findings if finding.level == "fault"]
    for finding in faults[:_MOST_FAULTS]:
        _print(console, "")
        _render_fault(finding, console)
    if len(faults) > _MOST_FAULTS:
        _print(console, f"and {len(faults) - _MOST_FAULTS} more operations: --json", "dim")
    if check.failures:
        _print(console, "")
        _render_table(check.failures, console)
    if check.counts["failed"] < len(check.calls) and any(call.overflow for call in check.calls):
        _print(console, "")
        _render_overflows(check, console)
    _print(console, "")
    for finding in check.findings:
        if finding.level == "note":
            _render_note(finding, console)
    _render_counts(check, console)


def verdict_style(check: Check) -> str:
    if check.verdict == "wrong":
        return "bold red"
    return "bold green" if check.verdict == "sound" and check.num_checked == check.num_calls else "bold yellow"


def verdict_line(check: Check) -> str:
    """Return the answer in one line: `wrong: runs/npu on npu:0, 2 of 180 calls fail`.

    The line of a partial check begins with the share that was checked.
    """
    counts = check.counts
    judged = len(check.calls) - counts["skipped"]
    where = f"{check.path} on {check.device}"
    rules = "" if check.rules == "derived" else f" by the rules {check.rules}"
    if counts["failed"]:
        return f"wrong: {where}, {counts['failed']} of {judged} checked calls {'fails' if counts['failed'] == 1 else 'fail'}{rules}"
    if not check.calls:
        return f"sound: {where}, no call made inf or NaN from clean inputs"
    if not check.num_checked:
        return f"unknown: {where}, none of {check.num_calls} calls could be checked{_unseen(check)}"
    if check.is_all_opaque:
        return f"unknown: {where}, every module is opaque ({_few(check.opaque)}); the {check.num_checked} calls checked lie around them"
    if check.num_checked < check.num_calls:
        return f"no failure{rules} in {_percent(check.coverage)} of what ran{_unseen(check)}: {where}, {check.num_checked} calls checked"
    if any(call.overflow for call in check.calls):
        return f"sound: {where}, none of {judged} overflows is abnormal"
    return f"sound: {where}, {judged} calls checked, none {f'fails{rules}' if rules else 'errs more than an honest kernel'}"


def _percent(share: float) -> str:
    """Return a share in percent, rounded down, so that 100 % always means all."""
    return f"{int(100 * share)} %" if share >= 0.01 else "less than 1 %"


def _unseen(check: Check) -> str:
    """Return `; OptimizedModule is opaque`, or how many calls have no verdict, with their operations."""
    if check.opaque:
        return f"; {_few(check.opaque)} {'is' if len(check.opaque) == 1 else 'are'} opaque"
    without = [call for call in check.calls if call.status in ("skipped", "warning")]
    names = _few(tuple(dict.fromkeys(call.call.short for call in without)))
    return f"; {len(without)} {'was' if len(without) == 1 else 'were'} not settled or not checked ({names})"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def _render_fault(finding: Finding, console: Console) -> None:
    _print(console, finding.headline, "bold red")
    for line in finding.evidence:
        _print(console, f"  {line}")
    if finding.source is not None:
        frame = finding.source
        _print(console, f"  {frame.file}:{frame.line} in {frame.function}: {frame.code}", "cyan")
    if finding.next:
        _print(console, f"  next: {finding.next}", "dim")


def _render_note(finding: Finding, console: Console) -> None:
    _print(console, f"note: {finding.headline}", "yellow")
    for line in finding.evidence:
        _print(console, f"  {line}", "dim")


def _render_table(failures: Sequence[CheckedCall], console: Console) -> None:
    rows: list[tuple[str, ...]] = [("times the limit", "phase", "call", "slot", "dtype", "shape")]
    rows += [_cells(call) for call in failures[:_MOST_ROWS]]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = "  ".join(cell.rjust(widths[0]) if not place else cell.ljust(widths[place]) for place, cell in enumerate(row))
        _print(console, line.rstrip(), "dim" if not number else "")
    if len(failures) > _MOST_ROWS:
        _print(console, f"and {len(failures) - _MOST_ROWS} more: --csv", "dim")


def _cells(call: CheckedCall) -> tuple[str, ...]:
    slot, multiple = call.worst, call.multiple
    size = "" if multiple is None else "beyond all" if multiple == float("inf") else f"{multiple:.3g}"
    name = shortened(f"{call.module}  {call.call}".strip(), _LONGEST_NAME)
    return (size, call.phase, name, *((str(slot.slot), slot.dtype, str(list(slot.shape))) if slot else ("", "", "")))


def _render_overflows(check: Check, console: Console) -> None:
    for call in check.calls:
        if call.overflow is not None:
            style = "red" if call.overflow == "abnormal" else ""
            _print(console, f"{call.overflow} overflow: {call.name} {call.phase}: {call.reason}", style)


def _render_counts(check: Check, console: Console) -> None:
    speed = len(check.calls) / check.elapsed_s if check.elapsed_s else 0.0
    resumed = f", {check.num_resumed} of them found before" if check.num_resumed else ""
    if not check.calls:
        return
    text = ", ".join(f"{many} {status}" for status, many in check.counts.items() if many or status in ("passed", "failed"))
    text += f" ({check.num_calls} calls with those of opaque modules)" if check.opaque else ""
    _print(console, f"{text}; coverage {check.coverage:.1%}; {check.elapsed_s:.1f} s, {speed:.0f} calls/s{resumed}", "dim")


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(shortened(line, _LONGEST), style=style), soft_wrap=True)
