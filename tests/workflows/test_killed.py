# SPDX-License-Identifier: Apache-2.0
"""Kill a training while it is recorded: the finished steps are there, whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ulpscope.store import open_run

TRAINING = """
import sys, time, torch
from torch import nn
import ulpscope
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
with ulpscope.Capture(sys.argv[1], model=model, keep="tensors") as capture:
    while True:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
        capture.step()
        print("step", flush=True)
"""


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 22))])
def test_everything_up_to_the_last_finished_step_is_readable(tmp_path: Path, seed: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "step\n"
        time.sleep(random.Random(seed).uniform(0.0, 0.4))
        child.send_signal(signal.SIGKILL)
        num_finished = 1 + child.stdout.read().count("step")

    run = open_run(tmp_path / "run")
    assert len(run.steps(0)) in (num_finished, num_finished + 1)
    for step in run.steps(0):
        records = list(run.records(0, step))
        if step < num_finished:
            assert run.is_complete(0, step)
            assert [str(record.call) for record in records if record.phase == "optimizer"] == [f"optimizer.AdamW.{n}" for n in range(5)]
        for record in records:
            for slot in record.slots:
                assert slot.content is not None
                assert run.tensor(0, step, slot.content).shape == slot.shape
