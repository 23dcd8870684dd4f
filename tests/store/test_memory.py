# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ulpscope.model import Run, Sink
from ulpscope.store import MemoryRun
from ulpscope.testing.stores import StoreContract


class TestMemory(StoreContract):
    def create(self, folder: Path) -> tuple[Callable[[int], Sink], Callable[[], Run]]:
        run = MemoryRun()
        return run.sink, lambda: run
