# SPDX-License-Identifier: Apache-2.0
"""Serve scripts of ptdbg_ascend: its fourteen functions under their old names, each loaded when it is first asked for.

Asking for a function that dumps switches dropout off, as the old tool promises of its import (see `dropout`); comparing and parsing change
nothing and need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "PrecisionDebugger",
    "acc_cmp_dump",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "overflow_check",
    "parse",
    "register_hook",
    "seed_all",
    "set_backward_input",
    "set_dump_path",
    "set_dump_switch",
    "set_overflow_check_switch",
]

_READING = {
    "CompareException": "ulpscope.compat.ptdbg.exceptions",
    "compare": "ulpscope.compat.ptdbg.compare.compare_ptdbg",
    "compare_distributed": "ulpscope.compat.ptdbg.compare.distributed",
    "parse": "ulpscope.compat.ptdbg.compare.parsing",
}
_DUMPING = {
    "PrecisionDebugger": "ulpscope.compat.ptdbg.dump.debugger",
    "acc_cmp_dump": "ulpscope.compat.ptdbg.dump.functions",
    "module_dump": "ulpscope.compat.ptdbg.dump.module_units",
    "module_dump_end": "ulpscope.compat.ptdbg.dump.module_units",
    "overflow_check": "ulpscope.compat.ptdbg.dump.functions",
    "register_hook": "ulpscope.compat.ptdbg.dump.functions",
    "seed_all": "ulpscope.compat.seeding",
    "set_backward_input": "ulpscope.compat.ptdbg.dump.functions",
    "set_dump_path": "ulpscope.compat.ptdbg.dump.functions",
    "set_dump_switch": "ulpscope.compat.ptdbg.dump.functions",
    "set_overflow_check_switch": "ulpscope.compat.ptdbg.dump.functions",
}


def __getattr__(name: str) -> Any:
    if name in _DUMPING:
        from ulpscope.compat.ptdbg.dropout import switch_off_dropout

        switch_off_dropout()
        return getattr(import_module(_DUMPING[name]), name)
    if name in _READING:
        return getattr(import_module(_READING[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
