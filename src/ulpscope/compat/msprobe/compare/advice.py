# SPDX-License-Identifier: Apache-2.0
"""advisor_{time}.txt of 1.x: the first row that is not accurate and what to look at, in the words of the tool before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ulpscope.compat.msprobe.compare.result_rows import ResultRow
from ulpscope.compat.msprobe.compare.row_matching import CallPair
from ulpscope.compat.ptdbg.compare.advisor import advise, write_advice

__all__ = ["write_old_advice"]

_BAD = {"No": "No", "Warning": "No", "Different": "No"}
_MODULE_COUNT = re.compile(r"_(forward|backward)_\d{1,9}$")


def write_old_advice(calls: Sequence[CallPair], rows: Sequence[ResultRow], path: Path) -> None:
    """Write the advice on the rows of all calls, which are in the order of the calls."""
    names = [name for call in calls for name in _old_names(call)]
    advice = advise(names, [_BAD.get(row.verdict, "") for row in rows])
    known = {name: str(row.cells[0]) for name, row in zip(reversed(names), reversed(rows), strict=True)}
    write_advice(replace(advice, node=known.get(advice.node, advice.node)), path)


def _old_names(call: CallPair) -> list[str]:
    """`Functional_conv2d_0_forward_input.0`, as the advice knows them."""
    found = []
    for pair in call.rows:
        row, entry = (pair.target, call.target) if pair.target else (pair.golden, call.golden)
        assert row is not None
        name = entry.name if entry and row.name.startswith(entry.name) else row.name
        stem = _MODULE_COUNT.sub(r"_\1", name.replace(".", "_"))
        found.append(f"{stem}_{row.name[len(name) + 1 :]}")
    return found
