# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: one thread for each process, properties that are never judged by the clock, and a recorder with every part.

What `ulpscope build` compiles is built once, before the first test and before there are worker processes, and kept in pytest's cache until
its source, Python or torch changes. A run of pytest inside a test inherits it, and so does every program that a test starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from ulpscope._native_home import expected_part, objection

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("ulpscope", deadline=None)
hypothesis.settings.load_profile("ulpscope")


def pytest_configure(config: pytest.Config) -> None:
    if "ULPSCOPE_NATIVE" in os.environ or getattr(config, "cache", None) is None:
        return
    os.environ["ULPSCOPE_NATIVE"] = str(config.cache.mkdir("native") / "parts")
    part = expected_part()
    if part is not None and objection(part.file) and not config.option.collectonly:
        subprocess.run([sys.executable, "-m", "ulpscope", "build"], stdout=subprocess.DEVNULL, check=False)  # where it cannot, it says why


@pytest.fixture(scope="session")
def native_part() -> Path:
    """The file that `ulpscope build` made for this run of the tests; its folder's folder is what ULPSCOPE_NATIVE names."""
    part = expected_part()
    if part is None or objection(part.file):
        pytest.skip("what 'ulpscope build' makes was not built, as said at the start")
    return part.file
