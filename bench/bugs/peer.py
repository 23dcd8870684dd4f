# SPDX-License-Identifier: Apache-2.0
"""Run the same cases through mindstudio-probe: its debugger records both sides, and the first row that its comparison flags is its answer.

Half of this file runs in the peer's own environment, where ulpscope is not installed: `python -m bench.bugs.peer FOLDER KEEPS CASE...`
leaves an `answer.json` in a folder for each case and passes over those that have one, so that a run that was stopped goes on. Importing the
peer takes longer than most cases, so one process imports it and forks: once for each case, which has a time limit, and there once for each
side and rank, since its debugger exists once for each process. It records with level `mix` and risk level ALL, its most complete
setting, and compares every step in turn, as its comparison takes one at a time. Recordings are deleted as soon as a case is answered.

What counts in its favour: rows flagged `warning` count as `error` does; only the name of an operation has to be right, not its namespace;
slots are not looked at; an in-place operation outside of modules stands for the whole optimizer; a module stands for the calls in it.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from bench.bugs.case import Case, Side, all_cases, build
from bench.bugs.recording import SIDES, run_program
from bench.bugs.scoring import Blame, kinds_of

__all__ = ["ask_peer"]

Answers: TypeAlias = dict[str, list[Blame] | str]
_SECONDS = 300
_ANSWER = "answer.json"
_LONGEST = 4000
_TASKS = {"statistics": "statistics", "tensors": "tensor"}
_MODULE = re.compile(r"Module\.(?P<path>.+)\.[^.]+\.(?P<phase>forward|backward)\.\d+")
_CALL = re.compile(r"(?P<space>[^.]+)\.(?P<op>.+)\.(?P<index>\d+)\.(?P<phase>forward|backward)")


def ask_peer(cases: Sequence[Case], python: str, folder: Path, keeps: Sequence[str], jobs: int = 1) -> dict[str, Answers]:
    """Ask the peer what it blames first in every case, for each of `keeps` (an empty list for nothing), or why it has no answer."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MSPROBE_LOG_LEVEL": "4", "PYTHONPATH": str(Path.cwd())}
    shares = [share for at in range(jobs) if (share := [case.name for case in cases[at::jobs]])]
    commands = [[python, "-m", "bench.bugs.peer", str(folder), ",".join(keeps), *share] for share in shares]
    workers = [subprocess.Popen(one, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for one in commands]
    try:
        problems = [worker.communicate()[1].strip()[-1500:] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if failed := [problem for worker, problem in zip(workers, problems, strict=True) if worker.returncode]:
        raise RuntimeError(f"the peer failed: {failed[0]}")
    return {case.name: _read_answers(_folder_of(folder, case), keeps) for case in cases}


def _folder_of(folder: Path, case: Case) -> Path:
    """Return the folder of a case; the peer refuses paths with an @ in them."""
    return folder / case.name.replace("@", ".on.")


def _read_answers(folder: Path, keeps: Sequence[str]) -> Answers:
    found = json.loads((folder / _ANSWER).read_text())
    return {keep: [Blame(**one) for one in found[keep]] if keep in found else str(found["problem"]) for keep in keeps}


# ---- in the peer's environment ---------------------------------------------------------------------------------------------------------


def _main(folder: Path, keeps: Sequence[str], names: Sequence[str]) -> None:
    cases = {case.name: case for case in all_cases()}
    open_cases = [cases[name] for name in names if not _is_answered(_folder_of(folder, cases[name]), keeps)]
    csv.field_size_limit(1 << 30)
    for at, case in enumerate(open_cases):
        import msprobe.pytorch.compare.pt_compare  # noqa: F401

        into = _folder_of(folder, case)
        into.mkdir(parents=True, exist_ok=True)
        problem = _fork_and_wait(lambda case=case, into=into: _answer(case, into, keeps), _SECONDS)
        if problem:
            (into / _ANSWER).write_text(json.dumps(_answers_so_far(into) | {"problem": problem}))
        for keep in keeps:
            shutil.rmtree(into / keep, ignore_errors=True)
        print(f"{at + 1}/{len(open_cases)} {case.name}", flush=True)


def _is_answered(folder: Path, keeps: Sequence[str]) -> bool:
    return set(keeps) <= _answers_so_far(folder).keys()


def _answers_so_far(folder: Path) -> dict[str, Any]:
    file = folder / _ANSWER
    found = json.loads(file.read_text()) if file.is_file() else {}
    return {keep: blames for keep, blames in found.items() if keep != "problem"}


def _answer(case: Case, folder: Path, keeps: Sequence[str]) -> None:
    for keep in keeps:
        answers = _answers_so_far(folder)
        if keep not in answers:
            for side in SIDES:
                _record_in_processes(case, side, folder / keep / side, keep)
            (folder / _ANSWER).write_text(json.dumps(answers | {keep: list(_blames(folder / keep))[:1]}))


def _fork_and_wait(work: Callable[[], None], seconds: float) -> str:
    """Do the work in a process and group of its own; return why it failed, empty where it did not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _work_and_exit(work, write)
    os.close(write)
    is_over = bool(select.select([read], [], [], seconds)[0])
    if not is_over:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    problem = os.read(read, _LONGEST).decode(errors="replace") if is_over else f"not finished after {seconds:g} s"
    os.close(read)
    status = os.waitpid(child, 0)[1]
    return problem or (f"ended with status {status}" if status else "")


def _work_and_exit(work: Callable[[], None], write: int) -> None:
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        os.write(write, f"{type(error).__name__}: {error}"[: _LONGEST // 4].encode())
    finally:
        os._exit(status)


def _record_in_processes(case: Case, side: Side, into: Path, keep: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read, write = os.pipe()
    children = []
    for rank in range(case.ranks):
        child = os.fork()
        if child == 0:
            _work_and_exit(lambda rank=rank: _record_as_rank(case, side, into, keep, rank, port), write)
        children.append(child)
    os.close(write)
    failed = any([os.waitpid(child, 0)[1] for child in children])
    problem = os.read(read, _LONGEST).decode(errors="replace")
    os.close(read)
    if failed:
        raise RuntimeError(f"recording the {side} failed: {problem or 'its process was killed'}")


def _record_as_rank(case: Case, side: Side, into: Path, keep: str, rank: int, port: int) -> None:
    if case.ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(case.ranks), RANK=str(rank))
        torch.distributed.init_process_group("gloo")
    _record(case, side, into, keep, rank)


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
    _main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
