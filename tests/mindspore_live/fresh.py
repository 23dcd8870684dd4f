# SPDX-License-Identifier: Apache-2.0
"""Runs programs in a process of its own, recorded or not, and prints a hash of what each computed: `python -m ... LEVEL|bare NAME ...`."""

from __future__ import annotations

import hashlib
import sys

import mindspore as ms
import numpy as np

import ulpscope.mindspore
from tests.mindspore_live.programs import PROGRAMS
from ulpscope.store import MemoryRun

if __name__ == "__main__":
    level, *names = sys.argv[1:]
    for name in names:
        ms.set_seed(3)
        np.random.seed(3)
        if level == "bare":
            found = PROGRAMS[name](lambda: None)
        else:
            with ulpscope.mindspore.Capture.into_sink(MemoryRun().sink, level=level) as capture:
                found = PROGRAMS[name](capture.step)
        print("computed", name, hashlib.sha256(b"|".join(found)).hexdigest()[:16])
