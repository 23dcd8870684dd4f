# SPDX-License-Identifier: Apache-2.0
"""Read the shapes of sliced operators (FFTS+): each thread dumps its part of the tensors, and an attribute in JSON says which part that
is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["slice_shape"]

_MAX_CHARACTERS = 1 << 20


def slice_shape(attributes: Iterable[str], thread: int, role: str, index: int) -> tuple[int, ...] | None:
    """Return the shape of one thread's part of a tensor; None where the operator is not sliced by threads, or the attribute does not
    say.
    """
    for text in attributes:
        told = _told(text)
        if told.get("threadMode"):
            part = _at(_at(told.get(f"{role}_tensor_slice"), thread), index)
            sizes = [_size(ends) for ends in part] if isinstance(part, list) else []
            return tuple(size for size in sizes if size is not None) if sizes and None not in sizes else None
    return None


def _told(text: str) -> dict[str, Any]:
    try:
        told = json.loads(text) if len(text) < _MAX_CHARACTERS and text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _at(values: object, index: int) -> Any:
    return values[index] if isinstance(values, list) and index < len(values) else None


def _size(ends: object) -> int | None:
    low, high = (ends.get("lower"), ends.get("higher")) if isinstance(ends, dict) else (None, None)
    return high - low if type(low) is int and type(high) is int and 0 <= low <= high < 2**63 else None
