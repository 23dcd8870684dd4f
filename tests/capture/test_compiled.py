# SPDX-License-Identifier: Apache-2.0
"""The compiled hot path records what the files of Python record, and everything works without it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import ulpscope
from ulpscope.capture.compiled import COMPILED

HERE = Path(__file__).parent
BUILT = [Path(ulpscope.__file__).with_name("capture") / f"_compiled{suffix}" for suffix in EXTENSION_SUFFIXES]

pytestmark = pytest.mark.skipif(not any(path.is_file() for path in BUILT), reason="the hot path of a recording is not compiled here")


def test_it_is_used_where_it_was_built() -> None:
    """A name of torch's that went, or another version, would only make recording slower otherwise."""
    assert COMPILED is not None
    assert COMPILED.IS_USABLE


def _records(folder: Path) -> dict[str, list[str]]:
    """What is recorded in each step of each run, in the order of calls: when a backward pass of one is complete is the engine's affair."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/run*")):
        run = ulpscope.open_run(path)
        for rank in run.ranks():
            for step in run.steps(rank):
                records = [dataclasses.replace(record, order=0) for record in run.records(rank, step)]
                records.sort(key=lambda record: (str(record.call), record.level, record.phase))
                found[f"{path.relative_to(folder)}/{rank}/{step}"] = [repr(record) for record in records]
    return found


def test_same_records_as_python(tmp_path: Path) -> None:
    script = [sys.executable, str(HERE / "record_programs.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    running = [
        subprocess.Popen([*script, str(tmp_path / how), how], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for how in ("compiled", "python")
    ]
    errors = [process.communicate(timeout=400)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    compiled, python = _records(tmp_path / "compiled"), _records(tmp_path / "python")
    assert len(compiled) > 150
    assert list(compiled) == list(python)
    assert {
        name: [pair for pair in zip(found, python[name], strict=False) if pair[0] != pair[1]][:1]
        for name, found in compiled.items()
        if found != python[name]
    } == {}


@pytest.mark.parametrize("file", ["test_backward.py", "test_calls.py", "test_devices.py", "test_silent_writes.py", "test_stacks.py"])
def test_without_it(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", str(HERE / file)],
        env={**os.environ, "ULPSCOPE_NO_KERNEL": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
