# SPDX-License-Identifier: Apache-2.0
"""Run processes that check calls, and report the call that one of them did not survive.

A thread here hands each process its calls, one in advance, so that it never waits for the next. A call that takes too long is ended
together with its process, and the next call gets a new one. This process reads nothing of the calls, so it needs no torch and no device.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

from ulpscope.errors import InputError
from ulpscope.model import OperandFormat
from ulpscope.model.check.checks import CheckedCall, CheckRole
from ulpscope.workflows.check.messages import read_frame, write_frame
from ulpscope.workflows.check.worker import Answer, Order, Setup

__all__ = ["Processes"]

Place = tuple[int, int, int]
_STARTING_S = 300.0
_AHEAD = 2
_LOOKING_S = 0.1
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads of a large call that wait for each other leave their core to whoever needs it: on a busy machine five times as fast."""


class Processes:
    """At most `jobs` processes at a time, started when there is work, and dealt out over the setups: one for each device."""

    def __init__(self, setups: Sequence[Setup], *, jobs: int, timeout_s: float) -> None:
        many = max(jobs, len(setups))
        num_threads = 1 if many > 1 else _num_cores()
        self._timeout_s = timeout_s
        self._members = [_Process(replace(setups[at % len(setups)], num_threads=num_threads)) for at in range(many)]
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._is_closed = False

    def check(
        self,
        tasks: Sequence[tuple[Place, CheckedCall]],
        operands: Callable[[Place], dict[CheckRole, OperandFormat]],
        done: Callable[[CheckedCall], None],
    ) -> None:
        waiting = deque(tasks)
        threads = [
            threading.Thread(target=self._work, args=(member, waiting, operands, done), daemon=True, name="ulpscope-check")
            for member in self._members[: len(tasks)]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
        if self._errors:
            raise self._errors[0]

    def recognise(self, role: CheckRole, members: Sequence[Place]) -> OperandFormat | None:
        member = self._members[0]
        try:
            member.tell(Order(role=role, members=tuple(members)))
            return member.answer(self._timeout_s * max(1, len(members))).operands
        except _Lost:
            return None

    def close(self) -> None:
        """End all processes; the calls that they were running are not reported."""
        self._is_closed = True
        for member in self._members:
            member.end()

    def _work(
        self,
        member: _Process,
        waiting: deque[tuple[Place, CheckedCall]],
        operands: Callable[[Place], dict[CheckRole, OperandFormat]],
        done: Callable[[CheckedCall], None],
    ) -> None:
        given: deque[tuple[Place, CheckedCall]] = deque()
        try:
            while not self._errors and self._has_more(member, waiting, given, operands):
                found, is_over = self._checked(member, *given.popleft())
                if self._is_closed:
                    return
                if is_over:
                    waiting.extendleft(reversed(given))
                    given.clear()
                with self._lock:
                    done(found)
        except BaseException as error:
            self._errors.append(error)

    def _has_more(
        self,
        member: _Process,
        waiting: deque[tuple[Place, CheckedCall]],
        given: deque[tuple[Place, CheckedCall]],
        operands: Callable[[Place], dict[CheckRole, OperandFormat]],
    ) -> bool:
        """Tell whether the process has a call to answer for, after it was given all it has room for."""
        while len(given) < _AHEAD:
            try:
                given.append(waiting.popleft())
            except IndexError:
                break
            place, _ = given[-1]
            try:
                member.tell(Order(call=place, operands=operands(place)))
            except _Lost:
                break
        return bool(given)

    def _checked(self, member: _Process, place: Place, stub: CheckedCall) -> tuple[CheckedCall, bool]:
        """Return the result of the call that the process is running, and whether that was its last one."""
        try:
            answer = member.answer(self._timeout_s)
        except _Lost as lost:
            on_device = lost.stage == "device"
            where = f"on {member.device}" if on_device else "while it was replayed on the CPU"
            return replace(stub, device=member.device, status="failed" if on_device else "skipped", reason=f"{lost} {where}"), True
        assert answer.checked is not None
        return answer.checked, answer.is_last


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Lost(Exception):
    """Raised where a process ended before it answered; the message says what happened, and `stage` where the call was."""

    def __init__(self, what: str, stage: str) -> None:
        super().__init__(what)
        self.stage = stage


class _Process:
    """One process that starts when it is asked, and again after it was lost."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._child: subprocess.Popen[bytes] | None = None
        self._alarm: _Alarm | None = None
        self._num_open = 0

    @property
    def device(self) -> str:
        return self._setup.options.device

    def tell(self, order: Order) -> None:
        """Hand over an order. A process that ended while idle is started again."""
        if self._child is not None and not self._num_open and self._child.poll() is not None:
            self.end()
        if self._child is None:
            self._begin()
        self._num_open += 1
        try:
            write_frame(cast(Any, self._child).stdin, order)
        except OSError as error:
            raise _Lost(str(error), "") from error

    def answer(self, timeout_s: float) -> Answer:
        """Return its answer to the first order that it has not answered."""
        child, alarm = cast(Any, self._child), cast("_Alarm", self._alarm)
        stage = ""
        alarm.set(timeout_s)
        try:
            while (answer := read_frame(child.stdout, Answer)) is not None:
                if answer.checked is None and answer.stage != "recognised":
                    stage = answer.stage
                    continue
                self._num_open -= 1
                if answer.is_last or alarm.has_rung:
                    self.end()
                return replace(answer, is_last=self._child is None)
        except OSError:
            pass
        finally:
            alarm.set(inf)
        self.end()
        raise _Lost(f"took more than {timeout_s:g} s" if alarm.has_rung else f"ended its process ({_ending(child.returncode)})", stage)

    def _begin(self) -> None:
        command = [sys.executable, "-m", "ulpscope.workflows.check.worker"]
        environment = {**_PATIENT, **os.environ, **_ONE_THREAD}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        self._child, self._alarm = child, _Alarm(child)
        self._alarm.set(_STARTING_S)
        try:
            write_frame(cast(Any, child.stdin), self._setup)
            answer = read_frame(cast(Any, child.stdout), Answer)
        except OSError:
            answer = None
        if answer is None or answer.error:
            self.end()
            raise InputError(answer.error if answer else f"a process that checks calls did not start ({_ending(child.returncode)})")
        self._alarm.set(inf)

    def end(self) -> None:
        child, alarm = self._child, self._alarm
        self._child = self._alarm = None
        self._num_open = 0
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        child.wait()
        if alarm is not None:
            alarm.stop()


class _Alarm:
    """Ends a process when its time is over; one thread that looks now and then, however many calls there are."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.has_rung = False
        self._child = child
        self._deadline = inf
        self._stopped = threading.Event()
        threading.Thread(target=self._look, daemon=True, name="ulpscope-check-alarm").start()

    def set(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _look(self) -> None:
        while not self._stopped.wait(_LOOKING_S):
            if time.monotonic() > self._deadline:
                self.has_rung = True
                self._child.kill()
                return

    def stop(self) -> None:
        self._stopped.set()


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
