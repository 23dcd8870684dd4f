# SPDX-License-Identifier: Apache-2.0
"""After a capture every object is the very one it was, memory is flat, and a disk that fails stops nothing."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

import ulpscope
from tests.harmless import programs

LEVELS = ("api", "module", "both", "op")


def homes() -> list[Any]:
    """Return every namespace in which something could have been replaced."""
    found = [module for name, module in sys.modules.items() if name == "torch" or name.startswith("torch.")]
    found += [torch.Tensor, torch._C.TensorBase, torch.autograd.Function, torch.nn.Module, torch.nn.Parameter, torch.Generator]
    found += [torch.optim.Optimizer, torch.optim.AdamW, torch.optim.SGD, torch.amp.GradScaler, torch.utils.data.DataLoader]
    return found


def snapshot() -> dict[tuple[int, str], Any]:
    taken = {(id(home), name): value for home in homes() for name, value in list(vars(home).items())}
    taken |= {(id(value), "__code__"): value.__code__ for value in list(taken.values()) if type(value) is FunctionType}
    taken[0, "excepthook"] = sys.excepthook
    taken[0, "threading.excepthook"] = threading.excepthook
    taken[0, "trace"] = sys.gettrace()
    taken[0, "profile"] = sys.getprofile()
    return taken


def states() -> list[Any]:
    """Return the registries that hold hooks, by their contents; and the depths of torch's stacks of modes."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    hooks = [value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)]
    hooks += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    modes = [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()]
    switches = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()]
    return [[list(registry) for registry in hooks], modes, switches, torch.is_anomaly_enabled(), torch.get_num_threads()]


