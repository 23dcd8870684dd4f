# SPDX-License-Identifier: Apache-2.0
"""The same cases through mindstudio-probe: its debugger records both sides, its comparison flags rows, the first flagged row is its answer.

Half of this file runs in the peer's own environment, where ulpscope is not installed: `python -m bench.bugs.peer CASE FOLDER KEEP...`
leaves an `answer.json` there. It records with level `mix` and risk level ALL, its most complete setting, in processes of their own (its
debugger exists once for each process), and compares every step in turn, as its comparison takes one at a time.

What counts in its favour: rows flagged `warning` count as `error` does; only the name of an operation has to be right, not its namespace;
slots are not looked at; an in-place operation outside of modules stands for the whole optimizer; a module stands for the calls in it.
"""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.bugs.case import Case, Side, all_cases, build
from bench.bugs.recording import SIDES, run_program
from bench.bugs.scoring import Blame, kinds_of

__all__ = ["ask_peer"]

_SECONDS = 600
_TASKS = {"statistics": "statistics", "tensors": "tensor"}
_MODULE = re.compile(r"Module\.(?P<path>.+)\.[^.]+\.(?P<phase>forward|backward)\.\d+")
_CALL = re.compile(r"(?P<space>[^.]+)\.(?P<op>.+)\.(?P<index>\d+)\.(?P<phase>forward|backward)")


def ask_peer(case: Case, python: str, folder: Path, keeps: Sequence[str]) -> dict[str, list[Blame]]:
    """What the peer blames first, for each of `keeps`; an empty list where it flags nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [python, "-m", "bench.bugs.peer", case.name, str(folder), *keeps]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MSPROBE_LOG_LEVEL": "4", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"the peer failed on {case.name}: {done.stderr.strip()[-1500:]}")
    answers = json.loads((folder / "answer.json").read_text())
    return {keep: [Blame(**blame) for blame in found] for keep, found in answers.items()}


# ---- in the peer's environment ---------------------------------------------------------------------------------------------------------


def _main(name: str, folder: Path, keeps: Sequence[str]) -> None:
    [case] = all_cases(name)
    answers = {}
    for keep in keeps:
        for side in SIDES:
            _record_in_processes(case, side, folder / keep / side, keep)
        answers[keep] = [blame for blame in _blames(folder / keep)][:1]
    (folder / "answer.json").write_text(json.dumps(answers))


def _record_in_processes(case: Case, side: Side, into: Path, keep: str) -> None:
    """One forked process for each rank: the tool is imported already, so this costs nothing."""
    import msprobe.pytorch  # noqa: F401

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(case.ranks):
        child = os.fork()
        if child == 0:
            _record_and_exit(case, side, into, keep, rank, port)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise RuntimeError(f"recording the {side} failed")


def _record_and_exit(case: Case, side: Side, into: Path, keep: str, rank: int, port: int) -> None:
    status = 1
    try:
        if case.ranks > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(case.ranks), RANK=str(rank))
            torch.distributed.init_process_group("gloo")
        _record(case, side, into, keep, rank)
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _record(case: Case, side: Side, into: Path, keep: str, rank: int) -> None:
    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    task = _TASKS[keep]
    block = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = {"task": task, "dump_path": str(into), "rank": [], "step": [], "level": "mix", "risk_level": "ALL", task: block}
    into.mkdir(parents=True, exist_ok=True)
    file = into / f"config{rank}.json"
    file.write_text(json.dumps(config))
    program = build(case, side)
    debugger = PrecisionDebugger(config_path=str(file))

    def after() -> None:
        debugger.stop()
        debugger.step()

    run_program(program, lambda: debugger.start(model=program.model) if program.model is not None else debugger.start(), after)


def _blames(folder: Path) -> Iterator[dict[str, Any]]:
    steps = sorted(folder.glob("subject/step*"), key=lambda path: int(path.name.removeprefix("step")))
    for step in steps:
        for ours, theirs in zip(_ranks(step), _ranks(folder / "reference" / step.name), strict=False):
            yield from _flagged(ours, theirs, int(step.name.removeprefix("step")), folder / "result" / step.name / ours.name)


def _ranks(step: Path) -> list[Path]:
    return sorted(path.parent for path in step.glob("*/dump.json"))


def _flagged(subject: Path, reference: Path, step: int, into: Path) -> Iterator[dict[str, Any]]:
    from msprobe.pytorch.compare.pt_compare import pt_compare

    into.mkdir(parents=True, exist_ok=True)
    pt_compare({"npu_path": str(subject / "dump.json"), "bench_path": str(reference / "dump.json")}, str(into))
    parents = json.loads((subject / "construct.json").read_text())
    rank = int(subject.name.removeprefix("rank")) if subject.name.startswith("rank") else None
    for file in sorted(into.glob("*.csv")):
        with file.open(newline="", encoding="utf-8-sig") as text:
            for row in csv.DictReader(text):
                if row["Result"] in ("error", "warning"):
                    yield _blame(row["NPU Name"], step, rank, parents)


def _blame(row: str, step: int, rank: int | None, parents: dict[str, Any]) -> dict[str, Any]:
    place = {"step": step, "rank": rank, "headline": row}
    if found := _MODULE.match(row):
        return {"call": None, "module": found["path"], "phase": found["phase"], "kind": kinds_of(found["phase"]), **place}
    found = _CALL.match(row)
    if found is None:
        return {"call": row, **place}
    parent = _MODULE.match(str(parents.get(found[0]) or ""))
    if found["op"].endswith("_") and not found["op"].endswith("__") and parent is None:
        return {"call": None, "phase": "optimizer", "kind": kinds_of("optimizer"), **place}
    module = parent["path"] if parent else None
    return {"call": found["op"], "module": module, "phase": found["phase"], "kind": kinds_of(found["phase"]), **place}


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
