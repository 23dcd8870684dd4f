# SPDX-License-Identifier: Apache-2.0
"""Record both sides of a case with ulpscope: in this process, or once in each of several gloo processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.bugs.case import Case, Program, Side, all_cases, build

__all__ = ["SIDES", "record_pair", "run_program"]

SIDES: tuple[Side, ...] = ("subject", "reference")
_SECONDS = 120


def record_pair(case: Case, into: Path, keeps: Sequence[str]) -> dict[str, float]:
    """Record both sides into `into/KEEP/SIDE`; return the seconds that each `keep` took."""
    if case.ranks > 1:
        return _record_in_ranks(case, into, keeps)
    return {keep: _timed(lambda keep=keep: _record_sides(case, into / keep, keep)) for keep in keeps}


def run_program(program: Program, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Run every step of a program on its machine, with `before` and `after` outside of it."""
    idle = False
    for index in range(program.steps):
        before()
        with program.machine() as machine:
            program.step(index)
        idle = getattr(machine, "is_idle", False)
        after()
    if idle:
        raise RuntimeError("the fault never struck: this operation is not called as the case expects")


def _record_sides(case: Case, into: Path, keep: str) -> None:
    for side in SIDES:
        _record(case, side, into / side, keep)


def _record(case: Case, side: Side, into: Path, keep: Any) -> None:
    from ulpscope import Capture

    torch.set_num_threads(1)
    program = build(case, side)
    into.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        with Capture(into, model=program.model, level=case.level, keep=keep) as capture:  # type: ignore[arg-type]
            run_program(program, lambda: None, capture.step)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _record_in_ranks(case: Case, into: Path, keeps: Sequence[str]) -> dict[str, float]:
    into.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "bench.bugs.recording", case.name, str(into), *keeps]
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(case.ranks), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(command, env={**os.environ, **addresses, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(case.ranks)
    ]
    try:
        problems = [worker.communicate(timeout=_SECONDS)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if failed := [text for worker, text in zip(workers, problems, strict=True) if worker.returncode]:
        raise RuntimeError(f"a rank of {case.name} failed: {failed[0].strip()[-2000:]}")
    return json.loads((into / "seconds.json").read_text())  # type: ignore[no-any-return]


def _rank_main(name: str, into: Path, keeps: Sequence[str]) -> None:
    """Run one rank of a distributed case: both sides, one after the other."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    [case] = all_cases(name)
    seconds = {}
    for keep in keeps:
        begin = time.perf_counter()
        for side in SIDES:
            dist.barrier()
            _record(case, side, into / keep / side, keep)
        seconds[keep] = time.perf_counter() - begin
    if dist.get_rank() == 0:
        (into / "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
