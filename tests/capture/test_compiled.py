# SPDX-License-Identifier: Apache-2.0
"""The compiled hot path records what the files of Python record; that everything works without it, `make test-plain` shows."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ulpscope
from tests.older_torch import needs_table
from ulpscope._native_home import expected_part, objection
from ulpscope.capture.native.compiled import COMPILED

HERE = Path(__file__).parent
pytestmark = pytest.mark.compiled("recorder")


@needs_table
def test_it_is_used_where_it_was_built() -> None:
    """If a name of torch's went, or the version changed, recording would otherwise only become slower."""
    assert COMPILED is not None
    assert COMPILED.IS_USABLE


def _records(folder: Path) -> dict[str, list[str]]:
    """Return the records of each step of each run, in the order of calls: the engine decides when a backward pass of one is complete."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/run*")):
        run = ulpscope.open_run(path)
        for rank in run.ranks():
            for step in run.steps(rank):
                records = [dataclasses.replace(record, order=0) for record in run.records(rank, step)]
                records.sort(key=lambda record: (str(record.call), record.level, record.phase))
                found[f"{path.relative_to(folder)}/{rank}/{step}"] = [repr(record) for record in records]
    return found


@needs_table
def test_same_records_all_three_ways(tmp_path: Path) -> None:
    """In Python, compiled, and compiled with what `ulpscope build` makes, where it was built."""
    script = [sys.executable, str(HERE / "record_programs.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    ways = {"python": ("python", tmp_path), "compiled": ("compiled", tmp_path)}
    part = expected_part()
    if part is not None and not objection(part.file):
        ways["native"] = ("compiled", part.file.parents[1])
    running = [
        subprocess.Popen(
            [*script, str(tmp_path / way), how],
            env={**environment, "ULPSCOPE_NATIVE": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way, (how, home) in ways.items()
    ]
    errors = [process.communicate(timeout=400)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(ways), "\n".join(errors)
    python, *others = (_records(tmp_path / way) for way in ways)
    assert len(python) > 150
    for found in others:
        assert _differences(found, python) == {}


def _differences(found: dict[str, list[str]], expected: dict[str, list[str]]) -> dict[str, Any]:
    """Return, for each step with different records, how many there are and the first that differs."""
    assert list(found) == list(expected)
    return {
        name: (
            len(found[name]),
            len(expected[name]),
            [pair for pair in zip(found[name], expected[name], strict=False) if pair[0] != pair[1]][:1],
        )
        for name in found
        if found[name] != expected[name]
    }


class _Odd(NamedTuple):
    a: int
    b: int


ARGUMENTS: list[Any] = [
    *(None, True, False, 0, 1, -1, 31, 127, 128, -32, -33, -128, -129, 255, 256, 32767, -32768, -32769, 65535, 65536, 2**31, -(2**31)),
    *(-(2**31) - 1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30),
    *(0.0, -0.0, 1.5, float("inf"), 1e300, 3 + 4j, "", "dim", "é" * 16, "x" * 31, "x" * 32, "y" * 200, "y" * 201, "\ud800"),
    *((), (1, 2), (1, -1), [1, 2], (1, 2.0), (True, 1), tuple(range(70)), torch.Size([2, 3]), torch.Size([]), _Odd(1, 2), {"a": 1}),
    *(slice(None, 3), ..., torch.float16, torch.strided, torch.channels_last, torch.device("cpu"), object, len),
]


def test_arguments_are_packed_as_the_store_packs_them(tmp_path: Path) -> None:
    """Every kind of argument, by position and by name, gives the record that Python's own way gives."""
    x = torch.ones(2)
    runs = {}
    for how in ("compiled", "python"):
        with ulpscope.Capture(tmp_path / how) as capture:
            session: Any = capture._session
            if how == "python":
                session._recorder.takes_rows = False  # arguments as plain values, which the store packs
            for value in ARGUMENTS:
                opened = session.open_call("torch.sin", (x, value, (x, value)), {"given": value, "other": x, "both": [value, x]})
                session.close_call(opened, x)
        runs[how] = [dataclasses.replace(record, stack=()) for record in ulpscope.open_run(tmp_path / how).records(0, 0)]
    calls = [record for record in runs["compiled"] if record.level == "api"]
    assert len(calls) == len(ARGUMENTS)
    assert [repr(record.arguments) for record in runs["compiled"]] == [repr(record.arguments) for record in runs["python"]]
    assert [record.slots for record in runs["compiled"]] == [record.slots for record in runs["python"]]
