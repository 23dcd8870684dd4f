# SPDX-License-Identifier: Apache-2.0
"""The page and the table of thresholds say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ulpscope.judge import THRESHOLDS, threshold
from ulpscope.judge.thresholds import rounding_units
from ulpscope.model import DTYPES

PAGE = Path(__file__).parents[2] / "docs" / "verdicts.md"


def test_the_page_shows_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(one.name, f"{one.value:g}", one.decides, one.source) for one in THRESHOLDS]


def test_names_are_unique() -> None:
    assert len({one.name for one in THRESHOLDS}) == len(THRESHOLDS)


@pytest.mark.parametrize(
    ("dtype", "units"),
    [("float32", 128 * 2.0**-24), ("float64", 128 * 2.0**-53), ("bfloat16", 32 * 2.0**-8), ("float8_e4m3fn", 0.25), ("float8_e5m2", 0.25)],
)
def test_rounding_units(dtype: str, units: float) -> None:
    assert rounding_units(DTYPES[dtype]) == units


def test_without_floats_nothing_rounds() -> None:
    assert rounding_units(None) == 0.0
    assert threshold("amplification") == 8
