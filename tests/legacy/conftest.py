# SPDX-License-Identifier: Apache-2.0
"""After each test, drop the debugger that the old tools keep for a whole process, and undo the changes of their import."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def closed_doors() -> Iterator[None]:
    yield
    for door in ("ptdbg.dump", "msprobe"):
        debugger = sys.modules.get(f"ulpscope.compat.{door}.debugger")
        if debugger is not None:
            debugger.PrecisionDebugger.forget()
    dropout = sys.modules.get("ulpscope.compat.ptdbg.dropout")
    if dropout is not None:
        dropout.restore_dropout()
