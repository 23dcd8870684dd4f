# SPDX-License-Identifier: Apache-2.0
"""Deferred imports of optional packages, with the line that installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from ulpscope.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or say what needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package '{module.partition('.')[0]}', which is not installed here: pip install 'ulpscope[{extra}]'"
        ) from error
