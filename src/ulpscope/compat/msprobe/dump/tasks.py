# SPDX-License-Identifier: Apache-2.0
"""Define what the debugger asks of its task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ulpscope.compat.msprobe.dump.dump_writer import Layout

__all__ = ["Place", "Task", "process_rank"]


@dataclass(frozen=True, slots=True)
class Place:
    """The place that a task writes to: the folder of a step for this process, and which of the two trees that is."""

    of_step: Callable[[int], Path]
    layout: Layout = "26.x"


class Task(Protocol):
    """A running task, from the first `start` of the debugger to its end."""

    def resume(self) -> None:
        """Go on; a task begins with this."""

    def pause(self) -> None:
        """Do nothing until `resume`; what was seen is on disk."""

    def next_step(self, iteration: int) -> None:
        """End a step; the next one has this number."""

    def stop(self) -> None:
        """End, and put back everything."""


def process_rank() -> int:
    """Return the rank of this process; 0 where it is not distributed."""
    import torch.distributed as distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
