# SPDX-License-Identifier: Apache-2.0
"""Show ulpscope's own finding after an old compare: a few lines, and the page beside the file that the user knows.

A failure here is one printed sentence. The old result is already written and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ulpscope._shell import as_path, command_line
from ulpscope.compat.screen import print_warning
from ulpscope.errors import UlpscopeError, sentence_of
from ulpscope.model import Comparison, Run
from ulpscope.report.escaping import visible

__all__ = ["add_finding", "compare_beside", "tell_beside", "tell_finding"]

_PATIENCE_S = 20.0


def add_finding(subject: Run | Path, reference: Run | Path, page: Path) -> None:
    """Compare two dumps with ulpscope, print the first finding and write the page."""
    from ulpscope.workflows.compare.comparing import compare_runs

    try:
        tell_finding(compare_runs(subject, reference, replay_seconds=_PATIENCE_S), page)
    except (UlpscopeError, OSError) as error:
        print(f"ulpscope: no finding of its own for these dumps: {visible(sentence_of(error))}")


def compare_beside(open_sides: Callable[[], tuple[Run, Run]]) -> Comparison | None:
    """Compare the dumps of an old table with ulpscope, so that both results share one measurement; return None if that fails."""
    from ulpscope.workflows.compare.comparing import compare_runs

    try:
        return compare_runs(*open_sides(), replay="none")
    except Exception as error:  # a failure of the new result must not cost the user the old one
        _tell_failure(error)
        return None


def tell_beside(comparison: Comparison, page: Path) -> None:
    """Write the page and print the finding beside an old table."""
    try:
        tell_finding(comparison, page)
    except Exception as error:  # a failure of the new result must not cost the user the old one
        _tell_failure(error)


def _tell_failure(error: Exception) -> None:
    print_warning(f"ulpscope has no finding of its own here: {error or type(error).__name__}")


def tell_finding(comparison: Comparison, page: Path) -> None:
    """Write the page, and print the first finding and where the page is."""
    from ulpscope.report.comparison.html import write_html

    write_html(comparison, page)
    print(f"ulpscope: {visible(_answer(comparison))}")
    command = command_line("ulpscope", "compare", as_path(comparison.subject_path), as_path(comparison.reference_path))
    print(f"          everything else is in {visible(str(page))}; the same by hand: {command}")


def _answer(comparison: Comparison) -> str:
    if comparison.faults:
        return comparison.faults[0].headline
    if comparison.verdict == "unknown":
        doubts = [finding.headline for finding in comparison.findings if finding.kind in ("bitwise", "coverage")]
        return f"no fault found, and not everything could be compared: {doubts[0] if doubts else 'see the page'}"
    return "nothing differs by more than honest rounding explains"
