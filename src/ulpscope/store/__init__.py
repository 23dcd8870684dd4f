# SPDX-License-Identifier: Apache-2.0
"""Records on disk: the native format is written and read, those of other tools are read."""

from ulpscope.store.directory import DirectoryRun, DirectorySink, create_run
from ulpscope.store.memory import MemoryRun, MemorySink
from ulpscope.store.series import open_health
from ulpscope.store.sniff import open_run

__all__ = ["DirectoryRun", "DirectorySink", "MemoryRun", "MemorySink", "create_run", "open_health", "open_run"]
