# SPDX-License-Identifier: Apache-2.0
"""ulpscope finds the operation that broke a model's numerics.

Importing this package imports no framework and changes nothing: the names below are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ulpscope.errors import CaptureWarning, InputError, MissingDependencyError, UlpscopeError

if TYPE_CHECKING:
    from ulpscope.model import CallRecord, Comparison, Finding, Run, TensorRecord
    from ulpscope.store import open_run
    from ulpscope.workflows.capturing import Capture
    from ulpscope.workflows.comparing import compare_runs

__version__ = "0.1.0"

__all__ = [
    "CallRecord",
    "Capture",
    "CaptureWarning",
    "Comparison",
    "Finding",
    "InputError",
    "MissingDependencyError",
    "Run",
    "TensorRecord",
    "UlpscopeError",
    "__version__",
    "compare_runs",
    "open_run",
]

_HOMES = {
    "CallRecord": "ulpscope.model",
    "Capture": "ulpscope.workflows.capturing",
    "Comparison": "ulpscope.model",
    "Finding": "ulpscope.model",
    "Run": "ulpscope.model",
    "TensorRecord": "ulpscope.model",
    "compare_runs": "ulpscope.workflows.comparing",
    "open_run": "ulpscope.store",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ulpscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
