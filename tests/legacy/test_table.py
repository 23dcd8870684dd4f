# SPDX-License-Identifier: Apache-2.0
"""The page of promises says what the tests do, and every number is accounted for."""

from __future__ import annotations

from tests.legacy import table


def test_every_promise_has_a_test_or_a_reason() -> None:
    assert table.faults() == []


def test_the_page_is_what_the_tests_make_of_it() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run `python -m tests.legacy.table`"


def test_every_number_of_the_older_tools_is_here() -> None:
    worded = {number for promised in table.promises().values() for number in promised}
    assert {f"H{number:02d}" for number in range(1, 27)} <= worded
