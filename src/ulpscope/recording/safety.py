# SPDX-License-Identifier: Apache-2.0
"""Fail without harm: an error in our own work is written to the ledger and warned about once, and training goes on.

An error that a signal handler of the program raises while our work is under way is no failure of ours, and passes through.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from ulpscope.errors import CaptureWarning
from ulpscope.model import LedgerEntry, Sink

__all__ = ["Safety", "let_pass"]

_OURS = str(Path(__file__).parents[1])


class Safety:
    """Runs our own work; `is_broken` is true once the disk has failed, and then nothing more is recorded.

    `shield` hides from the program what the framework does for our own work.
    """

    def __init__(self, sink: Sink, shield: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.is_broken = False
        self.step = 0
        self._sink = sink
        self._shield = shield
        self._num_failures = 0

    def run(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run our own work and return its result, or None after a line in the ledger."""
        try:
            with self._shield():
                return function(*args)
        except Exception as error:
            self.failed(what, error)
            return None

    def failed(self, what: str, error: Exception) -> None:
        """Write down a failure of our own work."""
        let_pass(error)
        self._num_failures += 1
        is_disk = isinstance(error, OSError)
        self.is_broken |= is_disk
        why = f"{type(error).__name__}: {error}"
        try:
            self._sink.note(LedgerEntry(what=what, why=why, step=self.step))
        except Exception as another:
            let_pass(another)
            is_disk = True
        if self._num_failures > 1:
            return
        rest = (
            "recording has stopped; what was written stays readable"
            if is_disk
            else "the rest is recorded, and the ledger of the run has the details"
        )
        text = f"ulpscope could not {what} ({why}). Training goes on unchanged; {rest}."
        try:
            warnings.warn(text, CaptureWarning, stacklevel=2)
        except Warning:
            print(text, file=sys.stderr)


def let_pass(error: BaseException) -> None:
    """Raise an error that a signal handler of the program raised, such as a time limit that ended while our own work was under way."""
    for each in _chain(error):
        traceback = each.__traceback__
        while traceback is not None:
            if _is_signal_handler(traceback.tb_frame):
                raise each
            traceback = traceback.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors that caused it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _is_signal_handler(frame: FrameType) -> bool:
    """Tell whether Python itself called this function of the program: it then passes a number, and the frame that it interrupted."""
    code, interrupted = frame.f_code, frame.f_back
    if interrupted is None or code.co_filename.startswith(_OURS):
        return False
    num_named, has_rest = code.co_argcount + code.co_kwonlyargcount, bool(code.co_flags & 0x04)
    given = [frame.f_locals.get(name) for name in code.co_varnames[: num_named + has_rest]]
    rest = given.pop() if has_rest else ()
    given += rest if isinstance(rest, tuple) else ()
    return any(value is interrupted for value in given) and any(isinstance(value, int) for value in given)
