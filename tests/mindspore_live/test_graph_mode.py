# SPDX-License-Identifier: Apache-2.0
"""In graph mode the outermost cell is one record, computes what it did, and the ledger says that nothing inside is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def told(level: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mindspore_live.in_graph_mode", level],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {word: rest for word, _, rest in lines if word in ("calls", "ledger", "result")}


@pytest.mark.parametrize("level", ["api", "both"])
def test_a_graph_is_one_record(level: str) -> None:
    recorded = told(level)
    assert recorded["result"] == told("bare")["result"]
    assert recorded["calls"] == "graph.Net"
    assert recorded["ledger"] == "see the calls inside graph.Net"
