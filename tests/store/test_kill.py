# SPDX-License-Identifier: Apache-2.0
"""A process killed at any moment leaves every record and tensor whose write had returned."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ulpscope.store import open_run
from ulpscope.testing.stores import example_tensor

_ACKNOWLEDGED = struct.Struct("<II")

_WRITER = """
import os, struct, sys
from dataclasses import replace
from ulpscope.model import RunInfo
from ulpscope.store import DirectorySink, create_run
from ulpscope.testing.stores import example_record, example_tensor

sink = DirectorySink(create_run(sys.argv[1], RunInfo()), 0)
for step in range(1000):
    sink.begin_step(step)
    for order in range(40):
        tensor = example_tensor(step * 40 + order, (order, 300))
        record = example_record(order, step=step)
        content = sink.keep(tensor.dtype, tensor.shape, tensor.buffer)
        sink.write(replace(record, slots=(replace(record.slots[0], shape=tensor.shape, content=content),)))
        os.write(1, struct.pack("<II", step, order))
"""


def kill_a_writer(path: Path, after_s: float) -> tuple[int, int]:
    """Kill a process that writes without pause; return the last step and order whose write it saw return."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        first = writer.stdout.read(_ACKNOWLEDGED.size)
        time.sleep(after_s)
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = first + writer.stdout.read()
    assert writer.returncode == -signal.SIGKILL
    whole = len(acknowledged) // _ACKNOWLEDGED.size
    last: tuple[int, int] = _ACKNOWLEDGED.unpack_from(acknowledged, (whole - 1) * _ACKNOWLEDGED.size)
    return last


def check_what_is_left(path: Path, last_step: int, last_order: int) -> None:
    run = open_run(path)
    assert set(run.steps(0)) >= set(range(last_step + 1))
    for step in run.steps(0):
        records = list(run.records(0, step))
        assert [record.order for record in records] == list(range(len(records)))
        at_least = 40 if step < last_step else last_order + 1 if step == last_step else 0
        assert len(records) >= at_least
        assert run.is_complete(0, step) or step >= last_step
        for record in records:
            content = record.slots[0].content
            assert content is not None
            tensor = example_tensor(step * 40 + record.order, (record.order, 300))
            assert bytes(run.tensor(0, step, content).buffer) == tensor.buffer


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
def test_a_killed_writer_loses_nothing_it_had_written(tmp_path: Path, after_s: float) -> None:
    check_what_is_left(tmp_path / "run", *kill_a_writer(tmp_path / "run", after_s))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_a_killed_writer_loses_nothing_at_random_moments(tmp_path: Path, seed: int) -> None:
    after_s = random.Random(seed).uniform(0, 0.5)
    check_what_is_left(tmp_path / "run", *kill_a_writer(tmp_path / "run", after_s))
