# SPDX-License-Identifier: Apache-2.0
"""One comparison has the same numbers on every surface: terminal, JSON, page, csv, JUnit and GitHub summary."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tests.report.sample import sample_comparison
from ulpscope.model import Comparison, Coverage, Gap
from ulpscope.report.comparison.console import render_comparison
from ulpscope.report.comparison.counts import count_calls
from ulpscope.report.comparison.coverage import gaps_text
from ulpscope.report.comparison.github_summary import append_github_summary
from ulpscope.report.comparison.html import page_data
from ulpscope.report.comparison.json_ import write_json
from ulpscope.report.comparison.junit import write_junit
from ulpscope.report.comparison.table import write_csv

GAPS = (
    Gap(kind="rank", why="only in the reference", places=("rank 1",)),
    Gap(kind="call", why="only in the subject", many=3, places=("mul.0 (forward), step 0, rank 0",)),
)
TOTALS = {"rank": 2, "step": 1, "call": 40, "slot": 90}


def sample(kind: str) -> Comparison:
    whole = sample_comparison()
    coverage = Coverage(gaps=GAPS, totals=TOTALS, num_opaque=2)  # type: ignore[arg-type]
    calm = tuple(call for call in whole.calls if call.level in ("same", "rounding"))
    return {
        "diverges": whole,
        "diverges with gaps": replace(whole, coverage=coverage),
        "unknown": replace(whole, findings=(), coverage=coverage),
        "partial": replace(whole, findings=(), coverage=replace(coverage, is_partial=True)),
        "differ without a fault": replace(whole, findings=()),
        "rounding": replace(whole, findings=(), calls=calm),
    }[kind]


@pytest.fixture(params=["diverges", "diverges with gaps", "unknown", "partial", "differ without a fault", "rounding"])
def comparison(request: pytest.FixtureRequest) -> Comparison:
    return sample(request.param)


def terminal(comparison: Comparison) -> str:
    stream = io.StringIO()
    render_comparison(comparison, Console(file=stream, width=200))
    return stream.getvalue()


def test_the_counts_are_the_same_everywhere(comparison: Comparison, tmp_path: Path) -> None:
    counts = asdict(count_calls(comparison))
    heads, numbers = terminal(comparison).splitlines()[-2:]
    shown = dict(zip(re.split(r"\s{2,}", heads.strip()), map(int, numbers.split()), strict=True))
    names = {"calls compared": "compared", "differ": "differs", "only subject": "only_subject", "only reference": "only_reference"}
    assert {names.get(name, name): number for name, number in shown.items()}.items() <= counts.items()

    write_json(comparison, tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text())
    assert (written["counts"], written["verdict"]) == (counts, comparison.verdict)

    append_github_summary(comparison, tmp_path / "summary.md")
    lines = (tmp_path / "summary.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert {name.replace(" ", "_"): int(number) for name, number in zip(rows[0], rows[2], strict=True)}.items() <= counts.items()

    page = page_data(comparison)
    assert sum(page["counts"].values()) == counts["calls"]
    assert page["counts"].get("same", 0) == counts["same"]
    assert page["counts"].get("rounding", 0) == counts["rounding"]
    assert page["counts"].get("unmatched", 0) == counts["only_subject"] + counts["only_reference"] + counts["partial"]

    for state in ("contributed", "inherited", "amplified", "masked"):
        assert page["counts"].get(state, 0) == counts[state]

    write_csv(comparison, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    called = {(row["step"], row["rank"], row["order"], row["phase"], row["subject_call"], row["reference_call"]) for row in table}
    assert len(called) == counts["calls"]
    assert sum(not key[5] for key in called) == counts["only_subject"]

    write_junit(comparison, tmp_path / "a.xml")
    suite = ElementTree.parse(tmp_path / "a.xml").getroot().find("testsuite")
    assert suite is not None
    assert int(suite.get("failures") or 0) == len(comparison.faults)


def test_what_was_not_compared_is_told_alike_everywhere(comparison: Comparison, tmp_path: Path) -> None:
    gaps = gaps_text(comparison.coverage)
    write_json(comparison, tmp_path / "a.json")
    append_github_summary(comparison, tmp_path / "summary.md")
    write_junit(comparison, tmp_path / "a.xml")
    told = json.loads((tmp_path / "a.json").read_text())["coverage"]
    assert (told["text"], page_data(comparison)["not_compared"]) == (gaps, gaps)
    assert gaps in (tmp_path / "summary.md").read_text()
    assert gaps in (tmp_path / "a.xml").read_text()
    if not gaps:
        return
    assert gaps.startswith("1 of 2 ranks and 3 of 40 calls were not compared (rank 1 only in the reference")
    assert {(part["kind"], part["total"], part["not_compared"]) for part in told["parts"] if part["not_compared"]} == {
        ("rank", 2, 1),
        ("call", 40, 3),
    }
    headline = terminal(comparison).splitlines()[0]
    assert "inside 2 of 40 calls no recording looks" in headline
    if comparison.verdict == "unknown":
        assert headline.startswith(f"unknown: {gaps}: ")
        [suite] = ElementTree.parse(tmp_path / "a.xml").getroot()
        assert suite.get("errors") == "1"


def test_a_multiple_is_the_same_number_wherever_it_stands(tmp_path: Path) -> None:
    comparison = sample("diverges")
    write_csv(comparison, tmp_path / "a.csv")
    write_json(comparison, tmp_path / "a.json")
    with (tmp_path / "a.csv").open(newline="") as stream:
        table = [float(row["multiple"]) for row in csv.DictReader(stream) if row["multiple"]]
    in_json = [pair["multiple"] for pair in json.loads((tmp_path / "a.json").read_text())["pairs"] if pair.get("multiple") is not None]
    assert table == pytest.approx(in_json)
    assert max(value for value in page_data(comparison)["rows"]["multiple"] if value is not None) == pytest.approx(max(table), rel=1e-3)


def test_a_fault_counts_its_consequences_as_every_table_does(tmp_path: Path) -> None:
    """Calls that receive an error and make what is within rounding stand under rounding, and not among those that it did not reach."""
    torch = pytest.importorskip("torch")
    from ulpscope import Capture, compare_runs

    def record(into: Path, approximate: str) -> Path:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        with Capture(into, model=layers, keep="tensors") as capture:
            x = torch.randn(8, 16)
            for number, layer in enumerate(layers):
                x = x + torch.nn.functional.gelu(layer(x), approximate=approximate if number == 1 else "none")
            (x.square().mean() + (x > 100).float().sum()).backward()
            capture.step()
        return into

    comparison = compare_runs(record(tmp_path / "subject", "tanh"), record(tmp_path / "reference", "none"))
    counts, (fault,) = count_calls(comparison), comparison.faults
    said = {word: int(line.split()[0]) for line in fault.evidence for word in ("inherited", "amplified", "masked") if word in line}
    assert said == {word: number for word in ("inherited", "amplified", "masked") if (number := getattr(counts, word))}
    assert counts.contributed + sum(said.values()) == counts.differs
    others = [int(line.split()[0]) for line in fault.evidence if "on agreeing inputs" in line]
    assert counts.contributed == 1 + sum(others)
