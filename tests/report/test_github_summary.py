# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.sample import sample_comparison
from ulpscope.errors import InputError
from ulpscope.model import Finding
from ulpscope.report.comparison.github_summary import append_github_summary


def test_the_verdict_the_fault_and_the_counts(tmp_path: Path) -> None:
    comparison = sample_comparison()
    (tmp_path / "summary.md").write_text("what an earlier step wrote\n")
    append_github_summary(comparison, tmp_path / "summary.md")
    text = (tmp_path / "summary.md").read_text()
    assert text.startswith("what an earlier step wrote\n## ulpscope: ❌ diverges\n")
    fault = comparison.faults[0]
    assert f"```text\n{fault.headline}\n  {fault.evidence[0]}\n" in text
    assert "| compared | same | rounding | differs |" in text
    append_github_summary(replace(comparison, findings=()), tmp_path / "summary.md")
    assert "## ulpscope: ✅ nothing diverges" in (tmp_path / "summary.md").read_text()


def test_hostile_names_stay_inside_their_fences(tmp_path: Path) -> None:
    odd = "```\n# owned <script> ````` \x1b[31m"
    findings = tuple(Finding(level=level, kind="contributed", headline=odd, evidence=(odd,)) for level in ("fault", "note"))
    append_github_summary(replace(sample_comparison(), findings=findings, subject_path=odd), tmp_path / "s.md")
    text = (tmp_path / "s.md").read_text()
    outside = re.sub(r"(?s)(`{6,})(?!`).*?(?<!`)\1(?!`)", "", text)
    assert "owned" not in outside
    assert "script" not in outside
    assert "\x1b" not in text


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*GITHUB_STEP_SUMMARY"):
        append_github_summary(sample_comparison(), tmp_path / "no" / "summary.md")
