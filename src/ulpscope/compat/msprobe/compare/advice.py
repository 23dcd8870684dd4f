# SPDX-License-Identifier: Apache-2.0
"""Write advisor_{time}.txt of 1.x: the first row that is not accurate and what to look at, in the words of ptdbg."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ulpscope.compat.msprobe.compare.result_rows import ResultRow
from ulpscope.compat.ptdbg.compare.advice_file import write_advice
from ulpscope.judge.published.advice import advise
from ulpscope.model.written import WrittenCallPair

__all__ = ["write_old_advice"]

_BAD = {"No": "No", "Warning": "No", "Different": "No"}
_MODULE_COUNT = re.compile(r"_(forward|backward)_\d{1,9}$")


def write_old_advice(calls: Sequence[WrittenCallPair], rows: Sequence[ResultRow], path: Path) -> None:
    """Write the advice on the rows of all calls, which are in the order of the calls."""
    advice = advise([name for call in calls for name in _old_names(call)], [_BAD.get(row.verdict, "") for row in rows])
    write_advice(advice, "NA" if advice.row is None else str(rows[advice.row].cells[0]), path)


def _old_names(call: WrittenCallPair) -> Iterator[str]:
    """Yield names as the advice knows them: `Functional_conv2d_0_forward_input.0`."""
    for pair in call.values:
        value, owner = (pair.subject, call.subject) if pair.subject else (pair.reference, call.reference)
        assert value is not None
        name = owner.name if owner and value.name.startswith(owner.name) else value.name
        stem = _MODULE_COUNT.sub(r"_\1", name.replace(".", "_"))
        yield f"{stem}_{value.name[len(name) + 1 :]}"
