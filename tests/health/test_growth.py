# SPDX-License-Identifier: Apache-2.0
"""Record health for any length: memory that does not grow, a folder that keeps to its size, and a history that gets coarser with age."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.health_growth import added_bytes, history, trained, written

MEGABYTE = 1 << 20


@pytest.mark.parametrize("steps", [6_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_written_steps_keep_to_their_memory_and_their_folder(tmp_path: Path, steps: int) -> None:
    max_bytes = 2 * MEGABYTE if steps > 10_000 else MEGABYTE // 4
    found = written(steps, tmp_path, max_bytes=max_bytes)
    assert added_bytes(found) < 8 * MEGABYTE
    assert max(moment["disk"] for moment in found) <= 1.1 * max_bytes
    left = history(tmp_path / "written")
    assert left["last"] == steps
    assert left["first"] <= steps // 100
    assert left["largest_gaps"][0] > 1, "something was thinned"
    assert left["largest_gaps"][-1] == 1, "what is new is whole"
    assert left["largest_gaps"] == sorted(left["largest_gaps"], reverse=True), "coarser the older it is"


@pytest.mark.long
def test_trained_steps_keep_to_their_memory(tmp_path: Path) -> None:
    found = trained(25_000, tmp_path)
    assert added_bytes(found) < 16 * MEGABYTE
    assert history(tmp_path / "trained")["last"] >= 24_998
