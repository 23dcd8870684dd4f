# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.report.sample import sample_comparison
from ulpscope.model import Comparison, Finding
from ulpscope.report.comparison.junit import write_junit


def suite_of(comparison: Comparison, folder: Path) -> ElementTree.Element:
    write_junit(comparison, folder / "junit.xml")
    suite = ElementTree.parse(folder / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    return suite


def test_a_test_case_for_each_module_and_a_failure_for_the_culprit(tmp_path: Path) -> None:
    comparison = sample_comparison()
    suite = suite_of(comparison, tmp_path)
    names = [case.get("name") for case in suite]
    assert len(names) == len(set(names)) == int(suite.get("tests") or 0)
    assert {call.pair.record.module for call in comparison.calls if call.pair.record.module} <= set(names)
    [failed] = [case for case in suite if case.find("failure") is not None]
    fault = comparison.faults[0]
    told = failed.find("failure")
    assert told is not None
    assert (failed.get("name"), told.get("message"), told.get("type")) == (fault.module, fault.headline, fault.kind)
    assert all(line in (told.text or "") for line in fault.evidence)
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")


def test_nothing_fails_where_nothing_diverges(tmp_path: Path) -> None:
    suite = suite_of(replace(sample_comparison(), findings=()), tmp_path)
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")


@pytest.mark.parametrize(
    ("phase", "name"), [("start", "(parameters and batch)"), ("optimizer", "(optimizer)"), (None, "(outside of modules)")]
)
def test_a_fault_without_a_module_has_a_test_case_too(phase: str | None, name: str, tmp_path: Path) -> None:
    fault = Finding(level="fault", kind="batch", headline="the batches differ", phase=phase)  # type: ignore[arg-type]
    suite = suite_of(replace(sample_comparison(), findings=(fault,)), tmp_path)
    assert [case.get("name") for case in suite if case.find("failure") is not None] == [name]


def test_the_same_comparison_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        suite_of(replace(sample_comparison(), elapsed_s=float(len(name))), tmp_path / name)
    assert (tmp_path / "a/junit.xml").read_bytes() == (tmp_path / "b/junit.xml").read_bytes()


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    odd = 'a"/><failure/>&\x00\x1b[31m\ud800]]>'
    fault = Finding(level="fault", kind="contributed", headline=odd, module=odd, evidence=(odd,))
    suite = suite_of(replace(sample_comparison(), findings=(fault,)), tmp_path)
    [case] = [case for case in suite if case.find("failure") is not None]
    assert case.get("name") == 'a"/><failure/>&\\x00\\x1b[31m\\ud800]]>'
