# SPDX-License-Identifier: Apache-2.0
"""Whatever programs compute, they compute bitwise the same while they are recorded, at every level.

The last bits of MindSpore's CPU kernels depend on how often each has run in its process. So each side has a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mindspore_live.programs import PROGRAMS

ROOT = Path(__file__).parents[2]


@cache
def computed(*way: str) -> dict[str, str]:
    """What each program computed, as a hash, and what its ledger says of failures."""
    command = [sys.executable, "-m", "tests.mindspore_live.fresh", *way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.partition(" ")[0] in PROGRAMS)


WITHOUT_CELLS = {"many_consumers", "written_in_place", "several_results", "ways_to_differentiate"}


@pytest.mark.parametrize("way", [("api", "tensors"), ("module", "fingerprint"), ("both", "statistics")], ids=lambda way: way[0])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_that_a_program_computes_changes(name: str, way: tuple[str, str]) -> None:
    bits, counts, *failures = computed(*way)[name].split(" ", 2)
    assert [bits] == computed("bare", "")[name].split()
    assert failures == []
    forward, backward = map(int, counts.split("/"))
    if way[0] != "module" or name not in WITHOUT_CELLS:
        assert forward > 0
        assert backward > 0
