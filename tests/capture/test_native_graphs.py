# SPDX-License-Identifier: Apache-2.0
"""Test hooks on autograd's nodes, memory that waits to be read, and our lock, in programs that are hard on them: threads, errors, ends.

A test that can end or spoil its process runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.capture import tensor_cases
from tests.capture.recording import Recording, recording, slot_of, slots_of
from tests.capture.test_devices import LateSummaries, late
from ulpscope.capture.device.values import LOST
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.tensor_reader import TensorReader
from ulpscope.capture.torch_internals import graph_task
from ulpscope.errors import CaptureWarning

ROOT = Path(__file__).parents[2]
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
LEVELS = ("api", "module", "both", "op")

needs_compiled = pytest.mark.compiled("recorder")

__all__ = ["late"]  # a fixture


def in_a_process(code: str, *, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    """Run a program in a process and return its output; `recording` and torch are there."""
    head = (
        f"import gc, os, signal, sys, threading, torch\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.capture.recording import recording\n"
    )
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", head + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def train(model: nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


# ---- the user's hooks and ours


def test_users_hooks_run_in_their_order_with_their_values() -> None:
    def program(seen: list[Any]) -> torch.Tensor:
        x = torch.arange(3.0, requires_grad=True)
        y = x.sin()
        node = y.grad_fn
        assert node is not None
        node.register_prehook(lambda entered: seen.append(("before", entered[0].tolist())))
        node.register_hook(lambda left, entered: (left[0] * 2,))
        z = torch.cos(y)
        node.register_hook(lambda left, entered: seen.append(("after", left[0].tolist(), entered[0].tolist())))
        node.register_prehook(lambda entered: (entered[0] + 1,))
        z.sum().backward()
        assert x.grad is not None
        return x.grad

    bare: list[Any] = []
    expected = program(bare)
    with recording(keep="tensors") as found:
        seen: list[Any] = []
        assert torch.equal(program(seen), expected)
    assert seen == bare
    assert [entry[0] for entry in seen] == ["before", "after"]
    assert found.ledger == []
    taken = found.array(found.one("Tensor.sin", "backward"), "output.0")
    assert any(torch.equal(taken * factor, expected) for factor in (1, 2))  # before or after the hook that doubles


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_what_a_hook_of_the_users_raises_comes_out(error: type[BaseException]) -> None:
    def failing(*_: Any) -> None:
        raise error

    with recording() as found:
        x = torch.ones(3, requires_grad=True)
        y = x.sin()
        assert y.grad_fn is not None
        y.grad_fn.register_hook(failing)
        with pytest.raises(error):
            y.cos().sum().backward()
        (x * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert found.ledger == []
    assert found.one("Tensor.mul", "backward")


def _backward_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> tuple[Recording, torch.Tensor]:
    """Run a backward pass in which our hook raises an error when it reads the gradient, whose form no call had before."""
    gradient = torch.arange(6.0)[::2]
    called = []

    def failing(*_: Any) -> None:
        called.append(graph_task())
        raise error

    x = torch.ones(3, requires_grad=True)
    with recording(keep="statistics") as found:
        y = x.sin()
        with monkeypatch.context() as patch:
            patch.setattr(TensorReader, "_form", failing)
            try:
                y.backward(gradient)
            finally:
                assert called
                assert -1 not in called  # inside the pass
        (x * 2).sum().backward()
    return found, x


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_hook_of_ours_ends_training(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the user presses Ctrl-C in a backward pass, our hook may be running."""
    with pytest.raises(error):
        _backward_with(error(), monkeypatch)


def test_an_error_inside_a_hook_of_ours_is_noted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(CaptureWarning, match="could not record a backward call"):
        found, x = _backward_with(ValueError("broken"), monkeypatch)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).cos() * torch.arange(6.0)[::2] + 2)
    assert set(found.ledger) == {"record a backward call: ValueError: broken"}
    assert found.one("Tensor.mul", "backward")


# ---- graphs that live long, or die elsewhere


def found_forward(found: Recording) -> list[str]:
    return [str(record.call) for record in found.records if record.level != "state"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_that_outlives_its_capture(level: str) -> None:
    model, x = model_of(), torch.randn(3, 4)
    expected = [gradient.clone() for gradient in train(model, x)]
    model.zero_grad()
    with recording(level=level, keep="statistics") as found:
        loss = model(x).square().sum()
    del found
    gc.collect()
    loss.backward(retain_graph=True)
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]
    with recording(level=level, keep="statistics") as again:
        loss.backward()
    assert found_forward(again) == [] or level == "op"  # nothing of the earlier capture is recorded in this one
    assert loss.grad_fn is not None
    loss.grad_fn.next_functions[0][0].metadata["mark"] = mark = threading.Event()  # type: ignore[union-attr]
    freed = weakref.ref(mark)
    del loss, mark
    gc.collect()
    assert freed() is None


