# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ulpscope.numerics.summary.lent_threads import lend_threads, shared_threads
from ulpscope.numerics.summary.summary_kernel import summarizing_with

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Runner:
    """Runs jobs as an OpenMP runtime does, with threads of Python."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.function = PARALLEL(self.run)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def run(self, work: int, argument: int, many: int, flags: int) -> None:
        assert flags == 0
        self.calls.append(many)
        threads = [threading.Thread(target=WORK(work), args=(argument,)) for _ in range(many)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def runner() -> Iterator[Runner]:
    yield Runner()
    lend_threads(None)


@pytest.mark.compiled("kernel")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "bool"])
@pytest.mark.parametrize("size_bytes", [1 << 20, (1 << 20) + 8, 20_000_000, 40 << 20])
def test_any_number_of_threads_gives_the_same_bits(library: ctypes.CDLL, runner: Runner, dtype: str, size_bytes: int) -> None:
    rng = np.random.default_rng(size_bytes)
    raw = rng.standard_normal(size_bytes // 8).view(np.uint8)
    summarize = summarizing_with(library)
    alone = summarize(dtype, raw.ctypes.data, raw.size)
    for threads in (2, 5):
        lend_threads(runner.address, lambda many=threads: many)
        assert summarize(dtype, raw.ctypes.data, raw.size) == alone
    assert set(runner.calls) == {2, 5}


@pytest.mark.compiled("kernel")
def test_small_tensors_wake_nobody(library: ctypes.CDLL, runner: Runner) -> None:
    lend_threads(runner.address, lambda: 4)
    raw = np.zeros(1000, np.uint8)
    summarizing_with(library)("float32", raw.ctypes.data, raw.size)
    assert runner.calls == []


def test_threads_are_lent_to_the_thread_that_asked(runner: Runner) -> None:
    lend_threads(runner.address, lambda: 4)
    assert shared_threads() == (runner.address, 4)
    elsewhere: list[tuple[int | None, int]] = []
    thread = threading.Thread(target=lambda: elsewhere.append(shared_threads()))
    thread.start()
    thread.join()
    assert elsewhere == [(None, 0)]
    lend_threads(None)
    assert shared_threads() == (None, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_threads(runner: Runner) -> None:
    lend_threads(runner.address, lambda: 4)
    child = os.fork()
    if child == 0:
        os._exit(0 if shared_threads() == (None, 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_torch_lends_its_own_threads() -> None:
    torch = pytest.importorskip("torch")
    from ulpscope.capture.intercept.openmp import _parallel_function, lend_torch_threads

    lend_torch_threads()
    try:
        expected = (None, 0) if _parallel_function() is None else (_parallel_function(), torch.get_num_threads())
        assert shared_threads() == expected
    finally:
        lend_threads(None)