def contents(model: torch.nn.Module) -> Any:
    """Return the attributes of every module, with the keys of its dictionaries of hooks, parameters and buffers."""
    return {
        name: {key: list(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def train(capture: Any, steps: int = 2, *, model: Any = None) -> Any:
    torch.manual_seed(0)
    model = model or programs.Gpt()
    tokens = torch.randint(0, 23, (2, 12))
    optimizer = programs.adam(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = programs.F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        capture.step()
    return loss.detach()


WATCHES: list[dict[str, Any]] = [{"watch": "nonfinite"}, {"watch": "nonfinite", "level": "module"}]


@pytest.mark.parametrize("options", [*({"level": level} for level in LEVELS), *WATCHES], ids=str)
@pytest.mark.parametrize("ending", ["end", "exception"])
def test_everything_is_the_very_object_it_was(options: dict[str, Any], ending: str, tmp_path: Path) -> None:
    with ulpscope.Capture(tmp_path / "first", **options) as capture:  # whatever torch imports lazily is imported now
        train(capture)
    model = programs.Gpt()
    before, states_before = snapshot(), states()
    own = {
        name: {key: list(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
    try:
        with ulpscope.Capture(tmp_path / "second", model, **options) as capture:
            train(capture, model=model)
            if ending == "exception":
                raise programs.Oops("in the middle")
    except programs.Oops:
        pass
    after = snapshot()
    assert {key for key in before if before[key] is not after.get(key)} == set()
    assert {name for _, name in after.keys() - before.keys()} == set()
    assert states() == states_before
    assert contents(model) == own
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_start_and_stop_any_number_of_times(tmp_path: Path) -> None:
    before, states_before = snapshot(), states()
    capture = ulpscope.Capture(tmp_path / "run")
    capture.stop()
    capture.start()
    capture.start()
    train(capture, 1)
    capture.stop()
    capture.stop()
    capture.step()
    after = snapshot()
    assert {key for key in before if before[key] is not after.get(key)} == set()
    assert states() == states_before


def test_two_captures_at_once(tmp_path: Path) -> None:
    """The second is refused or records too; training is unchanged, and both leave everything as they found it."""
    without = train(programs.Nothing())
    before, states_before = snapshot(), states()
    with ulpscope.Capture(tmp_path / "outer", level="api"):
        try:
            with ulpscope.Capture(tmp_path / "inner", level="op") as inner:
                loss = train(inner)
        except ulpscope.UlpscopeError:
            loss = train(programs.Nothing())
    assert torch.equal(loss, without)
    after = snapshot()
    assert {key for key in before if before[key] is not after.get(key)} == set()
    assert states() == states_before


def test_captures_that_end_in_the_wrong_order(tmp_path: Path) -> None:
    before, states_before = snapshot(), states()
    first, second = ulpscope.Capture(tmp_path / "first"), ulpscope.Capture(tmp_path / "second")
    first.start()
    try:
        second.start()
    except ulpscope.UlpscopeError:
        first.stop()
        return
    first.stop()
    train(second)
    second.stop()
    after = snapshot()
    assert {key for key in before if before[key] is not after.get(key)} == set()
    assert states() == states_before


def test_a_capture_left_open_does_not_stop_the_interpreter(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch, ulpscope
from tests.harmless import programs
capture = ulpscope.Capture({str(tmp_path / "run")!r})
capture.start()
model = programs.Mlp()
model(torch.ones(2, 8)).sum().backward()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Traceback" not in done.stderr
    run = ulpscope.open_run(tmp_path / "run")
    assert any(record.call.short == "linear" for record in run.records(0, 0))


@pytest.mark.parametrize(
    "options", [{"level": "api", "keep": "tensors"}, {"level": "op", "keep": "tensors"}, {"watch": "nonfinite"}], ids=str
)
def test_fifty_steps_leave_memory_flat(options: dict[str, Any], tmp_path: Path) -> None:
    model, x = programs.Mlp(), torch.randn(64, 8)
    optimizer = programs.adam(model)

    def steps(capture: Any, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            capture.step()

    def tensors_alive() -> int:
        gc.collect()
        return sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor)

    with ulpscope.Capture(tmp_path / "run", model, **options) as capture:
        steps(capture, 15)
        tracemalloc.start()
        try:
            steps(capture, 5)
            gc.collect()
            tensors, (python, _), whole = tensors_alive(), tracemalloc.get_traced_memory(), _resident_bytes()
            steps(capture, 30)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - python
        finally:
            tracemalloc.stop()
        assert tensors_alive() <= tensors
        assert grown < 30 * 4_000, f"{grown} bytes more after 30 steps"
        assert _resident_bytes() - whole < 24_000_000


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def test_step_directories_that_vanish_stop_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = train(programs.Nothing(), 4)

    class Vanishing:
        def __init__(self, capture: Any) -> None:
            self.capture, self.steps = capture, 0

        def step(self) -> None:
            self.capture.step()
            self.steps += 1
            if self.steps == 2:
                shutil.rmtree(tmp_path / "run")

    with pytest.warns(ulpscope.CaptureWarning) as warned, ulpscope.Capture(tmp_path / "run", keep="tensors") as capture:
        loss = train(Vanishing(capture), 4)
    assert torch.equal(loss, without)
    assert len(warned) == 1


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    without = train(programs.Nothing())
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(ulpscope.CaptureWarning, match="Training goes on"), ulpscope.Capture(tmp_path / "file" / "run") as capture:
        loss = train(capture)
    assert torch.equal(loss, without)


FULL_DISK = """
import json, resource, signal, sys, warnings
sys.path.insert(0, sys.argv[2])
import torch, ulpscope
from tests.harmless import programs
from tests.harmless.test_restored import train
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
without = train(programs.Nothing(), 4)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    with ulpscope.Capture(sys.argv[1], keep="tensors") as capture:
        class Filling:
            steps = 0
            def step(self):
                capture.step()
                Filling.steps += 1
                if Filling.steps == 2:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        loss = train(Filling(), 4)
print(json.dumps([torch.equal(loss, without), sum(w.category is ulpscope.CaptureWarning for w in warned)]))
"""


def test_a_disk_that_fills_up_stops_nothing(tmp_path: Path) -> None:
    """Every file is limited to 4 kB after the second step: a writer meets the same error on a full disk."""
    path = tmp_path / "run"
    code = [sys.executable, "-c", FULL_DISK, str(path), str(Path(__file__).parents[2])]
    done = subprocess.run(code, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, 1], done.stderr
    run = ulpscope.open_run(path)
    kept = [run.tensor(0, step, slot.content) for step in (0, 1) for r in run.records(0, step) for slot in r.slots if slot.content]
    assert len(kept) > 100
    assert run.is_complete(0, 0)
    assert run.is_complete(0, 1)
    assert run.ledger(0)


def test_importing_ulpscope_imports_no_torch() -> None:
    code = "import sys, ulpscope, ulpscope.testing, ulpscope.testing.demo; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
