# SPDX-License-Identifier: Apache-2.0
"""Check that tools/layouts.py writes the layouts that C, C++, Cython and Python share."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

from ulpscope.numerics import layouts

ROOT = Path(__file__).parents[2]


def test_the_files_hold_what_is_written() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "layouts.py", "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_sizes_agree_with_those_of_ctypes() -> None:
    counts = ctypes.sizeof(ctypes.c_uint64) * layouts.BUCKETS
    assert struct.calcsize(layouts.RESULT_FORMAT) == layouts.RESULT_BYTES == ctypes.sizeof(layouts.DifferenceOut) - counts + 4 * 8
    assert [*layouts.KINDS.values()] == [*range(layouts.CODES)]
