# SPDX-License-Identifier: Apache-2.0
"""ulpscope finds the operation that broke a model's numerics.

Importing this package imports no framework and changes nothing: the names below are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ulpscope.errors import CaptureWarning, InputError, MissingDependencyError, NonFiniteError, UlpscopeError

if TYPE_CHECKING:
    from ulpscope.model import CallRecord, Comparison, Finding, NonFinite, NonFiniteCall, NonFiniteReport, Run, TensorRecord
    from ulpscope.model.check.checks import Check
    from ulpscope.model.health import HealthComparison
    from ulpscope.store import open_health, open_run
    from ulpscope.store.series import HealthRun
    from ulpscope.workflows.check.checking import check_run
    from ulpscope.workflows.compare.comparing import compare_runs
    from ulpscope.workflows.health_watch import HealthWatch, compare_health, watch
    from ulpscope.workflows.nonfinite import find_nonfinite
    from ulpscope.workflows.record.capturing import Capture

__version__ = "0.1.0"

__all__ = [
    "CallRecord",
    "Capture",
    "CaptureWarning",
    "Check",
    "Comparison",
    "Finding",
    "HealthComparison",
    "HealthRun",
    "HealthWatch",
    "InputError",
    "MissingDependencyError",
    "NonFinite",
    "NonFiniteCall",
    "NonFiniteError",
    "NonFiniteReport",
    "Run",
    "TensorRecord",
    "UlpscopeError",
    "__version__",
    "check_run",
    "compare_health",
    "compare_runs",
    "find_nonfinite",
    "open_health",
    "open_run",
    "watch",
]

_HOMES = {
    "CallRecord": "ulpscope.model",
    "Capture": "ulpscope.workflows.record.capturing",
    "Check": "ulpscope.model.check.checks",
    "Comparison": "ulpscope.model",
    "Finding": "ulpscope.model",
    "HealthComparison": "ulpscope.model.health",
    "HealthRun": "ulpscope.store.series",
    "HealthWatch": "ulpscope.workflows.health_watch",
    "NonFinite": "ulpscope.model",
    "NonFiniteCall": "ulpscope.model",
    "NonFiniteReport": "ulpscope.model",
    "Run": "ulpscope.model",
    "TensorRecord": "ulpscope.model",
    "check_run": "ulpscope.workflows.check.checking",
    "compare_health": "ulpscope.workflows.health_watch",
    "compare_runs": "ulpscope.workflows.compare.comparing",
    "find_nonfinite": "ulpscope.workflows.nonfinite",
    "open_health": "ulpscope.store",
    "open_run": "ulpscope.store",
    "watch": "ulpscope.workflows.health_watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ulpscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
