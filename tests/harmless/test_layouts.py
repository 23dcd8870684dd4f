# SPDX-License-Identifier: Apache-2.0
"""Recording changes nothing in programs of several processes, and two recordings of one agree: each layout of layouts.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ulpscope
from tests.harmless.layouts import LAYOUTS, WITHOUT_MODULES, WORLD_SIZES

LEVELS = ("api", "module", "both", "op")
SAMPLE = {
    "sends_and_receives": ["api"],
    "asynchronous": ["both"],
    "functional": ["api"],
    "experts": ["op"],
    "tensor_parallel": ["api", "op"],
    "pipeline_1f1b": ["api", "op"],
    "data_parallel_hooked": ["both"],
    "checkpointed": ["api"],
}

# What differs from run to run without a recording too, below Python: torch sums weight gradients of zero-bubble pipelines in the order of a
# set, a hook of DDP unpacks its bucket on whichever thread is free, and a checkpoint's plan is pickled.
VARYING = {(name, "op") for name in ("pipeline_zero_bubble", "pipeline_zero_bubble_v", "data_parallel_compressed", "checkpointed")}


def run_together(world_size: int, cases: dict[str, list[str]], folder: Path) -> None:
    """Run layouts in as many processes as they take, and assert that nothing differs on any rank: bare and recorded, and recorded twice."""
    arguments = [str(world_size), str(folder), *(f"{name}:{','.join(levels)}" for name, levels in cases.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("on_layouts.py")), str(rank), *arguments],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [process.communicate(timeout=900)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(errors)
    for rank in range(world_size):
        wrong = json.loads((folder / f"{rank}.json").read_text())
        assert {case: found for case, found in wrong.items() if found} == {}
        assert len(wrong) == sum(map(len, cases.values()))
    for name, level in ((name, level) for name, levels in cases.items() for level in levels):
        if (name, level) in VARYING or (name in WITHOUT_MODULES and level == "module"):
            continue
        comparison = ulpscope.compare_runs(*(folder / f"{name}-{level}-{which}" for which in ("first", "second")), replay="none")
        assert not comparison.faults, (name, level)  # notes may tell of names of groups, which torch counts on in one process
        assert {call.level for call in comparison.calls} == {"same"}, (name, level)


def test_a_sample_of_layouts(tmp_path: Path) -> None:
    run_together(2, SAMPLE, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout(world_size: int, level: str, tmp_path: Path) -> None:
    run_together(world_size, {name: [level] for name in LAYOUTS if WORLD_SIZES[name] == world_size}, tmp_path)
