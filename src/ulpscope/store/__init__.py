# SPDX-License-Identifier: Apache-2.0
"""Write and read records on disk: the native format both ways, the formats of other tools for reading only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ulpscope.store.memory import MemoryRun, MemorySink
from ulpscope.store.native.directory import DirectoryRun, DirectorySink, create_run
from ulpscope.store.sniff import open_run

if TYPE_CHECKING:
    from ulpscope.store.series import open_health

__all__ = ["DirectoryRun", "DirectorySink", "MemoryRun", "MemorySink", "create_run", "open_health", "open_run"]


def __getattr__(name: str) -> Any:
    """Import `open_health` when somebody asks for it: series of values need NumPy, and reading records does not."""
    if name == "open_health":
        from ulpscope.store.series import open_health

        return open_health
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