def test_graphs_are_freed_on_a_thread_of_the_engine_and_at_the_end_of_the_program() -> None:
    done = in_a_process(
        """
        keep = []
        with recording(keep="statistics", level="both") as found:
            x = torch.randn(8, 8, requires_grad=True)
            graphs = [torch.nn.functional.linear(x.sin(), x).tanh() for _ in range(50)]
            thread = threading.Thread(target=graphs.clear)
            thread.start(); thread.join()
            future = torch.jit.fork(torch.sin, x.cos().exp())  # given up on a thread of torch's own
            torch.jit.wait(future)
            del future
            x.sin().cos().sum().backward()
            keep.append(x.exp().tan())
            live = x.sin().requires_grad_()
        print(len(found.records) > 100, found.ledger)
        """
    )
    assert (done.returncode, done.stdout) == (0, "True []\n"), done.stderr


def test_a_program_that_ends_inside_a_capture() -> None:
    done = in_a_process(
        """
        session = recording(keep="statistics").__enter__()
        x = torch.randn(8, 8, requires_grad=True)
        graph = x.sin().cos()
        y = torch.nn.Linear(8, 8)(graph).sum()
        y.backward(retain_graph=True)
        print("end")
        """
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_fork_in_the_middle() -> None:
    """The child goes on by itself; it may not record, and it may not hang."""
    done = in_a_process(
        """
        import warnings; warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        with recording(keep="statistics") as found:
            x = torch.randn(4, requires_grad=True)
            y = x.sin()
            child = os.fork()
            y.cos().sum().backward()
            if child == 0:
                ok = bool(torch.isfinite(x.grad).all())
                del y
                gc.collect()
                os._exit(0 if ok else 3)
            _, status = os.waitpid(child, 0)
        print(status, len([1 for record in found.records if record.phase == "backward"]))
        """
    )
    assert (done.returncode, done.stdout) == (0, "0 3\n"), done.stderr


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("level", ["api", "module", "op"])
def test_nothing_gathers_over_many_steps(level: str, is_late: bool, request: pytest.FixtureRequest) -> None:
    """Neither Python's objects, nor nodes, nor storages."""
    if is_late:
        request.getfixturevalue("late")
    model, x = model_of(), torch.randn(3, 4)
    alive: list[Any] = []

    def step(found: Recording) -> None:
        given = x.clone().requires_grad_()
        loss = model(given).square()
        alive.append(weakref.ref(given))
        alive.append(weakref.ref(loss))
        loss.sum().backward()
        model(x)  # a graph that no pass goes through
        found.session.step()

    with recording(keep="statistics", level=level) as found:
        counts = []
        for number in range(60):
            step(found)
            if number in (20, 40, 59):
                gc.collect()
                counts.append(sum(1 for thing in gc.get_objects() if not str(type(thing).__module__).startswith("ulpscope.model")))
    assert [reference for reference in alive if reference() is not None] == []
    assert counts[2] - counts[1] <= counts[1] - counts[0] + 100
    per_step = len(found.records) / 60
    assert counts[2] - counts[0] <= 40 * per_step * 12  # what a run in memory keeps of each record


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell how much memory is in use")
@pytest.mark.parametrize("call", ["found.session.step()", "pass"], ids=["many steps", "one long step"])
def test_memory_is_given_back(call: str) -> None:
    """Each iteration takes more than four megabytes, and gives them back: also the memory of tensors whose values we remember."""
    done = in_a_process(
        f"""
        model, x = torch.nn.Linear(256, 256), torch.randn(512, 256)
        resident = []
        with recording(keep="fingerprint") as found:
            for _ in range(300):
                y = model(x).tanh()
                (y * y).sum().backward()
                {call}
                resident.append(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
        print(resident[-1] - resident[140] < 150, resident[140], resident[-1])
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True"), done.stdout


# ---- threads


@pytest.mark.parametrize("level", LEVELS)
def test_two_threads_train_under_one_capture(level: str) -> None:
    models, x = [model_of(number) for number in range(2)], torch.randn(6, 4)
    expected = [[gradient.clone() for gradient in train(model, x)] for model in models]
    trouble: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(15):
                found = train(models[number], x)
                assert all(torch.equal(gradient, wanted) for gradient, wanted in zip(found, expected[number], strict=True))
        except BaseException as error:
            trouble.append(error)

    with recording(keep="statistics", level=level) as found:
        train(models[0], x)  # on this one
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert trouble == []
    assert found.ledger == []
    forward = found.calls(
        "module.Linear" if level in ("module", "both") else "functional.linear" if level == "api" else "aten.addmm.default"
    )
    backward = [record for record in found.records if record.phase == "backward" and record.call in {call.call for call in forward}]
    assert len(forward) >= 2
    assert len(backward) == (len(forward) if level != "op" else 0)


def test_one_graph_is_gone_through_on_several_threads() -> None:
    x = torch.randn(5, 5, requires_grad=True)
    with recording(keep="statistics") as found:
        y = torch.nn.functional.linear(x.sin(), x)
        gradients: list[Any] = []
        threads = [
            threading.Thread(target=lambda: gradients.append(torch.autograd.grad(y.sum(), x, retain_graph=True)[0])) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(gradients) == 4
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    passes = found.calls("functional.linear", "backward")
    assert len(passes) == 4
    assert {tuple(slots_of(record)) for record in passes} == {("input.0", "output.0", "output.1")}
    assert len({slot_of(record, "output.0").fingerprint for record in passes}) == 1


# ---- what runs in the middle of our work


@needs_compiled  # NumPy's own state does not survive it where NumPy reads tensors
def test_a_module_that_is_called_while_the_garbage_is_collected() -> None:
    """Code that Python calls in the middle of our work may not spoil it."""
    wide = nn.Linear(3, 3)
    z = torch.randn(40, 3)
    is_inside = False

    def collected(phase: str, info: Any) -> None:
        nonlocal is_inside
        if phase == "start" and not is_inside:
            is_inside = True
            wide(z).unbind()
            is_inside = False

    model, x = model_of(), torch.randn(2, 3, 4)
    with recording(keep="statistics", level="module") as alone:
        train(model, x)
    thresholds = gc.get_threshold()
    with recording(keep="statistics", level="module") as found:
        gc.callbacks.append(collected)
        gc.set_threshold(1, 1000, 1000)
        try:
            train(model, x)
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(collected)
    expected = [slots_of(record) for record in alone.calls("module.Linear", "backward")]
    assert [slots_of(record) for record in found.calls("module.Linear", "backward")] == expected
    assert found.ledger == []


# ---- memory that waits


def test_waiting_memory_is_not_the_tensor(late: list[LateSummaries]) -> None:
    """A gradient is given to its parameter without a copy, and tensors may be swapped, shared and resized meanwhile."""
    weight = nn.Parameter(torch.randn(4, 4))
    with recording(keep="statistics") as found:
        x = torch.randn(4, 4)
        address = x.data_ptr()
        y = x.exp()
        other = torch.randn(4, 4)
        torch.utils.swap_tensors(x, other)
        assert other.data_ptr() == address
        other.data = torch.zeros(2)
        x.share_memory_()
        before = x.tan()
        del other, x
        (weight * y).sum().backward()
    slot = slot_of(found.one("Tensor.exp"), "input.0")
    assert slot.note == ""
    assert slot.summary is not None
    assert slot_of(found.one("Tensor.exp"), "output.0").fingerprint == tensor_cases.expected(y)[1]
    assert slot_of(found.one("Tensor.tan"), "output.0").fingerprint == tensor_cases.expected(before)[1]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.filterwarnings("ignore:ulpscope could not record the inputs of Tensor.cos")
def test_memory_that_torch_forbids_to_ask_for(is_late: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Results of an earlier replay of a CUDA graph: torch raises if asked for their memory, at once or while they wait."""
    source = tmp_path / "stale.cpp"
    source.write_text(
        "#include <c10/core/StorageImpl.h>\n"
        'extern "C" void forbid(void* storage) {\n'
        '  static_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string("stale"));\n}\n'
    )
    home = Path(torch.__file__).parent
    options = [
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{home / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    subprocess.run([str(COMPILER), *options, str(source), "-o", str(tmp_path / "stale.so")], check=True)
    forbid = ctypes.CDLL(str(tmp_path / "stale.so")).forbid
    forbid.argtypes = [ctypes.c_void_p]
    if is_late:
        request.getfixturevalue("late")
    with recording(keep="statistics") as found:
        for _ in range(3):
            x = torch.ones(3)
            if is_late:
                x.sin()
            forbid(x.untyped_storage()._cdata)
            with pytest.raises(RuntimeError, match="stale"):
                x.cos()
        y = torch.ones(3).exp()
    assert [text for text in found.ledger if text != "record the inputs of Tensor.cos: RuntimeError: stale"] == []
    assert slot_of(found.one("Tensor.exp"), "output.0").fingerprint == tensor_cases.expected(y)[1]
    assert {slot_of(record, "input.0").note for record in found.calls("Tensor.sin")} == ({LOST} if is_late else set())


# ---- the lock


@needs_compiled
def test_the_lock_is_taken_again_by_its_owner_and_by_nobody_else() -> None:
    lock = COMPILED.Lock()
    inside, trace, entered = [0], [], threading.Event()

    def work() -> None:
        for _ in range(2000):
            with lock, lock:
                inside[0] += 1
                trace.append(inside[0])
                sum(range(20))
                inside[0] -= 1

    with lock:
        other = threading.Thread(target=lambda: (lock.__enter__(), entered.set(), lock.__exit__()))
        other.start()
        with contextlib.suppress(ZeroDivisionError), lock:
            1 / 0  # noqa: B018
        assert not entered.wait(0.05)
    assert entered.wait(10)
    other.join()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert set(trace) == {1}
    assert len(trace) == 4000


@needs_compiled
def test_who_waits_for_the_lock_can_be_interrupted() -> None:
    done = in_a_process(
        """
        from ulpscope.capture.native.compiled import COMPILED
        lock = COMPILED.Lock()
        held, over = threading.Event(), threading.Event()
        def hold():
            with lock:
                held.set()
                over.wait(30)
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            with lock:
                print("taken")
        except KeyboardInterrupt:
            print("interrupted")
        over.set()
        thread.join()
        with lock:
            print("free")
        """
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\nfree\n"), done.stderr
