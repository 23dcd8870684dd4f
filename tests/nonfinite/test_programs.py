# SPDX-License-Identifier: Apache-2.0
"""The hunt names the first maker in every faulty program, and reports nothing in the harmless ones: live, and from statistics
afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from tests.nonfinite.programs import FAULTY, HARMLESS, Expected
from ulpscope.model import NonFiniteReport
from ulpscope.workflows.nonfinite import find_nonfinite

WAYS = {"watched": {"watch": "nonfinite"}, "glancing": {"watch": "nonfinite"}, "statistics": {"keep": "statistics"}}


@pytest.fixture(autouse=True)
def at_a_glance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hunt takes ranges in the first step, where these programs go wrong; without them it has only sums."""
    if request.node.callspec.params["way"] == "glancing":
        monkeypatch.setattr("ulpscope.capture.nonfinite.hunt.takes_ranges", lambda step: False)


def report_of(program: Any, folder: Path, **options: Any) -> NonFiniteReport:
    torch.manual_seed(0)
    program(lambda model=None, optimizer=None: ulpscope.Capture(folder / "run", model, optimizer=optimizer, **options))
    return find_nonfinite(folder / "run")


def check(report: NonFiniteReport, expected: Expected) -> None:
    first = report.first
    assert first is not None, [event.headline for event in report.events]
    assert first.kind == expected.kind, first.headline
    if expected.op:
        assert first.call.rpartition(".")[0].rpartition(".")[2] == expected.op, first.headline
    if expected.phase:
        assert first.phase == expected.phase, first.headline
    if expected.module is not None:
        assert first.module == expected.module, first.headline


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAULTY)
def test_the_first_maker_is_named(name: str, way: str, tmp_path: Path) -> None:
    program, expected = FAULTY[name]
    report = report_of(program, tmp_path, **WAYS[way])
    check(report, expected)
    first = report.first
    assert first is not None
    if way != "statistics":
        assert expected.says in f"{first.cause} {first.remedy}", (first.cause, first.remedy)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HARMLESS)
def test_the_harmless_give_no_alarm(name: str, way: str, tmp_path: Path) -> None:
    report = report_of(HARMLESS[name], tmp_path, **WAYS[way])
    assert report.first is None, report.first
