# SPDX-License-Identifier: Apache-2.0
"""Re-export ulpscope.compat.msprobe.pytorch under the old import name."""

from typing import Any

from ulpscope.compat.msprobe import pytorch as _door

__all__ = [
    "PrecisionDebugger",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "register_custom_api",
    "restore_custom_api",
    "seed_all",
]


def __getattr__(name: str) -> Any:
    return getattr(_door, name)
