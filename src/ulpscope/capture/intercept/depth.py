# SPDX-License-Identifier: Apache-2.0
"""Leave a program as much room to recurse as it has without us.

Python counts every frame, and those of ours that stand around the calls of modules lie between the user's. Modules inside modules inside
modules would meet the limit of recursion at half the depth. So the limit rises by our frames where they begin and falls where they end;
by no more than they are, so that a recursion without an end still meets it.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["Depth"]

_AROUND_A_MODULE = 4
"""How many levels a module inside a module takes more, at the least: the code that stands in, what it calls, and how Python gets there."""

_OUR_OWN_WORK = 200
"""What the work inside one call takes: a mode's handler around a function of torch, and to write down what went through it."""


class Depth:
    """The limit of recursion while something stands around the calls of modules; who sets it meanwhile is left alone."""

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
        """Make room for our frames around one call; what `leave` is to be given. Other threads share the limit and leave it alone."""
        if threading.get_ident() != self._thread:
            return 0
        limit = sys.getrecursionlimit() + _AROUND_A_MODULE
        sys.setrecursionlimit(limit)
        return limit

    def leave(self, limit: int) -> None:
        """Take back the room of one call."""
        if limit and sys.getrecursionlimit() == limit:
            sys.setrecursionlimit(limit - _AROUND_A_MODULE)
