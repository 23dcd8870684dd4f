# SPDX-License-Identifier: Apache-2.0
"""The old import name; see ulpscope.compat.ptdbg."""

from typing import Any

from ulpscope.compat import ptdbg as _door

__all__ = [  # noqa: F822
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


def __getattr__(name: str) -> Any:
    return getattr(_door, name)
