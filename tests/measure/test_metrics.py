# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ulpscope.measure import METRICS
from ulpscope.model import TensorMeasurement

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NOT_METRICS = {"numel", "equal", "worst_index", "worst_subject", "worst_reference"}


def test_the_table_has_every_number_of_a_measurement() -> None:
    assert set(METRICS) == {field.name for field in dataclasses.fields(TensorMeasurement)} - NOT_METRICS


@pytest.mark.parametrize("name", METRICS)
def test_an_entry_is_complete(name: str) -> None:
    entry = METRICS[name]
    assert entry.id == name
    assert format(1 if entry.format == "d" else 1.5, entry.format)
    assert entry.meaning.endswith(".")
    assert entry.symbol


@pytest.mark.parametrize("name", METRICS)
def test_the_page_explains(name: str) -> None:
    assert f"| `{name}` |" in PAGE.read_text(encoding="utf-8")
