# SPDX-License-Identifier: Apache-2.0
"""The way forward from an old compare: our finding in a few lines, and our page beside the file that the user knows.

What goes wrong here is one printed sentence. The old result is there already and stays.
"""

from __future__ import annotations

from pathlib import Path

from ulpscope.errors import UlpscopeError
from ulpscope.model import Comparison, Run

__all__ = ["add_finding"]


def add_finding(subject: Run | Path, reference: Run | Path, page: Path) -> None:
    """Compare two dumps our way, print the first finding and write the page."""
    from ulpscope.report.html import write_html
    from ulpscope.workflows.comparing import compare_runs

    try:
        comparison = compare_runs(subject, reference)
        write_html(comparison, page)
    except (UlpscopeError, OSError) as error:
        print(f"ulpscope: no finding of its own for these dumps: {error}")
        return
    print(f"ulpscope: {_answer(comparison)}")
    print(f"          everything else is in {page}; the same by hand: ulpscope compare {_path(subject)} {_path(reference)}")


def _answer(comparison: Comparison) -> str:
    if comparison.faults:
        return comparison.faults[0].headline
    return "nothing differs by more than honest rounding explains"


def _path(side: Run | Path) -> Path:
    return side if isinstance(side, Path) else side.path
