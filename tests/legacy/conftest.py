# SPDX-License-Identifier: Apache-2.0
"""The old tools keep one debugger for a whole process: after each test it is gone, and so is what importing them changed."""

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
