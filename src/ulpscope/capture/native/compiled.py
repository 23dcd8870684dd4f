# SPDX-License-Identifier: Apache-2.0
"""Import the compiled hot path of a recording (`_compiled.pyx`) if it was built; None where Python does the same, more slowly."""

from __future__ import annotations

import os
from typing import Any

from ulpscope.capture.native.versions import RECORDER_VERSION

__all__ = ["COMPILED"]


def _find() -> Any:
    if os.environ.get("ULPSCOPE_NO_KERNEL") == "1":
        return None
    try:
        from ulpscope.capture.native import _compiled  # type: ignore[attr-defined]
    except Exception:  # not built, built for another Python, or a name that it takes from torch is gone
        return None
    return _compiled if _compiled.IS_USABLE and _compiled.VERSION == RECORDER_VERSION else None


COMPILED = _find()
