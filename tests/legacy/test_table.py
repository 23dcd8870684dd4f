# SPDX-License-Identifier: Apache-2.0
"""Hold the page of promises against the tests: it says what they do, and every number is accounted for."""

from __future__ import annotations

from tests.legacy import table


def test_every_promise_has_a_test_or_a_reason() -> None:
    assert table.faults() == []


def test_the_page_is_what_the_tests_make_of_it() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run `python -m tests.legacy.table`"


def test_every_number_of_the_older_tools_is_here() -> None:
    worded = {number for promised in table.promises().values() for number in promised}
    gaps = {*range(14, 20), *range(39, 50), *range(61, 70), *range(105, 110), *range(140, 150), *range(156, 160)}  # never given out
    ptdbg = {f"P{number:03d}" for number in range(1, 174) if number not in gaps} | {"P102a", "P102b"}
    others = {"H": 26, "R": 13, "C": 21, "O": 6, "M": 14}
    rest = {f"{letter}{number:02d}" for letter, last in others.items() for number in range(1, last + 1)} | {"R04a"}
    assert (ptdbg | rest) - worded == set()
