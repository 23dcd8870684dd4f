# SPDX-License-Identifier: Apache-2.0
"""Run many scripts, each in a process of its own, forked once torch is imported: that import costs more than the scripts do.

    python -m tests.legacy.forking jobs.json

A job is a folder with script.py, its arguments and environment. What it prints goes to output.txt there, its exit code to code.txt.
Jobs of one group run at the same time.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

_PRELOADED = (
    "torch.distributed.tensor",
    "sympy",
    "ulpscope.compat.ptdbg.compare.compare_ptdbg",
    "ulpscope.compat.ptdbg.dump.debugger",
    "ulpscope.testing.npu",
)


@dataclass(frozen=True)
class Job:
    folder: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True)
class Outcome:
    folder: Path
    code: int
    output: str

    def succeeded(self) -> Path:
        assert self.code == 0, self.output
        return self.folder

    def failed(self) -> str:
        assert self.code == 1, self.output
        return self.output.rstrip()


def run_all(jobs: Sequence[Job], scratch: Path) -> list[Outcome]:
    """Run the jobs, and return how each ended; the cards of a group share a folder, and their files have their number."""
    (scratch / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    command = [sys.executable, "-m", "tests.legacy.forking", str(scratch / "jobs.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(part or "." for part in sys.path)}
    subprocess.run(command, check=True, timeout=600, env=environment)
    return [_outcome(job) for job in jobs]


def _outcome(job: Job) -> Outcome:
    folder, number = Path(job.folder), "".join(job.arguments)
    return Outcome(folder, int((folder / f"code{number}.txt").read_text()), (folder / f"output{number}.txt").read_text())


def _start(job: Job) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    number = "".join(job.arguments)
    try:
        os.chdir(job.folder)
        output = os.open(f"output{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(job.environment)
        sys.argv = ["script.py", *job.arguments]
        sys.path.insert(0, job.folder)
        runpy.run_path("script.py", run_name="__main__")
        code = 0
    except SystemExit as error:
        code = 0 if error.code in (None, 0) else 1
    except BaseException:
        sys.stdout.flush()
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        Path(f"code{number}.txt").write_text(str(code))
        os._exit(code)


def main(file: str) -> None:
    for module in _PRELOADED:
        importlib.import_module(module)
    jobs = [Job(**job) for job in json.loads(Path(file).read_text())]
    for _, group in itertools.groupby(jobs, key=lambda job: job.group or job.folder):
        for process in [_start(job) for job in group]:
            os.waitpid(process, 0)


if __name__ == "__main__":
    main(sys.argv[1])
