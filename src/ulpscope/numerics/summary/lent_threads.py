# SPDX-License-Identifier: Apache-2.0
"""Lend threads to the compiled kernel, such as those of torch while they wait for the next operation.

The kernel starts no threads of its own: beside those of a training they would only be in the way. Results do not depend on their number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["lend_threads", "shared_threads"]

_ALONE: tuple[int | None, int] = (None, 0)
_lent: tuple[int, Callable[[], int], int] | None = None


def lend_threads(parallel: int | None, num_threads: Callable[[], int] = lambda: 0) -> None:
    """Lend threads to passes over large tensors in the calling thread; None takes them back.

    `parallel` is the address of a C function (function, argument, number of threads, 0) that calls the function with the argument in
    each of so many threads, as `GOMP_parallel` does.
    """
    global _lent
    _lent = None if parallel is None else (parallel, num_threads, threading.get_ident())


def shared_threads() -> tuple[int | None, int]:
    """Return the function that was lent to this thread, and how many threads it runs."""
    if _lent is None or _lent[2] != threading.get_ident():
        return _ALONE
    return _lent[0], _lent[1]()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: lend_threads(None))  # threads do not survive a fork
