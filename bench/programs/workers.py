# SPDX-License-Identifier: Apache-2.0
"""Run every program in another process: a crash, a hang or an exhausted memory becomes a row, and the next program has a new process."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from bench.programs.asking import ENVIRONMENT, Row, ask
from bench.programs.catalogue import Program

__all__ = ["LIMIT_S", "ask_all"]

LIMIT_S = 600.0
_MEMORY = 12 << 30
_PROGRAMS_EACH = 40  # operators leave garbage behind, so a new process takes over


Asking: TypeAlias = Callable[[Program, str, Path], Row]


def ask_all(programs: Sequence[Program], device: str, jobs: int, scratch: Path | None = None, asking: Asking = ask) -> Iterator[Row]:
    """Ask every program with `jobs` processes at a time; gives each row as soon as it is known."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    mine = threading.local()
    workers: list[_Worker] = []

    def one(program: Program) -> Row:
        if not hasattr(mine, "worker"):
            mine.worker = _Worker(device, scratch, asking)
            workers.append(mine.worker)
        return mine.worker.ask(program)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(one, program) for program in programs]):
                yield done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for worker in workers:
                worker.end()


class _Worker:
    """One process that answers for one program after the other."""

    def __init__(self, device: str, scratch: Path | None, asking: Asking) -> None:
        self._device, self._scratch, self._asking = device, scratch, asking
        self._process: Any = None
        self._pipe: Connection | None = None
        self._asked = 0

    def ask(self, program: Program) -> Row:
        pipe = self._pipe or self._begin()
        pipe.send(program)
        if not pipe.poll(LIMIT_S):
            self.end()
            return Row(program.key, self._device, problem=f"it takes more than {LIMIT_S:g} s")
        try:
            row: Row = pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            code = self._process.exitcode
            self.end()
            return Row(program.key, self._device, problem=f"it ended its process (exit code {code})")
        self._asked += 1
        if self._asked >= _PROGRAMS_EACH:
            self.end()
        return row

    def _begin(self) -> Connection:
        context = get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, self._device, self._scratch, self._asking), daemon=True)
        self._process.start()
        there.close()
        self._asked = 0
        return self._pipe

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, device: str, scratch: Path | None, asking: Asking) -> None:
    """Answer for every program that comes through the pipe; drop the output of the programs."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if device == "cpu":  # not for CUDA, which reserves more addresses than any machine has memory
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    while True:
        try:
            program: Program = pipe.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory(prefix="programs-", dir=scratch) as folder:
            try:
                row = asking(program, device, Path(folder))
            except Exception as error:
                row = Row(program.key, device, problem=f"{type(error).__name__}: {error}"[:600])
        pipe.send(row)
