# SPDX-License-Identifier: Apache-2.0
"""Values as JSON text. JSON has no word for NaN and infinities: they are the strings "NaN", "Infinity" and "-Infinity"."""

from __future__ import annotations

import json
import json.encoder
import math
from collections.abc import Callable
from typing import Any

__all__ = ["quick_text", "text"]


def _encoding() -> Callable[[Any], str]:
    """A function that encodes. The library makes a new encoder for each text, which takes longer than a short text itself."""
    make = getattr(json.encoder, "c_make_encoder", None)  # CPython has it
    if make is None:
        return json.JSONEncoder(allow_nan=False, default=repr).encode
    encoder = make(None, repr, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, False)
    return lambda value: "".join(encoder(value, 0))


_encode = _encoding()


def quick_text(item: dict[str, Any]) -> str:
    """The same as `text` for keys that are texts, without a look at every value unless one of them is no number."""
    try:
        return _encode(item)
    except ValueError:
        return text(item)


def text(value: Any) -> str:
    return _encode(_plain(value))


def _plain(value: Any) -> Any:
    """The value with NaN and infinities as strings, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _name_of(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
