# SPDX-License-Identifier: Apache-2.0
"""What a debugger can be told to do, and the one table from the words of config.json to the code that does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.compat.msprobe.writer import Layout
from ulpscope.errors import InputError

__all__ = ["Place", "Task", "begin_task", "process_rank"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a task writes: the folder of a step for this process, and which of the two trees that is."""

    of_step: Callable[[int], Path]
    layout: Layout = "26.x"


class Task(Protocol):
    """One thing under way, from the first `start` of the debugger to its end."""

    def resume(self) -> None:
        """Go on; a task begins with this."""

    def pause(self) -> None:
        """Do nothing until `resume`; what was seen is on disk."""

    def next_step(self, iteration: int) -> None:
        """A step is over; the next one has this number."""

    def stop(self) -> None:
        """End, and put back everything."""


def begin_task(config: DebuggerConfig, model: Any, place: Place, iteration: int) -> Task:
    """The task that a config asks for, not yet resumed."""
    if config.level == "L2":
        raise InputError(
            "level L2 dumps the kernels of an Ascend device through CANN, which this tool cannot do; "
            "take level L1 for what each call of torch was given and returned"
        )
    if config.level == "debug":
        from ulpscope.compat.msprobe.saving import SavingTask

        return SavingTask(config, place, iteration)
    if config.task in ("overflow_check", "nan_check"):
        from ulpscope.compat.msprobe.overflow import OverflowTask

        return OverflowTask(config, model, place, iteration)
    if config.task == "grad_probe":
        from ulpscope.compat.msprobe.gradients import GradientTask

        return GradientTask(config, model)
    if config.task == "free_benchmark":
        from ulpscope.compat.msprobe.free_benchmark import FreeBenchmarkTask

        return FreeBenchmarkTask(config, iteration)
    if config.task in ("exception_dump", "diff_check"):
        raise InputError(f"the task {config.task!r} is not there; take statistics, tensor, structure, overflow_check or free_benchmark")
    from ulpscope.compat.msprobe.dumping import DumpTask

    return DumpTask(config, model, place, iteration)


def process_rank() -> int:
    """The rank of this process; 0 where it is not distributed."""
    import torch.distributed as distributed

    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
