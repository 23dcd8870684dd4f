# SPDX-License-Identifier: Apache-2.0
"""All explanations in order of cause, and how they are asked: step by step, the first that answers settles a rank.

Once a step has a fault, nothing later is blamed. Of several ranks the one that diverges first is blamed; ranks with the same
culprit join its finding, and a collective call is blamed only if no rank has another cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ulpscope.explain.arithmetic.bitwise import remark_on_bits
from ulpscope.explain.arithmetic.contributing import explain_backward, explain_forward
from ulpscope.explain.arithmetic.ending import explain_end, explain_generators, remark_on_end, with_ends
from ulpscope.explain.arithmetic.forks import remark_on_amplification, remark_on_choices, remark_on_forks
from ulpscope.explain.arithmetic.nondeterminism import remark_on_nondeterminism
from ulpscope.explain.arithmetic.optimizer import explain_left_out, explain_optimizer
from ulpscope.explain.circumstances import Circumstances, explain_circumstances
from ulpscope.explain.clues.clue_table import with_clues
from ulpscope.explain.contributions import left_behind, with_contributions
from ulpscope.explain.entries.batch import explain_batch
from ulpscope.explain.entries.entering import explain_entering
from ulpscope.explain.entries.parameters import explain_parameters
from ulpscope.explain.entries.replicas import explain_replicas
from ulpscope.explain.entries.tied import explain_tied
from ulpscope.explain.gaps import UNBLAMED, with_behind_told
from ulpscope.explain.programs.arguments import explain_arguments
from ulpscope.explain.programs.cut import explain_cut
from ulpscope.explain.programs.draws import explain_rng
from ulpscope.explain.programs.missing import explain_missing, explain_writing
from ulpscope.explain.programs.rearranged import explain_rearranged
from ulpscope.explain.programs.remarks import remark_on_arguments, remark_on_missing, remark_on_parameters, remark_on_rng
from ulpscope.explain.programs.settings import explain_optimizer_settings, explain_unexcused
from ulpscope.explain.views import StepView, first_divergence
from ulpscope.explain.wording import count, listed
from ulpscope.model import Finding, JudgedCall, RunInfo

__all__ = ["EXPLANATIONS", "explain"]

Explanation: TypeAlias = Callable[[StepView], Finding | None]

EXPLANATIONS: tuple[Explanation, ...] = (
    explain_batch,
    explain_rng,
    explain_parameters,
    explain_unexcused,
    explain_arguments,
    explain_tied,
    explain_cut,
    explain_writing,
    explain_left_out,
    explain_rearranged,
    explain_missing,
    explain_entering,
    explain_forward,
    explain_backward,
    explain_optimizer,
    explain_optimizer_settings,
    explain_end,
)
_LAST_RESORT: tuple[Explanation, ...] = (explain_generators,)
"""Asked where no step has another fault: what a step leaves behind for draws that nobody has made yet."""

_REMARKS = (
    remark_on_forks,
    remark_on_choices,
    remark_on_amplification,
    remark_on_rng,
    remark_on_end,
    remark_on_parameters,
    remark_on_arguments,
    remark_on_missing,
)


def explain(
    judged: Sequence[JudgedCall], subject: RunInfo, reference: RunInfo, circumstances: Circumstances | None = None, subject_path: str = ""
) -> tuple[tuple[JudgedCall, ...], tuple[Finding, ...]]:
    """The calls with their contributions, and the findings: causes first, then what is merely worth knowing.

    `subject_path` is where the subject lies, for commands in advice.
    """
    views = _views(judged, subject, reference, subject_path)
    calls = tuple(call for view in views for call in (*view.calls, *with_ends(view)))
    later = circumstances.later if circumstances else ()
    faults = _first_faults(views)
    calls = tuple(_after(faults, call) for call in calls)
    findings = [_with_consequences(with_clues(fault, views), (*calls, *later)) for fault in faults] or remark_on_bits(views)
    said = {finding.kind for finding in findings if finding.level == "fault" or finding.kind == "rng"}
    findings += [note for remark in _REMARKS for note in remark(views) if note.kind not in said]
    findings += remark_on_nondeterminism(circumstances.bands) if circumstances and circumstances.bands else []
    known = circumstances or Circumstances()
    if any(finding.level == "fault" for finding in findings):
        known = replace(known, gaps=tuple(gap for gap in known.gaps if gap.why != UNBLAMED))
    findings += explain_circumstances(calls, known, is_doubt_said=any(one.kind == "bitwise" for one in findings))
    return calls, tuple(findings)


def _after(faults: Sequence[Finding], call: JudgedCall) -> JudgedCall:
    """Return a call as reports show it, once the faults are known."""
    is_later = any(fault.step is not None and fault.step < call.pair.record.step for fault in faults)
    return with_behind_told(left_behind(call) if is_later else call)


def _views(judged: Sequence[JudgedCall], subject: RunInfo, reference: RunInfo, subject_path: str) -> list[StepView]:
    parts: defaultdict[tuple[int, int], list[JudgedCall]] = defaultdict(list)
    for call in judged:
        record = call.pair.record
        parts[record.step, record.rank].append(call)
    last: dict[int, StepView] = {}
    views: list[StepView] = []
    for step, rank in sorted(parts):
        calls = with_contributions(call for call in parts[step, rank] if call.pair.record.phase != "end")
        view = StepView(
            rank=rank,
            step=step,
            calls=calls,
            subject=subject,
            reference=reference,
            subject_path=subject_path,
            divergence=first_divergence(calls),
            previous=last.get(rank),
            ends=tuple(call for call in parts[step, rank] if call.pair.record.phase == "end"),
        )
        last[rank] = view
        views.append(view)
    return views


def _first_faults(views: Sequence[StepView]) -> list[Finding]:
    for explanations in (EXPLANATIONS, _LAST_RESORT):
        for step in sorted({view.step for view in views}):
            here = [view for view in views if view.step == step]
            found = [(priority, finding) for view in here for priority, finding in _ask(view, explanations)]
            if found:
                return [explain_replicas(here) or _merge_ranks(found)]
    return []


def _ask(view: StepView, explanations: Sequence[Explanation]) -> list[tuple[tuple[bool, bool, int], Finding]]:
    """Return the first answer for one rank, with what it is ranked by among ranks."""
    for explanation in explanations:
        finding = explanation(view)
        if finding is not None:
            is_before_calls = finding.phase == "start"
            return [((not is_before_calls, _is_collective(finding), finding.order or 0), finding)]
    return []


def _is_collective(finding: Finding) -> bool:
    return finding.call.startswith(("distributed.", "c10d", "_c10d", "torch.distributed."))


def _merge_ranks(found: Sequence[tuple[tuple[bool, bool, int], Finding]]) -> Finding:
    _, first = min(found, key=lambda one: (one[1].level != "fault", *one[0]))
    culprit = (first.kind, first.module, first.call, first.slot)
    others = [finding for _, finding in found if finding is not first]
    same = [str(one.rank) for one in others if (one.kind, one.module, one.call, one.slot) == culprit]
    rest = [f"rank {one.rank} from {one.module or one.call}" for one in others if str(one.rank) not in same]
    lines = [f"also on rank{'s' if len(same) > 1 else ''} {', '.join(same)}"] if same else []
    lines += [f"other ranks diverge later or elsewhere: {listed(rest)}"] if rest else []
    return replace(first, evidence=(*first.evidence, *lines))


def _with_consequences(fault: Finding, calls: Sequence[JudgedCall]) -> Finding:
    """Adds what became of the error in the rest: counts by contribution, so that they agree with the counts of every report."""
    where = (fault.step, fault.rank, fault.order, fault.phase)
    rest: defaultdict[str, list[JudgedCall]] = defaultdict(list)
    for call in calls:
        if (
            call.level == "differs"
            and (call.pair.record.phase not in ("start", "end") or call.contribution == "inherited")
            and (_where(call) != where or call.contribution == "inherited")
        ):
            rest[call.contribution].append(call)
    is_handed = any(_where(call) == where for call in rest["inherited"])
    return replace(fault, evidence=(*fault.evidence, *_consequences(rest, is_handed=is_handed)))


def _consequences(rest: Mapping[str, Sequence[JudgedCall]], *, is_handed: bool) -> list[str]:
    inherited, amplified, masked, own = (rest.get(name, ()) for name in ("inherited", "amplified", "masked", "contributed"))
    lines = []
    if inherited:
        what = f"{count(len(inherited), 'difference' if is_handed else 'later difference')} {_verb(inherited, 'is', 'are')} inherited"
        lines.append(f"{what}, that of this call included" if is_handed else what)
    if amplified:
        lines.append(f"{count(len(amplified), 'call')} {_verb(amplified, 'magnifies', 'magnify')} it further (amplified); not blamed")
    if masked:
        lines.append(f"{count(len(masked), 'call')} {_verb(masked, 'receives', 'receive')} it without effect (masked)")
    if own:
        names = list(dict.fromkeys(call.pair.record.call.short for call in own))
        lines.append(f"{count(len(own), 'other call')} on agreeing inputs {_verb(own, 'errs', 'err')} too: {listed(names)}")
    return lines


def _verb(calls: Sequence[JudgedCall], one: str, many: str) -> str:
    return one if len(calls) == 1 else many


def _where(call: JudgedCall) -> tuple[int, int, int, str]:
    record = call.pair.record
    return record.step, record.rank, record.order, record.phase
