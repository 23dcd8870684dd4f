# SPDX-License-Identifier: Apache-2.0
"""Where in the user's code a call stands: frames of the framework and of ulpscope are left out, the innermost comes first."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

from ulpscope.model import Frame

__all__ = ["BOUNDARY", "EMPTY", "END", "USERS", "Running", "Stack", "StackReader"]

_OURS = str(Path(__file__).parents[1]) + "/"
_DEMO = _OURS + "testing/demo/"
_RUNNER = _OURS + "workflows/record/running.py"
_FOREIGN = (str(Path(threading.__file__)), "<frozen ")
_RUNPY = "runpy.py"
_MOST_STACKS = 20_000
_FOREIGNERS, USERS, BOUNDARY, END = range(4)


class Running(Protocol):
    """A running module: the stack above its call, remembered once somebody asked, and the place from which it was called.

    `inside` is the identity of the frame of its forward, which lives as long as the call; 0 while it is unknown, or is not the user's.
    """

    stack: Stack | None
    called_from: tuple[int, int] | None
    inside: int

    def runs(self, code: CodeType) -> bool:
        """Tell whether this is the code of its forward."""


class Stack:
    """The user's frames above a call, innermost first; equal ones are the same object."""

    __slots__ = ("codes", "frames")

    def __init__(self, codes: tuple[CodeType, ...], frames: tuple[Frame, ...]) -> None:
        self.codes = codes  # held, so that nobody else gets their addresses
        self.frames = frames


EMPTY = Stack((), ())


class StackReader:
    """Reads stacks and hands out equal ones as the same tuple. `foreign` are the beginnings of the names of files that are not the user's.

    With `running`, what stands above a module is read once for all calls inside it: `running` gives the modules that run on this thread,
    the innermost last, and `boundary` is the code of the function that stands around the call of each.
    """

    def __init__(
        self,
        depth: int,
        *,
        foreign: tuple[str, ...],
        boundary: CodeType | None = None,
        running: Callable[[], Sequence[Running]] | None = None,
    ) -> None:
        self._depth = depth
        self._foreign = (*_FOREIGN, *foreign)
        self._boundary = boundary
        self._running = running
        self._known: dict[tuple[Any, ...], Stack] = {}
        self._kinds: dict[int, tuple[int, CodeType]] = {}

    def read(self, frame: FrameType | None = None) -> tuple[Frame, ...]:
        """Return the user's frames above this call, or from `frame` upwards, innermost first."""
        running: Sequence[Running] = self._running() if self._running is not None else ()
        return self._read(frame or sys._getframe(1), running, len(running) - 1).frames

    def _read(self, frame: FrameType | None, running: Sequence[Running], innermost: int) -> Stack:
        """Read the stack from `frame` upwards, module by module: in a loop, since modules may nest as deep as Python lets them."""
        parts: list[tuple[list[int], list[CodeType], Running | None, tuple[int, int] | None]] = []
        module: Running | None = None
        called_from: tuple[int, int] | None = None
        while True:
            key, codes, above, caller = self._read_part(frame, running[innermost] if innermost >= 0 else None)
            parts.append((key, codes, module, called_from))
            if above is not None:
                break
            module, frame = running[innermost], caller
            called_from = None if caller is None else (id(caller.f_code), caller.f_lasti)
            if module.stack is not None and module.called_from == called_from:  # still the call of which that was remembered
                above = module.stack
                break
            innermost -= 1
        for key, codes, module, called_from in reversed(parts):
            above = self._joined(key, codes, above)
            if module is not None:
                module.stack, module.called_from = above, called_from
        return above

    def _read_part(
        self, frame: FrameType | None, module: Running | None
    ) -> tuple[list[int], list[CodeType], Stack | None, FrameType | None]:
        """Read the frames up to the call of this module, and the stack above them; if that is unknown, return the caller of the module
        instead.
        """
        key: list[int] = []
        codes: list[CodeType] = []
        kinds = self._kinds
        last = 0
        while frame is not None and len(codes) < self._depth:
            code = frame.f_code
            if module is not None and module.inside == id(frame) and module.stack is not None:
                key += (id(code), frame.f_lasti)
                codes.append(code)
                return key, codes, module.stack, None
            known = kinds.get(id(code))
            kind = known[0] if known is not None else self._classify(code)
            if kind == USERS:
                key += (id(code), frame.f_lasti)
                codes.append(code)
                last = id(frame)
            elif kind == BOUNDARY and module is not None:
                module.inside = last if codes and module.runs(codes[-1]) else 0
                return key, codes, None, frame.f_back
            elif kind == END:
                break
            frame = frame.f_back
        return key, codes, EMPTY, None

    def _joined(self, key: list[int], codes: list[CodeType], above: Stack) -> Stack:
        """Join these frames with the stack above them. The codes whose identities stand in a key are kept as long as the key is."""
        if not codes:
            return above
        identity = (*key, above)
        stack = self._known.get(identity)
        if stack is None:
            frames = tuple(_frame(code, position) for code, position in zip(codes, key[1::2], strict=True)) + above.frames
            stack = Stack(tuple(codes), frames[: self._depth])
            if len(self._known) < _MOST_STACKS:
                self._known[identity] = stack
        return stack

    def _classify(self, code: CodeType) -> int:
        file = code.co_filename
        ours = file.startswith(_OURS) and not file.startswith(_DEMO)
        if code is self._boundary:
            kind = BOUNDARY
        elif file == _RUNNER:  # above stands only the command line
            kind = END
        else:
            kind = _FOREIGNERS if ours or file.startswith(self._foreign) or file.endswith(_RUNPY) else USERS
        self._kinds[id(code)] = (kind, code)
        return kind


def _frame(code: CodeType, position: int) -> Frame:
    line = _line_of(code, position)
    text = linecache.getline(code.co_filename, line).strip()
    return Frame(_short_path(code.co_filename), line, getattr(code, "co_qualname", code.co_name), text[:300])


def _short_path(file: str) -> str:
    """Return the path relative to the working folder if the file lies below it: the same on every machine, and short."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _line_of(code: CodeType, position: int) -> int:
    for start, end, line in code.co_lines():
        if start <= position < end and line is not None:
            return line
    return code.co_firstlineno
