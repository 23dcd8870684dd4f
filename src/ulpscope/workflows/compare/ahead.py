# SPDX-License-Identifier: Apache-2.0
"""Let other threads do work ahead of its turn, for passes over tensors, which release the interpreter.

A thread that asks for a result that no thread has begun does the work itself. If another thread is at it, the asking thread does the next
task meanwhile, so as many are busy as there are cores. The standard library's executors wait for a worker instead, and take longer to
import than this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:

    class Shared(Protocol):
        """Work that several threads do together."""

        def work(self) -> None:
            """Work until nothing is left to begin."""

        def stop(self) -> None:
            """Make the working threads begin nothing more."""


__all__ = ["Ahead", "Task"]

T = TypeVar("T")
Tasks: TypeAlias = "SimpleQueue[Task[Any] | None]"
_MOST_THREADS = 8


class Task(Generic[T]):
    """One piece of work, done once by the thread that takes it first."""

    __slots__ = ("_done", "_error", "_next", "_taken", "_value", "_work")

    def __init__(self, following: Tasks, work: Callable[..., T], *arguments: Any) -> None:
        self._next = following
        self._work: tuple[Callable[..., T], tuple[Any, ...]] | None = (work, arguments)
        self._taken, self._done = Lock(), Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work unless another thread has begun it; an error is kept for the thread that asks for the result."""
        if self._work is None or not self._taken.acquire(blocking=False):
            return
        work, arguments = self._work
        try:
            self._value = work(*arguments)
        except BaseException as error:
            self._error = error
        self._work = None
        self._done.release()

    def result(self) -> T:
        """Return the result of the work; only one thread may ask for it."""
        self.run()
        while not self._done.acquire(blocking=False):
            try:
                following = self._next.get_nowait()
            except Empty:
                self._done.acquire()
                break
            if following is not None:
                following.run()
        self._done.release()
        if self._error is not None:
            raise self._error
        return self._value


class Ahead:
    """Threads for as long as the block lasts, one for each core but the caller's."""

    def __init__(self) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._threads: list[Thread] = []
        self._shared: WeakSet[Shared] = WeakSet()
        self._most = min(_MOST_THREADS, _num_cores()) - 1

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the threads; tasks that were not begun are left undone."""
        for _ in self._threads:
            self._tasks.put(None)
        self._most = 0
        for shared in self._shared:
            shared.stop()
        for thread in self._threads:
            thread.join()

    def share(self, work: Shared) -> None:
        """Have every free thread work on it; work that is left when the block ends is left undone."""
        self._shared.add(work)
        for _ in range(self._most):
            self.submit(work.work)

    def submit(self, work: Callable[..., T], *arguments: Any) -> Task[T]:
        task = Task(self._tasks, work, *arguments)
        if self._most > 0:
            self._tasks.put(task)
            if len(self._threads) < self._most:
                self._start()
        return task

    def _start(self) -> None:
        self._threads.append(Thread(target=self._work, name="ulpscope-ahead", daemon=True))
        self._threads[-1].start()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and self._most > 0:
            task.run()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
