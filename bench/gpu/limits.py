# SPDX-License-Identifier: Apache-2.0
"""Measure the limits of the machine: reading and copying on the device, copying to the host, writing to disk, seeing the calls of torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["IdleHooks", "IdleMode", "copy_bandwidth", "disk_bandwidth", "host_bandwidth", "read_bandwidth"]

_PART = 16 << 20


class IdleMode(TorchFunctionMode):
    """Sees every call of torch, as every recorder of calls has to, and does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class IdleHooks(TorchFunctionMode):
    """Adds an idle hook to the graph's node of each result, as a recorder of gradients has to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            result.grad_fn.register_hook(_ignore)
        return result


def _ignore(*_: Any) -> None:
    return None


def _seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Time several runs by the device's own clock, and return the quickest."""
    work()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found)


def read_bandwidth(size: int = 1 << 31) -> float:
    """Measure the bytes a second that the device reads in a sum."""
    data = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
    return size / _seconds(data.sum)


def copy_bandwidth(size: int = 1 << 31) -> float:
    """Measure the bytes a second that the device reads and writes in a copy."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / _seconds(lambda: target.copy_(source))


def host_bandwidth(size: int = 1 << 30) -> float:
    """Measure the bytes a second from the device to pinned memory."""
    source, target = torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.zeros(size, dtype=torch.uint8).pin_memory()
    return size / _seconds(lambda: target.copy_(source, non_blocking=True))


def disk_bandwidth(folder: Path, size: int) -> tuple[float, str]:
    """Measure the bytes a second of writing one large file to the end of its sync: the best of three ways, and which."""
    data = memoryview(os.urandom(_PART) * 16)
    ways = {"through the page cache": 0, "the same, letting go of what is written": 0, "past the page cache": getattr(os, "O_DIRECT", None)}
    found = [
        (_written(folder / "bandwidth", size, data, flags, lets_go="letting" in way), way)
        for way, flags in ways.items()
        if flags is not None
    ]
    return max(found)


def _written(path: Path, size: int, data: memoryview, flags: int, *, lets_go: bool) -> float:
    aligned = torch.empty(len(data) + 4096, dtype=torch.uint8).numpy()
    offset = -aligned.ctypes.data % 4096
    source = memoryview(aligned)[offset : offset + len(data)]
    source[:] = data
    begin = time.perf_counter()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
    except OSError:
        return 0.0
    try:
        for at in range(0, size, _PART):
            start = at % len(source)
            os.write(fd, source[start : start + _PART])
            if lets_go:
                os.posix_fadvise(fd, 0, at, os.POSIX_FADV_DONTNEED)
        os.fsync(fd)
    except OSError:
        return 0.0
    finally:
        os.close(fd)
        path.unlink()
    return size / (time.perf_counter() - begin)
