# SPDX-License-Identifier: Apache-2.0
"""Show the examples of docstrings as blocks of code: Markdown takes `>>>` for a quotation within a quotation."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["DoctestBlocks"]

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class DoctestBlocks(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Fence each example, and leave out the directives to doctest."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{re.sub(r'  # doctest: .*', '', found[0])}\n```", text)
