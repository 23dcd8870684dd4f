# SPDX-License-Identifier: Apache-2.0
"""Dump a module as one unit, and no API, between `module_dump` and `module_dump_end`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ulpscope.compat.ptdbg.dump.process import PROCESS
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.ptdbg.files.line_names import is_plain_name
from ulpscope.compat.screen import print_warning

if TYPE_CHECKING:
    import torch

__all__ = ["DumpException", "module_dump", "module_dump_end"]


class DumpException(CompareException):
    """Raised where `module_dump` was given something that cannot be dumped."""


def module_dump(module: torch.nn.Module, module_name: str) -> None:
    """Dump each call of this module as `{module_name}_{count}`, and nothing else, until `module_dump_end`.

    >>> module_dump(module, "MyModule")  # doctest: +SKIP
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise DumpException(
            DumpException.INVALID_PARAM_ERROR,
            f"module_dump takes an instance of torch.nn.Module, not {_described(module)}; build the module first",
        )
    if not isinstance(module_name, str) or not is_plain_name(module_name):
        raise DumpException(
            DumpException.INVALID_PARAM_ERROR,
            f"module_name becomes part of file names: letters, digits, '_', '-' and '.', not {module_name!r}",
        )
    if PROCESS.dumping is None:
        print_warning("module_dump has no effect while the dump is off; call register_hook and set_dump_switch('ON') before it")
        return
    PROCESS.dumping.take_whole(module, module_name)


def module_dump_end() -> None:
    """Dump APIs again.

    >>> module_dump_end()  # doctest: +SKIP
    """
    if PROCESS.dumping is not None:
        PROCESS.dumping.take_apart()


def _described(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
