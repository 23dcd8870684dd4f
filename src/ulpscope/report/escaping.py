# SPDX-License-Identifier: Apache-2.0
"""Make foreign strings safe to look at.

Names, paths and code in a run were written by someone else. A character that a terminal or a spreadsheet would act on, rather than show, is
spelled out: an escape sequence becomes the text `\\x1b[31m`, a text direction mark becomes `\\u202e`.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["encodable", "shortened", "visible"]


@lru_cache(maxsize=4096)
def visible(text: str) -> str:
    """Spell out every character that does not print."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def shortened(text: str, limit: int) -> str:
    """Return the visible text, cut at `limit` characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return visible(cut)


def encodable(text: str) -> str:
    """Escape lone surrogates, which no UTF-8 file can hold, and keep the rest of the text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
