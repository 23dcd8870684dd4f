# SPDX-License-Identifier: Apache-2.0
"""The documentation site: it builds without a warning, loads nothing from other hosts, and shows what the pages and docstrings say."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import ulpscope

ROOT = Path(__file__).parents[1]
LOADING = {"src", "srcset", "data", "poster", "href"}
CLICKED = {"a", "area"}
ELSEWHERE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])\s*((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strictly, so that a link or an anchor that leads nowhere ends it."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="the extra docs is not installed; make docs does that")
    folder = tmp_path_factory.mktemp("documentation")
    done = subprocess.run([sys.executable, ROOT / "tools/site.py", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr == ""
    return folder / "site"


class Resources(HTMLParser):
    """What a browser loads for a page by itself: everything but links that a person clicks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.policy = ""
        self._is_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._is_style = tag == "style"
        self.found += IN_STYLE.findall(given.get("style", ""))
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag not in CLICKED:
            self.found += [value for name, value in given.items() if name in LOADING and ELSEWHERE.match(value)]

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.found += IN_STYLE.findall(data)


def test_what_would_be_loaded_from_elsewhere_is_seen() -> None:
    page = """<link href="//a.example/x.css"><script src="https://b.example/x.js"></script><style>@import "https://c.example/x.css";</style>
    <p style="background: url(https://d.example/x.png)"><a href="https://e.example">click</a><img src="assets/f.png">"""
    assert [re.split("/+", found)[1] for found in Resources(page).found] == ["a.example", "b.example", "c.example", "d.example"]


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = {path: Resources(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 30
    assert {path.name: page.found for path, page in pages.items() if page.found} == {}
    # Scripts of the theme know addresses that no page of ours needs; the policy keeps a browser from asking them.
    assert {page.policy.split(";")[0] for page in pages.values()} == {"default-src 'self' data: blob:"}
    assert [page.policy for page in pages.values() if "//" in page.policy] == []
    styles = {path.name: IN_STYLE.findall(path.read_text(encoding="utf-8")) for path in site.rglob("*.css")}
    assert styles
    assert not any(styles.values())


def test_the_site_shows_every_page_and_no_mark_of_the_tests(site: Path) -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    assert [page.name for page in pages if not (site / page.relative_to(ROOT).with_suffix(".html")).is_file()] == []
    assert [path.name for path in site.rglob("*.html") if re.search(r"<p>(```|:::|&gt;&gt;&gt;)", path.read_text(encoding="utf-8"))] == []


def test_the_site_has_the_docstring_of_every_public_name(site: Path) -> None:
    page = (site / "docs/python.html").read_text(encoding="utf-8")
    public = set(ulpscope.__all__) - {"__version__"}
    assert {name for name in public if f'id="ulpscope.{name}"' in page} == public
    assert "Run every recorded call again on <code>device</code> and judge it" in page
    assert "doctest: +SKIP" not in page


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.browser
def test_a_browser_asks_no_other_host_and_finds_what_is_searched(site: Path, browser: Any) -> None:
    requests: list[str] = []
    complaints: list[str] = []
    with served(site) as address:
        page = browser.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        for name in ("index.html", "docs/quickstart.html", "docs/python.html", "docs/bugs.html", "design/index.html"):
            page.goto(address + name, wait_until="networkidle")
        page.goto(f"{address}index.html?q=fingerprint")  # typed before the script is there, a question would be lost
        results = page.locator(".md-search-result__link")
        results.first.wait_for(timeout=120_000)
        found = [result.get_attribute("href") for result in results.all()]
        page.close()
    assert any("docs/store-format.html" in link for link in found)
    assert len(requests) > 10
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
    assert complaints == []
