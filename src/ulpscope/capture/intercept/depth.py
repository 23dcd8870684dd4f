# SPDX-License-Identifier: Apache-2.0
"""Leave a program as much room to recurse as it has without us.

Python counts every frame. Our frames around the calls of modules lie between the user's, so nested modules would meet the limit of
recursion at half the depth. So the limit rises by our frames where they begin and falls where they end. It rises by no more than their
number, so that a recursion without an end still meets it.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["Depth"]

_AROUND_A_MODULE = 4
"""The fewest levels that a module inside a module takes more: the code that stands in, the code it calls, and Python's way there."""

_OUR_OWN_WORK = 200
"""The levels that the work inside one call takes: a mode's handler around a function of torch, and the writing of the record."""


class Depth:
    """The limit of recursion while our code stands around the calls of modules. A limit that somebody else sets meanwhile is left alone."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._before = self._raised = sys.getrecursionlimit()

    def begin(self) -> None:
        """Make room for our own work at any depth that the user may reach."""
        self._before = sys.getrecursionlimit()
        self._raised = self._before + _OUR_OWN_WORK
        sys.setrecursionlimit(self._raised)

    def end(self) -> None:
        """Put the limit back."""
        if sys.getrecursionlimit() == self._raised:
            sys.setrecursionlimit(self._before)

    def enter(self) -> int:
        """Make room for our frames around one call; return the argument for `leave`. Other threads share the limit and leave it alone."""
        if threading.get_ident() != self._thread:
            return 0
        limit = sys.getrecursionlimit() + _AROUND_A_MODULE
        sys.setrecursionlimit(limit)
        return limit

    def leave(self, limit: int) -> None:
        """Take back the room of one call."""
        if limit and sys.getrecursionlimit() == limit:
            sys.setrecursionlimit(limit - _AROUND_A_MODULE)
