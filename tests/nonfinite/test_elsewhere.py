# SPDX-License-Identifier: Apache-2.0
"""Test the hunt on an accelerator, which nobody waits for, and across processes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ulpscope.workflows.nonfinite import find_nonfinite


def script(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(name))]


@pytest.fixture(scope="module")
def on_npu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("npu")
    done = subprocess.run([*script("on_npu.py"), str(folder)], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_device_is_waited_for_once_a_step_however_many_calls_there_are(on_npu: dict[str, Any]) -> None:
    for case in ("healthy-modules", "healthy-calls"):
        waits = on_npu[case]["waits"]
        each = {later - earlier for earlier, later in itertools.pairwise(waits)}
        assert max(each) <= 4, waits  # one transfer, and casts on the device that look the same
        assert on_npu[case]["first"] is None
        assert on_npu[case]["ledger"] == []


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("gelu-modules", "made by gelu before 1.down  Linear"),
        ("gelu-calls", "+inf made by 1  gelu (call 1, forward, output 0)"),
        ("addmm-modules", "NaN made by 1.up  Linear (call 2, forward, output 0)"),
        ("addmm-calls", "NaN made by 1.up  linear (call 2, forward, output 0)"),
        ("gelu_backward-modules", "NaN made by 1.up  Linear (call 0, backward, gradient 1.up.weight)"),
        ("gelu_backward-calls", "NaN made by 1  gelu (call 1, backward, output 0)"),
    ],
)
def test_the_broken_kernel_of_a_device_is_named(on_npu: dict[str, Any], case: str, said: str) -> None:
    first = on_npu[case]["first"]
    assert said in first["headline"]
    assert first["step"] == 2
    assert on_npu[case]["num_faults"] == 1
    assert on_npu[case]["ledger"] == []


def test_between_two_modules_the_last_finite_gradient_is_named(on_npu: dict[str, Any]) -> None:
    evidence = on_npu["gelu_backward-modules"]["first"]["evidence"]
    assert any(
        "the gradients of '1.down', which comes next, are finite: made in the backward of what lies between" in line for line in evidence
    )


def test_a_second_time_names_the_call_in_the_module(on_npu: dict[str, Any]) -> None:
    first, second = on_npu["again"]["headlines"]
    assert "made by gelu before 1.down  Linear" in first
    assert "step 2" in first
    assert second.startswith("+inf made by 1  gelu")
    assert "forward, output 0), step 6" in second
    assert any("--watch nonfinite --watch-calls" in line for line in on_npu["again"]["evidence"])
    assert on_npu["again"]["ledger"] == []


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [*script("on_two_processes.py"), str(rank), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return folder


@pytest.mark.parametrize(("way", "into"), [("wrapper", "optimizer.SGD.0"), ("hand", "distributed.all_reduce.0")])
def test_the_rank_whose_contribution_carried_it_is_named(together: Path, way: str, into: str) -> None:
    report = find_nonfinite(together / way)
    first = report.first
    assert first is not None
    assert (first.rank, first.step, first.call, first.phase) == (1, 1, "torch.sqrt.0", "backward")
    assert "infinite slope" in first.cause
    (received,) = [event for event in report.events if event.rank == 0]
    assert (received.kind, received.level, received.call) == ("received", "note", into)
    assert received.cause == "the contribution of rank 1 carried it"
    assert len(report.faults) == 1
