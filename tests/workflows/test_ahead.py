# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue

import pytest

from ulpscope.workflows.compare import ahead as module
from ulpscope.workflows.compare.ahead import Ahead, Task


@pytest.mark.parametrize("num_cores", [1, 2, 5])
def test_every_piece_is_done_once(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: num_cores)
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        return number * number

    with Ahead() as ahead:
        tasks = [ahead.submit(work, number) for number in range(200)]
        assert [task.result() for task in tasks] == [number * number for number in range(200)]
    assert sorted(done) == list(range(200))


def test_others_work_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: 2)
    begun = threading.Event()
    with Ahead() as ahead:
        task = ahead.submit(lambda: (begun.set(), threading.get_ident())[1])
        assert begun.wait(30)
        assert task.result() != threading.get_ident()


def test_what_nobody_began_is_done_by_who_asks() -> None:
    assert Task(SimpleQueue(), threading.get_ident).result() == threading.get_ident()


def test_who_waits_does_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: 2)
    begun, gate = threading.Event(), threading.Event()
    with Ahead() as ahead:
        slow = ahead.submit(lambda: (begun.set(), gate.wait(30)))
        assert begun.wait(30)
        following = ahead.submit(lambda: (gate.set(), threading.get_ident())[1])
        slow.result()
        assert following.result() == threading.get_ident()


@pytest.mark.parametrize("num_cores", [1, 2])
def test_failures_reach_who_asks(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: num_cores)
    with Ahead() as ahead:
        good, bad = ahead.submit(int, "3"), ahead.submit(int, "three")
        assert good.result() == 3
        with pytest.raises(ValueError, match="three"):
            bad.result()


def test_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: 3)
    before = threading.active_count()
    done: list[int] = []
    gate = threading.Event()
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    with Ahead() as ahead:
        for number in range(50):
            ahead.submit(lambda number=number: (gate.wait(30), done.append(number)))
    timer.join()
    assert len(done) <= 2
    assert threading.active_count() <= before


class Counted:
    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.stopped = threading.Event()

    def work(self) -> None:
        self.workers.add(threading.get_ident())
        assert self.stopped.wait(30)

    def stop(self) -> None:
        self.stopped.set()


def test_shared_work_has_every_thread_and_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: 3)
    shared = Counted()
    with Ahead() as ahead:
        ahead.share(shared)
        while len(shared.workers) < 2:
            shared.stopped.wait(0.001)
    assert shared.stopped.is_set()
    assert threading.get_ident() not in shared.workers


def test_shared_work_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: 1)
    with Ahead() as ahead:
        shared = Counted()
        alive = weakref.ref(shared)
        ahead.share(shared)
        del shared
        assert alive() is None
