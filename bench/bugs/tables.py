# SPDX-License-Identifier: Apache-2.0
"""Show the answers as tables of text, and tell whether they reach the bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from bench.bugs.answering import KEEPS, Answer
from bench.bugs.baselines import BASELINES
from bench.bugs.case import Case
from bench.bugs.scoring import Score, Totals, totals

__all__ = ["BAR", "case_list", "missed_by_both", "print_tables", "reaches_bar"]

BAR = {"tensors": 0.9, "statistics": 0.7}
"""Share of the faults whose culprit has to be named first, by what the runs hold."""


def case_list(cases: Sequence[Case]) -> str:
    """List the cases as Markdown, as docs/bugs.md has them: faults, then clean pairs; one line for a fault behind several machines."""
    faults, clean = ({one.name.partition("@")[0]: one for one in cases if one.is_clean is wanted} for wanted in (False, True))
    lines = ["| fault | what is wrong | behind | source |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {_cell_text(one.what)} | {_machines(name, cases)} | {_source(one.source)} |" for name, one in faults.items()]
    lines += ["", "| clean pair | what differs honestly | behind |", "|---|---|---|"]
    lines += [f"| `{name}` | {_cell_text(one.what)} | {_machines(name, cases)} |" for name, one in clean.items()]
    return "\n".join(lines)


def _cell_text(text: str) -> str:
    return text.replace("|", "\\|")


def _machines(name: str, cases: Sequence[Case]) -> str:
    found = [one.machine or "the same machine" for one in cases if one.name.partition("@")[0] == name]
    return "; ".join(dict.fromkeys(found)) if found != ["the same machine"] else ""


def _source(source: str) -> str:
    parts = source.removeprefix("https://github.com/").split("/")
    return f"[{parts[0]}/{parts[1]}#{parts[3]}]({source})" if len(parts) == 4 else source


def print_tables(cases: Sequence[Case], answers: Sequence[Answer]) -> None:
    tools = list(dict.fromkeys(answer.tool for answer in answers))
    found = {(answer.case, answer.tool): answer for answer in answers}
    width = max(len(case.name) for case in cases)
    print(f"{'case':{width}}  " + "  ".join(f"{tool:>24}" for tool in tools))
    for case in cases:
        print(f"{case.name:{width}}  " + "  ".join(f"{_cell(case, found.get((case.name, tool))):>24}" for tool in tools))
    print()
    header = ("tool", "detected", "top-1", "top-3", "phase", "wrongly blamed", "false alarms", "unknown", "seconds", "MB", "failed")
    print("{:26} {:>12} {:>12} {:>12} {:>12} {:>15} {:>13} {:>8} {:>8} {:>7} {:>7}".format(*header))
    for tool in tools:
        mine = [answer for answer in answers if answer.tool == tool]
        print(_total_line(tool, mine, _totals(cases, mine)))
    print()
    for line in _summary(cases, answers):
        print(line)
    for problem, which in _problems(answers).items():
        print(f"\n{which[0]} failed{f', and {len(which) - 1} more alike' if which[1:] else ''}:\n{problem}", file=sys.stderr)


def _problems(answers: Sequence[Answer]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for answer in answers:
        if answer.problem:
            found.setdefault(answer.problem, []).append(f"{answer.case}, {answer.tool}")
    return found


def _cell(case: Case, answer: Answer | None) -> str:
    if answer is None:
        return ""
    if answer.score is None:
        return "failed"
    got = answer.score
    if case.is_clean:
        return "FALSE ALARM" if got.false_alarm else "quiet" if got.is_quiet else "unknown"
    blamed = f" (+{got.num_wrongly_blamed - (not got.top1)} wrong)" if got.num_wrongly_blamed > (not got.top1) else ""
    found = "top-1" if got.top1 else "top-3" if got.top3 else "elsewhere" if got.detected else "missed"
    return found + ("" if got.phase or not got.detected else ", phase") + blamed


def _totals(cases: Sequence[Case], answers: Sequence[Answer]) -> Totals:
    by_name = {case.name: case for case in cases}
    return totals([(by_name[answer.case], answer.score or _nothing()) for answer in answers])


def _nothing() -> Score:
    return Score(detected=False, top1=False, top3=False, phase=False, num_wrongly_blamed=0, false_alarm=False, blamed="")


def _total_line(tool: str, answers: Sequence[Answer], sums: Totals) -> str:
    counts = [f"{count}/{sums.num_faults}" for count in (sums.detected, sums.top1, sums.top3, sums.phase)]
    seconds = sum(answer.record_s + answer.compare_s for answer in answers)
    megabytes = sum(answer.num_bytes for answer in answers) / 1e6
    failed = sum(answer.score is None for answer in answers)
    clean = [f"{count}/{sums.num_clean}" for count in (sums.false_alarms, sums.unknown)]
    return (
        f"{tool:26} {counts[0]:>12} {counts[1]:>12} {counts[2]:>12} {counts[3]:>12} {sums.wrongly_blamed:>15} "
        f"{clean[0]:>13} {clean[1]:>8} {seconds:>8.1f} {megabytes:>7.1f} {failed:>7}"
    )


def missed_by_both(cases: Sequence[Case], answers: Sequence[Answer]) -> list[str]:
    """Name the faults that neither baseline names first."""
    named = {answer.case for answer in answers if answer.tool in BASELINES and answer.score and answer.score.top1}
    asked = {answer.case for answer in answers if answer.tool in BASELINES}
    return [case.name for case in cases if not case.is_clean and case.name in asked and case.name not in named]


def _summary(cases: Sequence[Case], answers: Sequence[Answer]) -> Iterator[str]:
    for keep in KEEPS:
        mine = [answer for answer in answers if answer.tool == f"ulpscope, {keep}"]
        if mine:
            sums = _totals(cases, mine)
            verdict = "reached" if _reaches(keep, sums, mine) else "NOT reached"
            asked = f"top-1 at least {BAR[keep]:.0%}, " + ("detected 100 %, no unknown, " if keep == "tensors" else "") + "no false alarm"
            yield (
                f"{keep}: top-1 {sums.share(sums.top1):.0%}, detected {sums.share(sums.detected):.0%}, "
                f"false alarms {sums.false_alarms} and unknown {sums.unknown} of {sums.num_clean}; bar ({asked}): {verdict}"
            )
    if missed := missed_by_both(cases, answers):
        yield f"{len(missed)} faults that neither baseline names"


def reaches_bar(cases: Sequence[Case], answers: Sequence[Answer]) -> bool:
    kept = {keep: [answer for answer in answers if answer.tool == f"ulpscope, {keep}"] for keep in KEEPS}
    return all(_reaches(keep, _totals(cases, mine), mine) for keep, mine in kept.items() if mine)


def _reaches(keep: str, sums: Totals, answers: Sequence[Answer]) -> bool:
    seen = keep != "tensors" or (sums.detected == sums.num_faults and not sums.unknown)
    return seen and sums.share(sums.top1) >= BAR[keep] and not sums.false_alarms and all(answer.score for answer in answers)
