# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code a call stands: frames of torch and of ulpscope are left out, the innermost comes first."""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import torch

from ulpscope.model import Frame

__all__ = ["StackReader", "is_recompute"]

_OURS = str(Path(__file__).parents[1]) + "/"
_DEMO = _OURS + "testing/demo/"
_RUNNER = _OURS + "workflows/running.py"
_FOREIGN = (str(Path(torch.__file__).parent) + "/", str(Path(threading.__file__)), "<frozen ")
_RUNPY = "runpy.py"
_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")
_MOST_STACKS = 20_000

Key = tuple[tuple[CodeType, int], ...]


class StackReader:
    """Reads stacks and hands out equal ones as the same tuple."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._known: dict[Key, tuple[Frame, ...]] = {}
        self._is_users: dict[str, bool] = {}

    def read(self) -> tuple[Frame, ...]:
        """The user's frames above this call, innermost first."""
        key: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(key) < self._depth:
            code = frame.f_code
            if code.co_filename == _RUNNER:  # above stands only the command line
                break
            if self._belongs_to_user(code.co_filename):
                key.append((code, frame.f_lasti))
            frame = frame.f_back
        return self._intern(tuple(key))

    def _belongs_to_user(self, file: str) -> bool:
        answer = self._is_users.get(file)
        if answer is None:
            ours = file.startswith(_OURS) and not file.startswith(_DEMO)
            answer = self._is_users[file] = not (ours or file.startswith(_FOREIGN) or file.endswith(_RUNPY))
        return answer

    def _intern(self, key: Key) -> tuple[Frame, ...]:
        frames = self._known.get(key)
        if frames is None:
            frames = tuple(_frame(code, position) for code, position in key)
            if len(self._known) < _MOST_STACKS:
                self._known[key] = frames
        return frames


def _frame(code: CodeType, position: int) -> Frame:
    line = _line_of(code, position)
    text = linecache.getline(code.co_filename, line).strip()
    return Frame(_short_path(code.co_filename), line, getattr(code, "co_qualname", code.co_name), text[:300])


def _short_path(file: str) -> str:
    """Relative to the working folder where the file lies below it: the same on every machine, and short."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _line_of(code: CodeType, position: int) -> int:
    for start, end, line in code.co_lines():
        if start <= position < end and line is not None:
            return line
    return code.co_firstlineno


def is_recompute() -> bool:
    """Whether activation checkpointing runs a forward again right now: only then does its file stand on the stack of a backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False
