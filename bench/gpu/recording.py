# SPDX-License-Identifier: Apache-2.0
"""Measure what recording a step costs: every recorder trains the same model in turn, and ratios are taken within one process.

A turn trains one step to warm up and then several that are timed together, to the end of the recording and of the device's work: work put
off is counted. The figure of a recorder is the median of its turns.

On a shared machine, other programs make one core or another half as quick, for seconds at a time. So each turn, the bare ones too, runs on
the cores that are quickest just before it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ulpscope

__all__ = ["Recorder", "disk_use", "dump_step", "growth", "take_turns"]

_NUM_CORES = 4  # for training, autograd and the driver


@dataclass
class Recorder:
    """One way to train, and the seconds a step of its turns. `idle` is a context that looks on and records nothing."""

    name: str
    options: dict[str, Any] | None
    asked: str = ""
    idle: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    turns: list[float] = field(default_factory=list)
    bytes_a_step: float = 0.0

    @property
    def seconds(self) -> float:
        return statistics.median(self.turns) if self.turns else math.nan


def take_turns(
    recorders: list[Recorder], trained: tuple[Any, Any, Callable[[], Any]], *, turns: int, steps: int, scratch: Path
) -> list[float]:
    """Let every recorder take its turns, one after the other, over and over.

    Return the time of the same piece of Python between them, which tells how much else the processor had to do.
    """
    for recorder in recorders:  # once unmeasured: kernels are compiled, memory is taken
        _turn(recorder, trained, 1, scratch)
    between = []
    all_cores = os.sched_getaffinity(0)
    for _ in range(turns):
        for recorder in recorders:
            _run_on(_quick_cores(all_cores))
            recorder.turns.append(_turn(recorder, trained, steps, scratch))
            between.append(_plain_python())
    _run_on(all_cores)
    return between


def _quick_cores(cores: set[int]) -> set[int]:
    seconds = {}
    for core in cores:
        os.sched_setaffinity(0, {core})
        seconds[core] = min(_plain_python(100_000) for _ in range(2))
    return set(sorted(cores, key=seconds.__getitem__)[:_NUM_CORES])


def _run_on(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _plain_python(rounds: int = 300_000) -> float:
    begin, total = time.perf_counter(), 0
    for number in range(rounds):
        total += number
    return time.perf_counter() - begin


def _turn(recorder: Recorder, trained: tuple[Any, Any, Callable[[], Any]], steps: int, scratch: Path) -> float:
    model, optimizer, step = trained
    into = scratch / "run"
    shutil.rmtree(into, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        capture = None
        if recorder.idle is not None:
            stack.enter_context(recorder.idle())
        if recorder.options is not None:
            capture = stack.enter_context(ulpscope.Capture(into, model=model, optimizer=optimizer, **recorder.options))
        _train(step, capture, 1)
        _synchronize()
        begin = time.perf_counter()
        _train(step, capture, steps)
    _synchronize()
    elapsed = time.perf_counter() - begin
    if into.exists():
        recorder.bytes_a_step = disk_use(into)[0] / (steps + 1)
        shutil.rmtree(into)
    return elapsed / steps


def _train(step: Callable[[], Any], capture: Any, steps: int) -> None:
    for _ in range(steps):
        step()
        if capture is not None:
            capture.step()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def growth(trained: tuple[Any, Any, Callable[[], Any]], steps: int, scratch: Path) -> float:
    """Compare the seconds of the late steps of a long recording with those of the early ones."""
    model, optimizer, step = trained
    seconds: list[float] = []
    all_cores = os.sched_getaffinity(0)
    with ulpscope.Capture(scratch / "long", model=model, optimizer=optimizer) as capture:
        for number in range(steps):
            if number in (3, steps - 5):
                _run_on(_quick_cores(all_cores))
            begin = time.perf_counter()
            _train(step, capture, 1)
            _synchronize()
            seconds.append(time.perf_counter() - begin)
    _run_on(all_cores)
    shutil.rmtree(scratch / "long")
    return statistics.median(seconds[-5:]) / statistics.median(seconds[3:8])


def dump_step(trained: tuple[Any, Any, Callable[[], Any]], scratch: Path) -> tuple[float, int, bool]:
    """Time one step with all its tensors to the last byte on disk.

    Return the seconds, the bytes, and whether the loss is bitwise that of the bare step.
    """
    model, optimizer, step = trained
    state = _state(model, optimizer)
    bare = step().item()
    _restore(model, optimizer, state)
    _synchronize()
    into = scratch / "dump"
    begin = time.perf_counter()
    with ulpscope.Capture(into, model=model, optimizer=optimizer, keep="tensors") as capture:
        loss = step()
        capture.step()
    _synchronize()
    _sync_files(into)
    elapsed = time.perf_counter() - begin
    size, _ = disk_use(into)
    shutil.rmtree(into)
    return elapsed, size, loss.item() == bare


def _state(model: Any, optimizer: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in _tensors(model, optimizer)]


def _restore(model: Any, optimizer: Any, state: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, kept in zip(_tensors(model, optimizer), state, strict=True):
            tensor.copy_(kept)


def _tensors(model: Any, optimizer: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))]


def _sync_files(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def disk_use(folder: Path) -> tuple[int, int]:
    """Return bytes and files below a folder."""
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return sum(sizes), len(sizes)
