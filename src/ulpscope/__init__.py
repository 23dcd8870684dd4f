# SPDX-License-Identifier: Apache-2.0
"""Find the operation that broke a model's numerics.

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
    from ulpscope.workflows.health_recording import HealthRecording, HealthWatch, compare_health, record_health, watch
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
    "HealthRecording",
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
    "record_health",
    "watch",
]

_HOMES = {
    "CallRecord": "ulpscope.model",
    "Capture": "ulpscope.workflows.record.capturing",
    "Check": "ulpscope.model.check.checks",
    "Comparison": "ulpscope.model",
    "Finding": "ulpscope.model",
    "HealthComparison": "ulpscope.model.health",
    "HealthRecording": "ulpscope.workflows.health_recording",
    "HealthRun": "ulpscope.store.series",
    "HealthWatch": "ulpscope.workflows.health_recording",
    "NonFinite": "ulpscope.model",
    "NonFiniteCall": "ulpscope.model",
    "NonFiniteReport": "ulpscope.model",
    "Run": "ulpscope.model",
    "TensorRecord": "ulpscope.model",
    "check_run": "ulpscope.workflows.check.checking",
    "compare_health": "ulpscope.workflows.health_recording",
    "compare_runs": "ulpscope.workflows.compare.comparing",
    "find_nonfinite": "ulpscope.workflows.nonfinite",
    "open_health": "ulpscope.store",
    "open_run": "ulpscope.store",
    "record_health": "ulpscope.workflows.health_recording",
    "watch": "ulpscope.workflows.health_recording",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ulpscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
