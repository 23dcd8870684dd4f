# SPDX-License-Identifier: Apache-2.0
"""Failing without harm: what goes wrong in our own work is written to the ledger and warned about once, and training goes on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from ulpscope.capture.torch_internals import without_function_modes
from ulpscope.errors import CaptureWarning
from ulpscope.model import LedgerEntry, Sink

__all__ = ["Safety"]


class Safety:
    """Runs our own work; `is_broken` once the disk has failed, after which nothing more is to be recorded."""

    def __init__(self, sink: Sink) -> None:
        self.is_broken = False
        self.step = 0
        self._sink = sink
        self._num_failures = 0

    def run(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """The result of our own work, or None and a line in the ledger."""
        try:
            with without_function_modes():
                return function(*args)
        except Exception as error:
            self.failed(what, error)
            return None

    def failed(self, what: str, error: Exception) -> None:
        """Write down what could not be done."""
        self._num_failures += 1
        is_disk = isinstance(error, OSError)
        self.is_broken |= is_disk
        why = f"{type(error).__name__}: {error}"
        try:
            self._sink.note(LedgerEntry(what=what, why=why, step=self.step))
        except Exception:
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
