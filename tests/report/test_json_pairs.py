# SPDX-License-Identifier: Apache-2.0
"""Lines are joined from pieces, and each is what its row alone would give."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.report.test_table import with_measurement
from ulpscope.model import Comparison, JudgedCall, JudgedSlot, Summary, Undefined
from ulpscope.report.comparison import json_pairs
from ulpscope.report.comparison.json_pairs import PairLines
from ulpscope.report.comparison.rows import COLUMNS, pair_rows
from ulpscope.report.json_text import text


def expected(comparison: Comparison) -> list[str]:
    names = [column.name for column in COLUMNS]
    return [text({name: cell for name, cell in zip(names, row, strict=True) if cell is not None}) for row in pair_rows(comparison)]


def with_slots(comparison: Comparison, *slots: JudgedSlot) -> Comparison:
    return replace(comparison, calls=(replace(comparison.calls[4], slots=slots),))


def test_a_line_is_its_row(comparison: Comparison) -> None:
    assert list(PairLines().lines(comparison)) == expected(comparison)
    assert len({call.contribution for call in comparison.calls}) > 2
    assert any(call.pair.subject is None for call in comparison.calls)


def test_calls_without_slots_have_a_line(comparison: Comparison) -> None:
    bare = with_slots(comparison)
    lines = PairLines()
    lines.judged(bare.calls[0])
    assert list(lines.lines(bare)) == expected(bare)


def test_what_was_told_before_the_end_changes_nothing(comparison: Comparison) -> None:
    lines = PairLines()
    for call in comparison.calls:
        lines.judged(replace(call, contribution="clean"))
    assert list(lines.lines(comparison)) == expected(comparison)


def judged_again(call: JudgedCall) -> JudgedCall:
    return replace(call, slots=tuple(replace(slot, verdict=replace(slot.verdict, reason="seen again")) for slot in call.slots))


def test_what_was_judged_again_is_written_as_judged_last(comparison: Comparison) -> None:
    lines = PairLines()
    for call in comparison.calls:
        lines.judged(call)
    again = replace(comparison, calls=tuple(judged_again(call) if at % 2 else call for at, call in enumerate(comparison.calls)))
    assert list(lines.lines(again)) == expected(again)


@pytest.mark.parametrize("limit", ["_MOST_ROWS", "_MOST_KNOWN"])
def test_only_so_much_is_kept(limit: str, comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_pairs, limit, 5)
    lines = PairLines()
    for call in comparison.calls:
        lines.judged(call)
    if limit == "_MOST_ROWS":
        assert not lines._rows
    assert list(lines.lines(comparison)) == expected(comparison)


def test_the_two_zeros_are_told_apart(comparison: Comparison) -> None:
    slot = comparison.calls[4].slots[-1]
    assert slot.pair.subject is not None
    summaries = [Summary(numel=3, min=zero, max=2.0, mean=1.0, rms=1.0) for zero in (0.0, -0.0, 0.0)]
    slots = [replace(slot, pair=replace(slot.pair, subject=replace(slot.pair.subject, summary=summary))) for summary in summaries]
    found = with_slots(comparison, *slots)
    lines = list(PairLines().lines(found))
    assert lines == expected(found)
    assert [str(json.loads(line)["subject_min"]) for line in lines] == ["0.0", "-0.0", "0.0"]


@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_what_is_no_number_is_a_string(value: float, name: str, comparison: Comparison) -> None:
    found = with_measurement(comparison, max_rel=value, cosine=Undefined('a "quoted" reason\n with a line'))
    (line,) = PairLines().lines(found)
    assert line == expected(found)[0]
    assert json.loads(line)["max_rel"] == name
    assert "\n" not in line
