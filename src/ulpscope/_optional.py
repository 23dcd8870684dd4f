# SPDX-License-Identifier: Apache-2.0
"""Import optional packages late, and print the line that installs a missing one; keep out one package."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from ulpscope.errors import MissingDependencyError, system_error_behind

__all__ = ["keep_triton_out", "require"]


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`; if it is missing, raise an error that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (refused := system_error_behind(error)) is not None:
            raise refused from error
        raise MissingDependencyError(
            f"{purpose} needs the package '{module.partition('.')[0]}', which is not installed here: pip install 'ulpscope[{extra}]'"
        ) from error


class _NoTriton:
    """Answers torch's `import triton` on a machine that has no device for it; other imports take their usual way."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "triton" and _is_asked_by_torch() and not _has_device_of_triton():
            raise ModuleNotFoundError("triton is not loaded: it compiles for GPUs, and torch finds none here", name=name)
        return None


def keep_triton_out() -> None:
    """Refuse torch's import of triton in this process where triton could compile for no device.

    torch's compiler imports triton wherever it is installed, which takes seconds. This is for processes of our own: in a process that
    runs a user's script, imports stay as they are.
    """
    if "triton" not in sys.modules and not any(isinstance(finder, _NoTriton) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoTriton())


def _is_asked_by_torch() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _has_device_of_triton() -> bool:
    torch = sys.modules.get("torch")
    kinds = [getattr(torch, kind, None) for kind in ("cuda", "xpu")]
    return any(kind is not None and kind.is_available() for kind in kinds)
