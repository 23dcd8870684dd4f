# SPDX-License-Identifier: Apache-2.0
"""Lend the threads of torch's own OpenMP runtime to the summaries of large tensors on the CPU.

Between two operations these threads wait, and spin for a while; any other threads would compete with them. Their number is always torch's
own, since another one would make the runtime start and stop threads. Where torch runs without GNU OpenMP, one thread does the work.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from ulpscope.numerics.summary.lent_threads import lend_threads

__all__ = ["lend_torch_threads"]


def lend_torch_threads() -> None:
    """Let torch's threads share the work on large tensors that this thread summarises."""
    lend_threads(_parallel_function(), torch.get_num_threads)


@cache
def _parallel_function() -> int | None:
    """Return the address of `GOMP_parallel` in the one OpenMP runtime of this process; None if there is not exactly one."""
    runtimes = _loaded_runtimes()
    if len(runtimes) != 1:
        return None
    try:
        function = ctypes.CDLL(runtimes.pop()).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _loaded_runtimes() -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.partition("/")[2] for line in lines if ".so" in line}
    return {f"/{path}" for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
