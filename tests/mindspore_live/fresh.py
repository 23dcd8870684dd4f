# SPDX-License-Identifier: Apache-2.0
"""Runs all programs in a process of its own, recorded or not: `python -m tests.mindspore_live.fresh LEVEL|bare KEEP`.

Prints for each a hash of what it computed, how many forward and backward records there are, and what could not be recorded.
"""

from __future__ import annotations

import hashlib
import sys

import mindspore as ms
import numpy as np

import ulpscope.mindspore
from tests.mindspore_live.programs import PROGRAMS
from ulpscope.store import MemoryRun


def run_all(level: str, keep: str) -> None:
    for name, program in PROGRAMS.items():
        ms.set_seed(3)
        np.random.seed(3)
        run = MemoryRun()
        if level == "bare":
            found = program(lambda: None)
        else:
            with ulpscope.mindspore.Capture.into_sink(run.sink, level=level, keep=keep) as capture:
                found = program(capture.step)
        words = [hashlib.sha256(b"|".join(found)).hexdigest()[:16]]
        if level != "bare":
            records = [record for step in run.steps(0) for record in run.records(0, step)]
            words.append("/".join(str(sum(record.phase == phase for record in records)) for phase in ("forward", "backward")))
            words += [f"{entry.what}: {entry.why}" for entry in run.ledger(0) if entry.what.startswith(("record", "close", "write"))]
        print(name, *words)


if __name__ == "__main__":
    run_all(*sys.argv[1:])
