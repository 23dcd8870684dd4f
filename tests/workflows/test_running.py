# SPDX-License-Identifier: Apache-2.0
"""`ulpscope run` on real scripts in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ulpscope.store import open_run

SCRIPT = """
import sys, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
print(sys.argv[1:], __name__, __file__)
"""


def _ulpscope(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ulpscope", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_an_unmodified_script_is_recorded_and_prints_what_it_prints(folder: Path) -> None:
    bare = subprocess.run([sys.executable, "train.py", "--x", "1"], cwd=folder, capture_output=True, text=True, check=True)
    done = _ulpscope("run", "--into", "runs/a", "train.py", "--x", "1", cwd=folder)

    assert done.returncode == 0, done.stderr
    assert done.stdout == bare.stdout
    assert "['--x', '1'] __main__" in done.stdout
    run = open_run(folder / "runs/a")
    assert run.steps(0) == (0, 1)
    modules = {record.module for record in run.records(0, 0) if record.call.op == "functional.linear"}
    assert modules == {"0", "2"}
    assert run.info.command[0].endswith("train.py")


def test_a_folder_that_holds_a_run_is_left_alone(folder: Path) -> None:
    _ulpscope("run", "--into", "runs/a", "train.py", cwd=folder)
    before = sorted((file, file.stat().st_mtime_ns) for file in (folder / "runs/a").rglob("*"))
    done = _ulpscope("run", "--into", "runs/a", "train.py", cwd=folder)

    assert "already holds a run; this one goes to 'runs/a-2'" in done.stderr
    assert sorted((file, file.stat().st_mtime_ns) for file in (folder / "runs/a").rglob("*")) == before
    assert open_run(folder / "runs/a-2").steps(0) == (0, 1)


def test_a_module_is_run_by_name(folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(SCRIPT)
    done = _ulpscope("run", "--into", "run", "-m", "package.train", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "__main__" in done.stdout
    assert open_run(folder / "run").steps(0) == (0, 1)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('enough')", 1, "enough"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
    ],
)
def test_the_exit_code_is_the_script_s_own(folder: Path, ending: str, code: int, said: str) -> None:
    (folder / "train.py").write_text(SCRIPT + ending)
    done = _ulpscope("run", "--into", "run", "train.py", cwd=folder)
    assert done.returncode == code
    assert said in done.stderr
    assert "ulpscope/workflows" not in done.stderr, "our frames do not stand in the user's traceback"
    assert open_run(folder / "run").steps(0)[:2] == (0, 1)


def test_seed_and_deterministic_make_two_runs_equal(folder: Path) -> None:
    draws = "import random, numpy; print(random.random(), numpy.random.rand())"
    (folder / "train.py").write_text(SCRIPT.replace("torch.manual_seed(0)", draws))
    first, second, other = (
        _ulpscope("run", "--into", f"run{number}", "--seed", seed, "--deterministic", "train.py", cwd=folder)
        for number, seed in enumerate(("7", "7", "8"))
    )
    assert first.stdout == second.stdout
    assert first.stdout != other.stdout


def test_a_script_that_is_not_there_is_one_sentence(folder: Path) -> None:
    done = _ulpscope("run", "--into", "run", "nowhere.py", cwd=folder)
    assert done.returncode == 2
    assert "the script 'nowhere.py' cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "run").exists()


def test_a_script_without_torch_calls_says_so(folder: Path) -> None:
    (folder / "quiet.py").write_text("print('hello')")
    done = _ulpscope("run", "--into", "run", "quiet.py", cwd=folder)
    assert done.returncode == 0
    assert "nothing was recorded" in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_the_script_starts(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    done = _ulpscope("run", "--into", "file/run", "train.py", cwd=folder)
    assert done.returncode == 2
    assert "nothing can be recorded into 'file/run'" in done.stderr
    assert "__main__" not in done.stdout


DISTRIBUTED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((2,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""


def test_under_torchrun_each_rank_writes_its_own_folder_of_one_run(folder: Path) -> None:
    (folder / "ranks.py").write_text(DISTRIBUTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ulpscope"]
    for expected in ("run", "run-2"):
        done = subprocess.run(
            [*command, "run", "--into", "run", "--keep", "tensors", "ranks.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"recorded into '{expected}'") == 1
        run = open_run(folder / expected)
        assert run.ranks() == (0, 1)
        assert run.info.world_size == 2
        for rank in (0, 1):
            (record,) = [record for record in run.records(rank, 0) if record.call.op == "distributed.all_reduce"]
            values = {str(slot.slot): slot.summary.max for slot in record.slots if slot.summary is not None}
            assert values == {"input.0": rank + 1.0, "mutated.0": 3.0}
    assert not (folder / "run-3").exists()


MAIN = """
import atexit, pickle, sys, threading, time, torch
print(sorted(globals()), type(__builtins__).__name__, __cached__, __annotations__, __loader__.get_filename() == __file__, __file__)
class Model(torch.nn.Linear):
    pass
model = Model(2, 2)
model(torch.ones(1, 2))
def keep(when):
    print(when, type(pickle.loads(pickle.dumps(model))) is Model)
def later():
    time.sleep(1.5)
    keep("in a thread")
atexit.register(keep, "at the end")
threading.Thread(target=later).start()
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_finds_in_main_what_python_puts_there_and_keeps_it_to_the_end(folder: Path, is_module: bool) -> None:
    (folder / "linked").mkdir()
    (folder / "kept.py").write_text(MAIN)
    (folder / "linked" / "other.py").symlink_to(folder / "kept.py")
    target = ["-m", "kept"] if is_module else ["linked/other.py"]
    bare = subprocess.run([sys.executable, *target], cwd=folder, capture_output=True, text=True, check=True)
    done = _ulpscope("run", "--into", "runs/a", *target, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bare.stdout
    assert "at the end True" in done.stdout
    assert "in a thread True" in done.stdout


HOOKED = """
import sys
def tell(kind, error, frames):
    print("told of", kind.__name__, error, frames.tb_frame.f_code.co_name, frames.tb_next.tb_frame.f_code.co_name)
    if len(sys.argv) > 1:
        raise RuntimeError("in the hook")
sys.excepthook = tell
def fail():
    raise ValueError("of the script")
fail()
"""


@pytest.mark.parametrize("arguments", [[], ["break"]])
def test_the_hook_of_the_script_is_told_of_the_error_that_ends_it(folder: Path, arguments: list[str]) -> None:
    (folder / "hooked.py").write_text(HOOKED)
    bare = subprocess.run([sys.executable, "hooked.py", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    done = _ulpscope("run", "--into", "runs/a", "hooked.py", *arguments, cwd=folder)
    assert done.returncode == bare.returncode == 1
    assert done.stdout == bare.stdout
    assert "told of ValueError of the script <module> fail" in done.stdout
    for line in bare.stderr.splitlines():
        assert line in done.stderr


def test_a_package_that_cannot_be_run_is_told_as_python_tells_it(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").write_text("")
    done = _ulpscope("run", "--into", "runs/a", "-m", "parts", cwd=folder)
    assert done.returncode == 1
    assert "No module named parts.__main__; 'parts' is a package and cannot be directly executed" in done.stderr
    assert "Traceback" not in done.stderr
