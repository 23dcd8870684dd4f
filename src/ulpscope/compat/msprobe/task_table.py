# SPDX-License-Identifier: Apache-2.0
"""Find the code that runs the task of a config.json."""

from __future__ import annotations

from typing import Any

from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.compat.msprobe.dump.tasks import Place, Task
from ulpscope.errors import InputError

__all__ = ["begin_task"]


def begin_task(config: DebuggerConfig, model: Any, place: Place, iteration: int) -> Task:
    """Make the task that a config asks for; `resume` starts it."""
    if config.level == "L2":
        raise InputError(
            "level L2 dumps the kernels of an Ascend device through CANN, which this tool cannot do; "
            "take level L1 for what each call of torch was given and returned"
        )
    if config.level == "debug":
        from ulpscope.compat.msprobe.dump.saving import SavingTask

        return SavingTask(config, place, iteration)
    if config.task in ("overflow_check", "nan_check"):
        from ulpscope.compat.msprobe.dump.overflow_task import OverflowTask

        return OverflowTask(config, model, place, iteration)
    if config.task == "grad_probe":
        from ulpscope.compat.msprobe.dump.gradient_task import GradientTask

        return GradientTask(config, model)
    if config.task == "free_benchmark":
        from ulpscope.compat.msprobe.free_benchmark.task import FreeBenchmarkTask

        return FreeBenchmarkTask(config, iteration)
    if config.task in ("exception_dump", "diff_check"):
        raise InputError(f"the task {config.task!r} is not there; take statistics, tensor, structure, overflow_check or free_benchmark")
    from ulpscope.compat.msprobe.dump.msprobe_dump import DumpTask

    return DumpTask(config, model, place, iteration)
