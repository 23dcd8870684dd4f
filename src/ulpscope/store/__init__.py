# SPDX-License-Identifier: Apache-2.0
"""Records on disk: the native format is written and read, those of other tools are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ulpscope.store.memory import MemoryRun, MemorySink
from ulpscope.store.native.directory import DirectoryRun, DirectorySink, create_run
from ulpscope.store.sniff import open_run

if TYPE_CHECKING:
    from ulpscope.store.series import open_health

__all__ = ["DirectoryRun", "DirectorySink", "MemoryRun", "MemorySink", "create_run", "open_health", "open_run"]


def __getattr__(name: str) -> Any:
    """Series of values need NumPy, which reading records does without."""
    if name == "open_health":
        from ulpscope.store.series import open_health

        return open_health
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
