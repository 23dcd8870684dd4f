# SPDX-License-Identifier: Apache-2.0
"""The limits of the older tools' tables stand on the page as they stand in the code."""

from __future__ import annotations

import re
from pathlib import Path

from ulpscope.judge.published.table_limits import TABLE_LIMITS, table_limit

PAGE = (Path(__file__).parents[2] / "docs" / "standards.md").read_text(encoding="utf-8")


def test_the_page_has_every_limit() -> None:
    section = PAGE.partition("## Tables of the older tools")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \| ([\de.+]+) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert shown == [(limit.name, f"{limit.value:g}", limit.decides, limit.source) for limit in TABLE_LIMITS]


def test_each_limit_has_one_value() -> None:
    assert {limit.name: table_limit(limit.name) for limit in TABLE_LIMITS} == {limit.name: limit.value for limit in TABLE_LIMITS}
    assert len({limit.name for limit in TABLE_LIMITS}) == len(TABLE_LIMITS)
