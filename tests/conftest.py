# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: one thread for each process, properties that are never judged by the clock, and a recorder with every part.

What `ulpscope build` compiles is built once, before the first test and before there are worker processes, and kept in pytest's cache until
its source, Python or torch changes. A run of pytest inside a test inherits it, and so does every program that a test starts.

With ULPSCOPE_NO_KERNEL=1 (`make test-plain`) nothing compiled is in use, and everything has to hold all the same. What then is left out
is marked: a test is `compiled("kernel")`, `compiled("recorder")` or `compiled("part")` when it looks at what was compiled itself, or
compares it with its twin in Python.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import ulpscope
from ulpscope._native_home import expected_part, make_folder, objection, objection_to_folder

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("ulpscope", deadline=None)
hypothesis.settings.load_profile("ulpscope")

IS_PLAIN = os.environ.get("ULPSCOPE_NO_KERNEL") == "1"
COMPILED = {"kernel": "numerics/_kernel", "recorder": "capture/native/_compiled"}
"""What an installation compiles, by the files in the package. What was compiled and cannot be used is in use here: its tests fail."""

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("compiled"):
        (name,) = marker.args
        if IS_PLAIN:
            pytest.skip(f"the compiled {name} is not in use, because ULPSCOPE_NO_KERNEL is 1")
        if name in COMPILED and not _is_compiled(COMPILED[name]):
            pytest.skip(f"the {name} was not compiled when ulpscope was installed here")


def _is_compiled(file: str) -> bool:
    package = Path(ulpscope.__file__).parent
    return any((package / f"{file}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def pytest_configure(config: pytest.Config) -> None:
    if IS_PLAIN or "ULPSCOPE_NATIVE" in os.environ or getattr(config, "cache", None) is None:
        return
    place = config.cache.mkdir("native") / "parts"
    make_folder(place / "part")
    if objection_to_folder(place / "part"):  # a checkout that others can write to: what lies there is not loaded
        place = Path(tempfile.mkdtemp(prefix="ulpscope-native-")) / "parts"
    os.environ["ULPSCOPE_NATIVE"] = str(place)
    part = expected_part()
    if part is not None and objection(part.file) and not config.option.collectonly:
        subprocess.run([sys.executable, "-m", "ulpscope", "build"], stdout=subprocess.DEVNULL, check=False)  # where it cannot, it says why


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip what needs the emulated npu where this torch cannot have one: a test, or the program that it ran, then says so."""
    report: Any = yield
    if report.failed and (sentence := _without_npu()) and sentence in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {sentence}")
    return report


@functools.cache
def _without_npu() -> str:
    """What is said where this torch cannot have an emulated npu; empty where it can."""
    from ulpscope._torch_private import missing_for_emulation

    missing = missing_for_emulation()
    return f"the emulated npu needs {', '.join(missing)}, which torch" if missing else ""


@pytest.fixture(autouse=True)
def _main_module() -> Iterator[None]:
    """The module `__main__` of the tests: a command that runs a script leaves it to the script, as Python does."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture(scope="session")
def native_part() -> Path:
    """The file that `ulpscope build` made for this run of the tests; its folder's folder is what ULPSCOPE_NATIVE names.

    Who asks for it is marked `compiled("part")`.
    """
    part = expected_part()
    if part is None or objection(part.file):
        pytest.skip("what 'ulpscope build' makes was not built, as said at the start")
    return part.file


def _missing(reason: str) -> None:
    """A machine without a browser skips these tests; the CI must not."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; with CI=true the browser tests have to run")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A chromium without a window."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        _missing("no chromium on this machine (Debian: apt install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("the package playwright is not installed (pip install playwright)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()
