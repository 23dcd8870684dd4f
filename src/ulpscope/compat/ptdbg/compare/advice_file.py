# SPDX-License-Identifier: Apache-2.0
"""Write advisor_{time}.txt, the advice on a table. Old users search for its three entries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ulpscope.compat.screen import print_info, print_warning
from ulpscope.judge.published.advice import Advice
from ulpscope.report.escaping import visible
from ulpscope.report.replacing import replacing

__all__ = ["tell_unmatched", "write_advice"]

_MOST_WARNINGS = 20


def tell_unmatched(names: Sequence[str], words: Sequence[str]) -> None:
    """Warn of rows that were not compared, since their shapes differ."""
    unmatched = [name for name, word in zip(names, words, strict=True) if word == "Unmatched"]
    for name in unmatched[:_MOST_WARNINGS]:
        print_warning(f"{name} is unmatched: its shape differs from the bench's, so it was not compared.")
    if len(unmatched) > _MOST_WARNINGS:
        print_warning(f"{len(unmatched) - _MOST_WARNINGS} more rows are unmatched.")


def write_advice(advice: Advice, node: str, path: Path) -> None:
    """Write the entries into a file and on the screen; the line counts the header of the table as line 1."""
    line = "NA" if advice.row is None else str(advice.row + 2)
    entries = f"Line: {line}", f"Suspect Nodes: {visible(node)}", f"Expert Advice: {advice.text}"
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")
        temporary.chmod(0o640)
    print_info("By the rule of ptdbg_ascend, which looks at cosine and largest error alone:")
    for entry in entries:
        print_info(entry)
    print_info(f"The advice is in {path}")
