# SPDX-License-Identifier: Apache-2.0
"""Recording changes nothing: each program of programs.py, bitwise, with and without a capture, at every level."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ulpscope
from tests.harmless import programs
from tests.older_torch import RESUMES_SEEN
from ulpscope.model import NonFinite

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

LEVELS = ("api", "module", "both", "op")
KEEPS = ("statistics", "tensors")
OTHERS = [("op", "statistics"), ("both", "tensors"), ("api", "tensors"), ("module", "statistics"), ("op", "tensors"), ("module", "tensors")]
NAMES = sorted(programs.PROGRAMS)
SOME = [(name, "api", "statistics") for name in NAMES] + [(name, *OTHERS[i % len(OTHERS)]) for i, name in enumerate(NAMES)]
ALL = [case for case in itertools.product(NAMES, LEVELS, KEEPS) if case not in SOME]

# Things that a capture says it does not see, and that it may miss.
STATEMENTS = ("torch.compile", "compiled by torch.jit", "GradScaler skipped it")
WATCHED = [name for number, name in enumerate(NAMES) if number % 2 == 0]


def recording(folder: Path, level: str, keep: str) -> Any:
    """Return the function that a program calls to be recorded; each of its captures goes to a run of its own."""

    def record(model: Any = None, optimizer: Any = None) -> ulpscope.Capture:
        return ulpscope.Capture(folder / "run", model, optimizer=optimizer, level=level, keep=keep)

    return record


def watching(folder: Path, calls: bool | None = None) -> Any:
    """Return the function by which a program starts the hunt for inf and NaN."""

    def record(model: Any = None, optimizer: Any = None) -> ulpscope.Capture:
        return ulpscope.Capture(folder / "run", model, optimizer=optimizer, watch=NonFinite(limit=None, calls=calls))

    return record


def recorded(folder: Path) -> tuple[int, list[str]]:
    """Count the recorded calls, and return the complaints of the ledgers."""
    calls, complaints = 0, []
    for path in sorted(folder.glob("run*")):
        run = ulpscope.open_run(path)
        for rank in run.ranks():
            complaints += [f"{entry.what}: {entry.why}" for entry in run.ledger(rank)]
            calls += sum(1 for step in run.steps(rank) for record in run.records(rank, step) if record.level != "state")
    return calls, complaints


def allowed(complaint: str) -> bool:
    return any(statement in complaint for statement in STATEMENTS)


def check(name: str, level: str, keep: str, folder: Path) -> None:
    without = programs.run(name, programs.Nothing)
    with_capture = programs.run(name, recording(folder, level, keep))
    assert not (found := programs.differences(without, with_capture)), "\n".join(found)
    calls, complaints = recorded(folder)
    assert [text for text in complaints if not allowed(text)] == []
    unseen = {"functional_transforms"} if RESUMES_SEEN else {"functional_transforms", "compiled_before"}
    assert calls >= 2 or (name in unseen and level == "module")


def check_watched(name: str, folder: Path, calls: bool | None) -> None:
    without = programs.run(name, programs.Nothing)
    watched = programs.run(name, watching(folder, calls))
    assert not (found := programs.differences(without, watched)), "\n".join(found)
    _, complaints = recorded(folder)
    assert [text for text in complaints if not allowed(text)] == []


@pytest.mark.parametrize(
    "changed",
    [
        torch.tensor([0.0, 1.0, float("nan")]),
        torch.tensor([-0.0, 1.0 + 2**-23, float("nan")]),
        torch.tensor([-0.0, 1.0, float("nan")], dtype=torch.float64),
        torch.tensor([[-0.0, 1.0, float("nan")]]),
        torch.tensor([-0.0, 5.0, 1.0, 5.0, float("nan")])[::2],
    ],
    ids=["sign of zero", "last bit", "dtype", "shape", "strides"],
)
def test_every_bit_is_compared(changed: torch.Tensor) -> None:
    """The comparison behind all these tests can fail."""
    values = torch.tensor([-0.0, 1.0, float("nan")])
    assert programs.differences({"a": [values]}, {"a": [values.clone()]}) == []
    assert programs.differences({"a": [values]}, {"a": [changed]}) != []


@pytest.mark.parametrize(("name", "level", "keep"), SOME)
def test_recording_changes_nothing(name: str, level: str, keep: str, tmp_path: Path) -> None:
    check(name, level, keep, tmp_path)


@pytest.mark.parametrize("name", WATCHED)
def test_watching_changes_nothing(name: str, tmp_path: Path) -> None:
    check_watched(name, tmp_path, calls=None if len(name) % 2 else False)


@pytest.mark.long
@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_watching_changes_nothing_in_any_program(name: str, calls: bool, tmp_path: Path) -> None:
    check_watched(name, tmp_path, calls)


@pytest.mark.long
@pytest.mark.parametrize(("name", "level", "keep"), ALL)
def test_recording_changes_nothing_in_any_combination(name: str, level: str, keep: str, tmp_path: Path) -> None:
    check(name, level, keep, tmp_path)


def script(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(name))]


def test_on_the_emulated_device(tmp_path: Path) -> None:
    done = subprocess.run([*script("on_npu.py"), str(tmp_path)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert len(wrong) > 20
    assert {case: found for case, found in wrong.items() if found} == {}


def test_on_two_processes(tmp_path: Path) -> None:
    """DistributedDataParallel, fully_shard and plain collectives, over gloo."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [*script("on_two_processes.py"), str(rank), str(tmp_path)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    for rank in range(2):
        wrong = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(wrong) == 12
        assert {case: found for case, found in wrong.items() if found} == {}
