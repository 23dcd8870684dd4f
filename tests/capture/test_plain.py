# SPDX-License-Identifier: Apache-2.0
"""ULPSCOPE_NO_KERNEL=1 leaves out all that was compiled: `make test-plain` would find nothing otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

WHAT_IS_IN_USE = """
from ulpscope.capture.native.building import TABLE
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.numerics.kernel import KERNEL
print(KERNEL, COMPILED, TABLE)
"""


def test_nothing_compiled_is_in_use_where_that_was_asked_for() -> None:
    environment = {**os.environ, "ULPSCOPE_NO_KERNEL": "1"}
    done = subprocess.run([sys.executable, "-c", WHAT_IS_IN_USE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "None None None\n"
