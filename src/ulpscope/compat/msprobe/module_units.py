# SPDX-License-Identifier: Apache-2.0
"""Dump a module as one unit, and no API, between `module_dump` and `module_dump_end` of msprobe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ulpscope.compat.msprobe.debugger import PrecisionDebugger
from ulpscope.compat.msprobe.dump.msprobe_dump import DumpTask
from ulpscope.compat.ptdbg.files.line_names import is_plain_name
from ulpscope.errors import InputError

if TYPE_CHECKING:
    import torch

__all__ = ["module_dump", "module_dump_end"]


def module_dump(module: torch.nn.Module, dump_name: str) -> None:
    """Dump each call of this module as `Module.{dump_name}.{class}.forward.{count}`, and nothing else, until `module_dump_end`.

    >>> module_dump(model.layer, "MyLayer")  # doctest: +SKIP
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module_dump takes an instance of torch.nn.Module, not {module!r}; build the module first")
    if not isinstance(dump_name, str) or not is_plain_name(dump_name):
        raise InputError(f"dump_name becomes part of file names: letters, digits, '_', '-' and '.', not {dump_name!r}")
    task = PrecisionDebugger.running()
    if not isinstance(task, DumpTask):
        raise InputError("module_dump comes after debugger.start(), with a task that dumps")
    task.take_whole(module, dump_name)


def module_dump_end() -> None:
    """Dump APIs again.

    >>> module_dump_end()  # doctest: +SKIP
    """
    task = PrecisionDebugger.running()
    if isinstance(task, DumpTask):
        task.take_apart()
