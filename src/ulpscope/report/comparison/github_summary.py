# SPDX-License-Identifier: Apache-2.0
"""Write the comparison as Markdown for the summary page of a GitHub workflow run.

Foreign texts stand in code spans or fenced blocks that are longer than any run of backticks in them, so that no name becomes markup.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from ulpscope.errors import InputError
from ulpscope.model import Comparison, Finding
from ulpscope.report.comparison.counts import count_calls
from ulpscope.report.comparison.coverage import answer_text, gaps_text
from ulpscope.report.escaping import encodable, shortened, visible

__all__ = ["append_github_summary"]

_VERDICTS = {
    "same": "✅ same: no difference",
    "rounding": "✅ nothing diverges",
    "unknown": "⚠️ unknown",
    "diverges": "❌ diverges",
}
_COUNTED = ("compared", "same", "rounding", "differs", "inherited", "only_subject", "only_reference", "unmeasured")
_MOST_NOTES = 10
_LONGEST = 2000


def append_github_summary(comparison: Comparison, path: Path) -> None:
    """Add the summary to a file that several steps of a workflow write to."""
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(encodable(_markdown(comparison)))
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror or error}; give the file that $GITHUB_STEP_SUMMARY names") from error


def _markdown(comparison: Comparison) -> str:
    gaps = gaps_text(comparison.coverage)
    lines = [
        f"## ulpscope: {_VERDICTS[comparison.verdict]}{_doubt(comparison)}",
        "",
        *([_span(gaps), ""] if gaps else []),
        f"{_span(comparison.subject_path)} against {_span(comparison.reference_path)}, rules {_span(comparison.rules)}: "
        f"{answer_text(comparison, count_calls(comparison))}",
        "",
    ]
    told = [one for one in comparison.findings if one.level == "fault" or one.kind == "bitwise"]
    for finding in told:
        lines += [_fenced(_finding_text(finding)), ""]
    notes = [one for one in comparison.findings if one not in told]
    lines += [f"- note: {_span(one.headline)}" for one in notes[:_MOST_NOTES]]
    lines += ["", *_table(comparison), ""]
    return "\n".join(lines)


def _doubt(comparison: Comparison) -> str:
    if comparison.verdict != "unknown":
        return ""
    return ": not everything was compared" if comparison.coverage.leaves_doubt else ": bits differ by an unknown amount"


def _finding_text(finding: Finding) -> str:
    lines = [finding.headline, *(f"  {line}" for line in finding.evidence)]
    if finding.source is not None:
        lines.append(f"  {finding.source.file}:{finding.source.line} in {finding.source.function}: {finding.source.code.strip()}")
    lines += [f"  repro: {finding.repro}"] if finding.repro else []
    lines += [f"  next: {finding.next}"] if finding.next else []
    return "\n".join(shortened(line, _LONGEST) for line in lines)


def _table(comparison: Comparison) -> list[str]:
    counts = asdict(count_calls(comparison))
    names = [name for name in _COUNTED if name in counts]
    return [
        f"| {' | '.join(name.replace('_', ' ') for name in names)} |",
        f"|{'---|' * len(names)}",
        f"| {' | '.join(str(counts[name]) for name in names)} |",
    ]


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest_ticks(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _span(text: str) -> str:
    shown = visible(shortened(text, _LONGEST)).strip() or " "
    ticks = "`" * (_longest_ticks(shown) + 1)
    pad = " " if shown[0] == "`" or shown[-1] == "`" else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
