# SPDX-License-Identifier: Apache-2.0
"""Encode values as JSON text. JSON has no word for NaN and infinities: they are the strings "NaN", "Infinity" and "-Infinity"."""

from __future__ import annotations

import json
import json.encoder
import math
from collections.abc import Callable
from typing import Any

__all__ = ["quick_text", "text"]


def _encoding() -> Callable[[Any], str]:
    """Return a function that encodes. The library would make a new encoder for each text, which takes longer than a short text itself."""
    make = getattr(json.encoder, "c_make_encoder", None)  # CPython has it
    if make is None:
        return json.JSONEncoder(allow_nan=False, default=repr).encode
    encoder = make(None, repr, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, False)
    return lambda value: "".join(encoder(value, 0))


_encode = _encoding()


def quick_text(item: dict[str, Any]) -> str:
    """Encode as `text` does, for keys that are texts; it looks at every value only if one of them is not finite."""
    try:
        return _encode(item)
    except ValueError:
        return text(item)


def text(value: Any) -> str:
    return _encode(_plain(value))


def _plain(value: Any) -> Any:
    """Replace NaN and infinities with strings, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _name_of(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
