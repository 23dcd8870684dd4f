# SPDX-License-Identifier: Apache-2.0
"""The data and the file of the HTML report, without a browser."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.sample import sample_comparison, sample_run_info
from ulpscope.errors import InputError
from ulpscope.model import (
    CallName,
    CallRecord,
    Comparison,
    Finding,
    FingerprintMeasurement,
    Histogram,
    JudgedCall,
    JudgedSlot,
    Pair,
    Slot,
    SlotPair,
    TensorRecord,
    Verdict,
)
from ulpscope.report.comparison import html
from ulpscope.report.comparison.html import page_data, write_html
from ulpscope.workflows.compare.condensing import Condensed

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<!--<script>",
    "-->]]>&lt;\u2028\u2029",
    "<img src=x onerror='window.hacked = 1'>",
    "\ud800 a lone surrogate, \x00 and \u202e backwards",
)


class _Scripts(HTMLParser):
    """Collects every script element as a browser would find it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[dict[str, str | None], str]] = []
        self._is_inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.found.append((dict(attrs), ""))
            self._is_inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            attributes, text = self.found[-1]
            self.found[-1] = (attributes, text + data)


def scripts_of(path: Path) -> list[tuple[dict[str, str | None], str]]:
    parser = _Scripts()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser.found


def embedded_json(path: Path) -> Any:
    (text,) = [text for attributes, text in scripts_of(path) if attributes.get("id") == "comparison"]
    return json.loads(text)


def one_call(name: str, *, order: int = 0, equal: bool = True, module: str = "") -> JudgedCall:
    slot = Slot("output", (0,))
    tensor = TensorRecord(slot=slot, dtype="float32", shape=(2, 3))
    record = CallRecord(rank=0, step=0, order=order, call=CallName(name, 0), phase="forward", module=module, slots=(tensor,))
    pair = SlotPair(slot, tensor, tensor)
    verdict = Verdict("same", "derived", "fingerprints are equal") if equal else Verdict("differs", "derived", "fingerprints differ")
    judged = JudgedSlot(pair, FingerprintMeasurement(equal=equal), verdict)
    return JudgedCall(pair=Pair(subject=record, reference=record, matched_by="name", slots=(pair,)), slots=(judged,), contribution="clean")


def comparison_of(*calls: JudgedCall, findings: tuple[Finding, ...] = ()) -> Comparison:
    return Comparison(
        subject=sample_run_info("npu:0"),
        reference=sample_run_info("cuda:0"),
        subject_path="runs/a",
        reference_path="runs/b",
        rules="derived",
        findings=findings,
        calls=calls,
    )


