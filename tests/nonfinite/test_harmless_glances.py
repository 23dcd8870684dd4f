# SPDX-License-Identifier: Apache-2.0
"""Where the hunt reads only sums, it changes nothing either: the programs of tests/harmless, bitwise, from the first step on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harmless.test_harmless import NAMES, WATCHED, check_watched
from tests.harmless.test_harmless import pytestmark as pytestmark

FEW = WATCHED[::6]


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.long) for name in NAMES if name not in FEW)])
def test_glancing_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ulpscope.capture.nonfinite.hunt.takes_ranges", lambda step: False)
    check_watched(name, tmp_path, None)
