# SPDX-License-Identifier: Apache-2.0
"""Write JSON files that grow entry by entry and are valid after each: every entry overwrites the closing bytes and writes them again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

__all__ = ["GrowingJson"]


class GrowingJson:
    """A JSON object between a head and a tail, one entry a line."""

    def __init__(self, path: Path, head: str = "{\n", tail: str = "\n}", mode: int = 0o640) -> None:
        self._tail = tail.encode()
        self._file: IO[bytes] = path.open("wb", buffering=0)
        path.chmod(mode)
        self._file.write(head.encode() + self._tail)
        self._separator = ""

    def add(self, key: str, value: Any) -> None:
        """Append one entry; NaN and infinities become NaN and Infinity, as Python writes them."""
        text = f"{self._separator}{json.dumps(key)}: {json.dumps(value)}"
        self._file.seek(-len(self._tail), os.SEEK_END)
        self._file.write(text.encode() + self._tail)
        self._separator = ",\n"

    def close(self) -> None:
        self._file.close()
