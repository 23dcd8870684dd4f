# SPDX-License-Identifier: Apache-2.0
"""Re-export ulpscope.compat.msprobe under the old import name."""

from typing import Any

__all__ = ["GradComparator"]


def __getattr__(name: str) -> Any:
    if name == "GradComparator":
        from ulpscope.compat.msprobe.compare.grad_compare import GradComparator

        return GradComparator
    raise AttributeError(f"module 'msprobe' has no attribute {name!r}")
