# SPDX-License-Identifier: Apache-2.0
"""Hold the names of `msprobe.pytorch`, each loaded when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_DOOR = "ulpscope.compat.msprobe"
_PLACES = {
    "PrecisionDebugger": "debugger",
    "compare": "compare.compare_msprobe",
    "compare_distributed": "compare.compare_msprobe",
    "module_dump": "module_units",
    "module_dump_end": "module_units",
    "register_custom_api": "dump.custom_apis",
    "restore_custom_api": "dump.custom_apis",
    "seed_all": "seeds",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'msprobe.pytorch' has no attribute {name!r}")
    return getattr(import_module(f"{_DOOR}.{_PLACES[name]}"), name)