def test_file_holds_exactly_the_page_data(tmp_path: Path) -> None:
    comparison = sample_comparison()
    write_html(comparison, tmp_path / "report.html")
    assert embedded_json(tmp_path / "report.html") == json.loads(json.dumps(page_data(comparison)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_built_page_is_small_and_has_one_place_for_data() -> None:
    page = Path(html.__file__).parent.with_name("assets") / "report.html"
    assert page.stat().st_size < 200_000
    assert page.read_text(encoding="utf-8").count(html.MARKER) == 1


def test_file_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    write_html(sample_comparison(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=", text)
    assert not re.search(r"url\(|@import", text)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_data(tmp_path: Path, name: str) -> None:
    finding = Finding(level="fault", kind=name, headline=name, module=name, call=name, evidence=(name,), next=name)
    write_html(comparison_of(one_call(name, module=name, equal=False), findings=(finding,)), tmp_path / "report.html")
    write_html(comparison_of(), tmp_path / "harmless.html")
    assert len(scripts_of(tmp_path / "report.html")) == len(scripts_of(tmp_path / "harmless.html")) == 2
    data = embedded_json(tmp_path / "report.html")
    assert data["findings"][0]["headline"] == name
    assert name in data["texts"]


@given(st.text(st.characters(codec=None)))
def test_embedded_json_holds_no_markup_and_reads_back(text: str) -> None:
    embedded = html._embedded({"text": text})
    assert not set("<>&\u2028\u2029") & set(embedded)
    assert embedded.isascii()
    assert json.loads(embedded) == {"text": text}


def test_columns_have_one_entry_a_call() -> None:
    comparison = sample_comparison(num_calls=60)
    data = page_data(comparison)
    assert {len(column) for column in data["rows"].values()} == {60}
    for row, call in enumerate(comparison.calls):
        assert data["texts"][data["rows"]["module"][row]] == call.pair.record.module
        assert data["codes"]["level"][data["rows"]["level"][row]] == call.level
        assert len(data["signatures"][data["rows"]["signature"][row]]) == len(call.slots)


def test_finding_points_at_its_row() -> None:
    comparison = sample_comparison()
    (row,) = [row for row, call in enumerate(comparison.calls) if call.contribution == "contributed"]
    data = page_data(comparison)
    assert data["findings"][0]["row"] == row
    assert data["findings"][2]["row"] is None
    assert row in data["details"]["slots"]["row"]


@pytest.mark.parametrize(
    ("finding", "row"),
    [
        (Finding(level="fault", kind="contributed", headline="", rank=0, step=0, phase="forward", call="b.0", order=0), 1),
        (Finding(level="fault", kind="contributed", headline="", rank=0, step=0, phase="forward", order=1), 1),
        (Finding(level="fault", kind="contributed", headline="", rank=0, step=0, phase="forward", call="gone.0", order=0), 0),
        (Finding(level="fault", kind="contributed", headline="", rank=1, step=0, phase="forward", call="b.0", order=1), None),
        (Finding(level="note", kind="coverage", headline=""), None),
    ],
)
def test_row_of_a_finding(finding: Finding, row: int | None) -> None:
    data = page_data(comparison_of(one_call("a"), one_call("b", order=1), findings=(finding,)))
    assert data["findings"][0]["row"] == row


@pytest.mark.parametrize(
    ("value", "expected"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (None, None), (0.123456, 0.1235), (7, 7)]
)
def test_numbers_survive_json(value: float | None, expected: object) -> None:
    assert json.loads(html._embedded(html._number(value))) == expected


def test_infinite_distance_and_edges_are_written(tmp_path: Path) -> None:
    comparison = sample_comparison()
    calls = tuple(replace(call, multiple=math.inf) for call in comparison.calls)
    finding = replace(comparison.findings[0], histograms=(Histogram("subject", (-math.inf, 0.0, math.nan), (1, 2)),))
    write_html(replace(comparison, calls=calls, findings=(finding,)), tmp_path / "report.html")
    data = embedded_json(tmp_path / "report.html")
    assert set(data["rows"]["multiple"]) == {"inf"}
    assert data["findings"][0]["histograms"][0]["edges"] == ["-inf", 0.0, "nan"]


def test_undefined_metric_keeps_its_reason() -> None:
    data = page_data(sample_comparison())
    reasons = [value for row in data["details"]["slots"]["metrics"] if row for value in row if isinstance(value, list)]
    assert ["the reference holds zeros"] in reasons


def test_many_same_calls_are_left_out_but_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "ROW_LIMIT", 4)
    calls = [one_call(f"same{order}", order=order) for order in range(8)] + [one_call("bad", order=8, equal=False)]
    finding = Finding(level="note", kind="arguments", headline="", rank=0, step=0, phase="forward", call="same6.0")
    data = page_data(comparison_of(*calls, findings=(finding,)))
    assert data["rows"]["order"] == [0, 1, 6, 8]
    assert data["num_left_out"] == 5
    assert data["counts"] == {"same": 8, "differs": 1}
    assert data["findings"][0]["row"] == 2


def test_the_first_differing_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that holds a million of them opens nowhere."""
    monkeypatch.setattr(html, "ROW_LIMIT", 2)
    data = page_data(comparison_of(*(one_call(f"op{order}", order=order, equal=order == 0) for order in range(5))))
    assert data["rows"]["order"] == [1, 2]
    assert data["num_left_out"] == 3


def test_condensed_steps_are_counted_and_left_out() -> None:
    condensed = Condensed()
    condensed.add(1, [one_call(f"op{order}", order=order) for order in range(3)])
    data = page_data(replace(comparison_of(one_call("op0")), condensed=condensed))
    assert (data["num_left_out"], data["counts"]) == (3, {"same": 4})


def test_details_beyond_the_limit_leave_the_culprit_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "SLOT_LIMIT", 3)
    comparison = sample_comparison()
    data = page_data(comparison)
    assert data["details"]["slots"]["row"][0] == data["findings"][0]["row"]
    num_kept, num_left_out = len(data["details"]["slots"]["row"]), data["details"]["num_left_out"]
    assert num_kept <= 3
    assert num_kept + num_left_out == sum(slot.verdict.level != "same" for call in comparison.calls for slot in call.slots)


def test_long_names_are_cut_in_the_middle() -> None:
    data = page_data(comparison_of(one_call("op." + "x" * 100_000 + ".end")))
    assert max(map(len, data["texts"])) < 500
    assert data["texts"][data["rows"]["op"][0]].endswith(".end")


def test_empty_comparison_has_no_rows() -> None:
    data = page_data(comparison_of())
    assert data["verdict"] == "same"
    assert data["rows"] == {}


def test_facts_name_what_made_the_runs() -> None:
    facts = dict(page_data(sample_comparison())["subject"]["facts"])
    assert facts["devices"] == "npu:0"
    assert facts["command"] == "train.py --epochs 1"
    assert facts["version of torch"] == "2.13.0"
    assert facts["option keep"] == "tensors"


def test_large_comparison_stays_small() -> None:
    base = sample_comparison(num_calls=500)
    large = replace(base, calls=base.calls * 40)
    assert len(html._embedded(page_data(large))) < 20_000 * 150 + html.SLOT_LIMIT * 300


def test_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write '.*nowhere/report\.html'"):
        write_html(comparison_of(), tmp_path / "nowhere" / "report.html")


def test_failed_write_leaves_the_old_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InputError):
        write_html(comparison_of(), tmp_path / "report.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_report_is_written_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from ulpscope.report.comparison.html import write_html; "
        "assert not {'torch', 'numpy'} & set(sys.modules), 'a framework was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_the_page_knows_the_verdict_unknown(doubtful: Comparison, tmp_path: Path) -> None:
    assert page_data(doubtful)["verdict"] == "unknown"
    write_html(doubtful, tmp_path / "report.html")
    assert "differ bitwise by an unknown amount" in (tmp_path / "report.html").read_text(encoding="utf-8")
