# SPDX-License-Identifier: Apache-2.0
"""The way forward from an old compare: our finding in a few lines, and our page beside the file that the user knows.

What goes wrong here is one printed sentence. The old result is there already and stays.
"""

from __future__ import annotations

from pathlib import Path

from ulpscope.errors import UlpscopeError
from ulpscope.model import Comparison, Run
from ulpscope.report.escaping import visible

__all__ = ["add_finding", "tell_finding"]

_PATIENCE_S = 20.0


def add_finding(subject: Run | Path, reference: Run | Path, page: Path) -> None:
    """Compare two dumps our way, print the first finding and write the page."""
    from ulpscope.workflows.comparing import compare_runs

    try:
        tell_finding(compare_runs(subject, reference, replay_seconds=_PATIENCE_S), page)
    except (UlpscopeError, OSError) as error:
        print(f"ulpscope: no finding of its own for these dumps: {error}")


def tell_finding(comparison: Comparison, page: Path) -> None:
    """Write the page, and print the first finding and where the page is."""
    from ulpscope.report.html import write_html

    write_html(comparison, page)
    print(f"ulpscope: {visible(_answer(comparison))}")
    sides = f"{comparison.subject_path} {comparison.reference_path}"
    print(f"          everything else is in {page}; the same by hand: ulpscope compare {visible(sides)}")


def _answer(comparison: Comparison) -> str:
    if comparison.faults:
        return comparison.faults[0].headline
    return "nothing differs by more than honest rounding explains"
