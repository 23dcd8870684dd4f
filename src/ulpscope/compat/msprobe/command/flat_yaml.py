# SPDX-License-Identifier: Apache-2.0
"""Read the little of YAML that mapping files need: one level of names with a text or a list of texts, and comments.

NPU.npu_fusion_attention.4.forward.input.0: Functional.scaled_dot_product_attention.4.forward.input.0
api: [Distributed.all_reduce, Distributed.broadcast]
compare_index:
  - Max diff
"""

from __future__ import annotations

import re
from pathlib import Path

from ulpscope._files import read_small
from ulpscope.errors import InputError

__all__ = ["read_lists", "read_names"]

_MOST_BYTES = 64 << 20
_PAIR = re.compile(r"(?P<key>\"[^\"]+\"|'[^']+'|[^\s\"'#\[{&*!|>%@`-][^:]*?)\s*:(?:\s+(?P<value>.*))?")
_COMMENT = re.compile(r"(^|\s)#.*")


def read_names(path: Path) -> dict[str, str]:
    """Read a file of `name: name` lines."""
    values = read_lists(path)
    several = next((name for name, value in values.items() if len(value) != 1), None)
    if several is not None:
        raise InputError(f"'{path}' gives '{several[:80]}' {len(values[several])} names, not one: write 'name: other name', one a line")
    return {name: value[0] for name, value in values.items()}


def read_lists(path: Path) -> dict[str, list[str]]:
    """Read a file of names with one text or a list of texts each."""
    found: dict[str, list[str]] = {}
    last = ""
    for number, raw in enumerate(_lines(path), 1):
        line = _COMMENT.sub("", raw).rstrip()
        if not line.strip() or line.strip() == "---":
            continue
        if line.lstrip().startswith("- ") and last:
            found[last].append(_unquoted(line.lstrip()[2:]))
            continue
        match = _PAIR.fullmatch(line)
        if match is None:
            raise InputError(f"'{path}', line {number}, is not understood: write 'name: other name', one a line")
        last = _unquoted(match["key"])
        found[last] = _values(match["value"] or "")
    return found


def _lines(path: Path) -> list[str]:
    try:
        return read_small(path, _MOST_BYTES, "mapping").decode().splitlines()
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror}); give the path of a yaml file") from None
    except UnicodeDecodeError:
        raise InputError(f"'{path}' is no text in UTF-8; give the path of a yaml file") from None


def _values(text: str) -> list[str]:
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [_unquoted(part) for part in text[1:-1].split(",") if part.strip()]
    return [_unquoted(text)] if text else []


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
