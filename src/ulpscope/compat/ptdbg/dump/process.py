# SPDX-License-Identifier: Apache-2.0
"""Keep the one debugger that the old functions promise a process: its folder, the registered hook, and the running dump.

Dumping begins once both a hook is registered and the switch is on, in either order.
"""

from __future__ import annotations

import atexit
from pathlib import Path

from ulpscope.compat.ptdbg.dump.overflow_check import OverflowCheck
from ulpscope.compat.ptdbg.dump.ptdbg_dump import Dumping
from ulpscope.compat.ptdbg.files.line_names import Counts
from ulpscope.compat.ptdbg.files.modes import DumpOptions
from ulpscope.compat.ptdbg.files.places import DumpPlace

__all__ = ["PROCESS", "Process"]


class Process:
    """The state that the old functions share."""

    def __init__(self) -> None:
        self.place: DumpPlace | None = None
        self.rank: int | None = None
        self.options: DumpOptions | None = None
        self.is_registered = False
        self.is_acl = False
        self.backward_input: tuple[Path, ...] = ()
        self.counts = Counts()
        self.dumping: Dumping | None = None
        self.overflow: OverflowCheck | None = None

    def known_place(self) -> DumpPlace:
        """Return the folder that was set, or the one of the environment."""
        if self.place is None:
            self.place = DumpPlace.parse(None)
        return self.place

    def begin_dump(self, step: int | None = None) -> None:
        """Start what is switched on, if a hook is registered; a running dump ends first."""
        self.end_dump()
        if self.options is None or not self.is_registered:
            return
        self.dumping = Dumping(self.known_place(), self.options, self.counts, step=step, rank=self.rank)
        self.dumping.start()

    def end_dump(self) -> Path | None:
        """Stop the running dump; return the folder of its files, if there is one."""
        dumping, self.dumping = self.dumping, None
        if dumping is None:
            return None
        dumping.stop()
        return dumping.folder

    def end_overflow_check(self) -> None:
        check, self.overflow = self.overflow, None
        if check is not None:
            check.stop()

    def reset(self) -> None:
        """Stop everything and forget every setting."""
        self.end_dump()
        self.end_overflow_check()
        self.__init__()  # type: ignore[misc]

    def end(self) -> None:
        self.end_dump()
        self.end_overflow_check()


PROCESS = Process()
atexit.register(PROCESS.end)
