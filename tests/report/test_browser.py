# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a real browser: opened from disk, without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.sample import sample_comparison
from tests.report.test_html import HOSTILE, comparison_of, one_call
from ulpscope.model import CallRecord, Comparison, Finding, Frame
from ulpscope.report.comparison.html import write_html

pytestmark = pytest.mark.browser

NUM_LARGE = 100_000


@dataclass
class Opened:
    """A report in a browser tab, with its complaints and its requests to the network."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def rows(self) -> list[str]:
        return self.page.locator("[role=grid] .line").all_inner_texts()

    def watch(self) -> None:
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[[Comparison], Opened]]:
    """Write a comparison and open it; afterwards fail on any complaint or request."""
    opened: list[Opened] = []

    def show(comparison: Comparison) -> Opened:
        path = tmp_path / f"report{len(opened)}.html"
        write_html(comparison, path)
        tab = Opened(browser.new_page(viewport={"width": 1280, "height": 900}))
        tab.page.set_default_timeout(15_000)
        tab.watch()
        opened.append(tab)
        tab.page.goto(path.as_uri())
        tab.page.wait_for_selector(".answer")
        return tab

    yield show
    for tab in opened:
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith("file:")] == []
        assert len(tab.requests) == 1
        tab.page.close()


@pytest.fixture(scope="module")
def large() -> Comparison:
    base = sample_comparison(num_calls=1000)
    middle = base.calls[100:600]
    calls = base.calls[:-1] + middle * ((NUM_LARGE - len(base.calls)) // len(middle)) + base.calls[-1:]
    assert len(calls) == NUM_LARGE
    return replace(base, calls=calls)


def test_culprit_comes_first(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison()).page
    answer = page.locator(".answer")
    assert answer.locator(".eyebrow").inner_text().endswith("First contributed error")
    assert "layers.1.mlp gelu (call 1, forward, output 0)" in " ".join(answer.locator("h1").inner_text().split())
    text = answer.inner_text()
    assert "Output errs 212x what rounding of float32 explains" in text
    assert "train.py:48 in forward" in text
    assert "return self.fc2(F.gelu(self.fc1(x)))" in text
    assert answer.locator(".histograms figure").count() == 2
    assert answer.locator("path.outline").count() == 3
    assert page.title().startswith("diverges: runs/npu and runs/gpu")


def test_stack_opens(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison()).page
    frame = page.get_by_text("train.py:88 in main").first
    assert not frame.is_visible()
    page.get_by_text("stack, 1 more").first.click()
    assert frame.is_visible()


def test_next_step_is_copied(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison()).page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".answer .copy").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "ulpscope show runs/npu 'layers.1.mlp/functional.gelu.1' --arguments"


def test_culprit_is_marked_in_table_and_tree(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison(num_calls=400)).page
    assert "gelu" in page.locator("[role=grid] .line.culprit").inner_text()
    assert page.locator("[role=grid] .line.culprit").get_attribute("aria-selected") == "true"
    assert "gelu" in page.locator("[role=tree] .node.culprit").inner_text()


def test_identical_runs_are_calm(show: Callable[[Comparison], Opened]) -> None:
    tab = show(comparison_of(*(one_call("functional.relu", order=order) for order in range(12))))
    assert tab.page.locator("h1").inner_text() == "Nothing diverges: 12 calls are bitwise the same"
    assert tab.page.locator(".diverges").count() == 0
    assert len(tab.rows()) == 12


def test_empty_comparison_says_so(show: Callable[[Comparison], Opened]) -> None:
    page = show(comparison_of()).page
    assert "Nothing was compared" in page.locator(".answer").inner_text()


@pytest.mark.parametrize(
    ("query", "passes"),
    [
        ("layers.1.mlp gelu", lambda record: record.module == "layers.1.mlp" and "gelu" in record.call.op),
        ("ADD train.py:44", lambda record: "add" in record.name and bool(record.stack) and record.stack[0].line == 44),
        ("layers.0.mlp/*linear*", lambda record: record.module == "layers.0.mlp" and "linear" in record.call.op),
        ("nothing.like.this", lambda record: False),
    ],
)
def test_filter(show: Callable[[Comparison], Opened], query: str, passes: Callable[[CallRecord], bool]) -> None:
    comparison = sample_comparison(num_calls=60)
    num = sum(passes(call.pair.record) for call in comparison.calls)
    tab = show(comparison)
    tab.page.keyboard.press("/")
    tab.page.keyboard.type(query)
    tab.page.wait_for_function("num => document.querySelectorAll('[role=grid] .line').length === num", arg=num)
    assert tab.page.locator("output").inner_text() == f"{num} of 60"


def test_filter_by_verdict_and_phase(show: Callable[[Comparison], Opened]) -> None:
    tab = show(sample_comparison(num_calls=60))
    tab.page.get_by_role("button", name="contributed").click()
    (row,) = tab.rows()
    assert "gelu" in row
    tab.page.get_by_label("phase").select_option(label="backward")
    assert tab.rows() == []
    tab.page.get_by_role("button", name="clear").click()
    assert tab.page.locator("output").inner_text() == "60 of 60"


def test_sort(show: Callable[[Comparison], Opened]) -> None:
    tab = show(sample_comparison(num_calls=60))
    header = tab.page.get_by_role("columnheader", name="multiple")
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert "gelu" in tab.rows()[0]
    assert "212×" in tab.rows()[0]
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert "\n0×" in tab.rows()[0]
    header.get_by_role("button").click()
    assert tab.page.get_by_role("columnheader", name="#").get_attribute("aria-sort") == "ascending"


def test_sort_by_module_counts_naturally(show: Callable[[Comparison], Opened]) -> None:
    calls = [one_call("functional.relu", order=order, module=f"layers.{order}") for order in (10, 2, 1)]
    tab = show(comparison_of(*calls))
    tab.page.get_by_role("columnheader", name="module").get_by_role("button").click()
    modules = tab.page.locator("[role=grid] .at-module").all_inner_texts()
    assert modules == ["layers.1", "layers.2", "layers.10"]


def test_tree_expands_and_filters(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison(num_calls=60)).page
    node = page.get_by_role("treeitem", name="layers,")
    assert node.get_attribute("aria-expanded") == "true"
    node.locator(".twisty").click()
    assert node.get_attribute("aria-expanded") == "false"
    assert page.locator("[role=tree] .leaf.culprit").count() == 0
    node.locator(".twisty").click()
    page.locator("[role=tree] .node", has_text="mlp").first.click()
    assert set(page.locator("[role=grid] .at-module").all_inner_texts()) == {"layers.1.mlp"}


def test_tree_answers_to_keys(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison(num_calls=60)).page
    page.get_by_role("tree").focus()
    page.keyboard.press("Home")
    first = page.get_by_role("treeitem").first
    assert first.get_attribute("aria-expanded") == "false"
    page.keyboard.press("ArrowRight")
    assert first.get_attribute("aria-expanded") == "true"
    page.keyboard.press("ArrowLeft")
    assert first.get_attribute("aria-expanded") == "false"


def test_keys_move_open_and_close(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison(num_calls=60)).page
    page.get_by_role("grid").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.locator(".line[aria-selected=true] .at-order").inner_text() == "1"
    page.keyboard.press("Enter")
    details = page.get_by_role("complementary", name="Details")
    assert "state batch" in details.inner_text()
    page.keyboard.press("ArrowDown")
    assert "embedding" in details.inner_text()
    page.keyboard.press("Escape")
    assert details.count() == 0


def test_details_show_numbers_and_arguments(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison()).page
    page.locator("[role=grid] .line.culprit").click()
    text = page.get_by_role("complementary", name="Details").inner_text()
    for expected in ("212×", "'tanh'", "'none'", "approximate", "relative L2", "output.0", "float32 [8, 128, 1024]", "train.py:48"):
        assert expected in text


def test_click_on_the_plot_selects(show: Callable[[Comparison], Opened]) -> None:
    calls = [one_call(f"op{order}", order=order, equal=order != 1) for order in range(3)]
    page = show(comparison_of(*calls)).page
    page.locator(".plot").scroll_into_view_if_needed()
    box = page.locator(".u-over").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 12)
    assert "op1" in page.get_by_role("complementary", name="Details").inner_text()


def test_notes_and_facts_are_there(show: Callable[[Comparison], Opened]) -> None:
    page = show(sample_comparison()).page
    assert "Step 1 was recorded by the subject only" in page.locator(".findings").inner_text()
    unequal = page.locator(".facts tr.unequal").all_inner_texts()
    assert len(unequal) == 1
    assert "npu:0" in unequal[0]
    assert "cuda:0" in unequal[0]


def test_hostile_names_do_not_execute(show: Callable[[Comparison], Opened]) -> None:
    calls = [one_call(name, order=order, equal=False, module=name) for order, name in enumerate(HOSTILE)]
    findings = [
        Finding(level=level, kind=name, headline=name, module=name, evidence=(name,), next=name, source=Frame(name, 1, name, name))
        for name in HOSTILE
        for level in ("fault", "note")
    ]
    tab = show(comparison_of(*calls, findings=tuple(findings)))
    page = tab.page
    for row in page.locator("[role=grid] .line").all():
        row.click()
    page.evaluate("for (const item of document.querySelectorAll('details')) item.open = true")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.locator("h1").inner_text().strip() == HOSTILE[0]
    assert any(HOSTILE[4] in text for text in page.locator(".findings").all_inner_texts())


def test_a_script_from_outside_would_be_refused(browser: Any, tmp_path: Path) -> None:
    write_html(comparison_of(), tmp_path / "report.html")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    page.evaluate("const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)")
    assert page.evaluate("window.hacked") is None
    page.close()


def test_damaged_data_is_one_sentence(browser: Any, tmp_path: Path) -> None:
    write_html(comparison_of(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "report.html").write_text(text.replace('{"schema":1', '{"schema":', 1), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    assert "is damaged" in page.locator(".empty").inner_text()
    page.close()


def test_dark_and_light_differ(browser: Any, tmp_path: Path) -> None:
    write_html(sample_comparison(), tmp_path / "report.html")
    colours = set()
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto((tmp_path / "report.html").as_uri())
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert len(colours) == 2


def test_a_hundred_thousand_rows_scroll_to_the_last(show: Callable[[Comparison], Opened], large: Comparison) -> None:
    tab = show(large)
    page = tab.page
    last = str(large.calls[-1].pair.record.call)
    assert page.get_by_role("grid").get_attribute("aria-rowcount") == str(NUM_LARGE + 1)
    assert 0 < page.locator("[role=grid] .line").count() < 200
    page.evaluate("document.querySelector('[role=grid] .viewport').scrollTop = 1e9")
    page.locator(f"[role=row][aria-rowindex='{NUM_LARGE + 1}']").wait_for()
    assert page.locator(f"[title='{last}']").last.is_visible()
    assert page.locator("[role=grid] .line").count() < 200
    assert page.locator("[role=tree] .node").count() < 200


def test_a_hundred_thousand_rows_filter_and_sort(show: Callable[[Comparison], Opened], large: Comparison) -> None:
    tab = show(large)
    tab.page.get_by_role("columnheader", name="multiple").get_by_role("button").click()
    assert "212×" in tab.rows()[0]
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("optimizer.adamw")
    tab.page.wait_for_function("document.querySelectorAll('[role=grid] .line').length === 1")
    assert "AdamW" in tab.rows()[0]
