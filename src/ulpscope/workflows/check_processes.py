# SPDX-License-Identifier: Apache-2.0
"""Processes that check calls, and what is said of a call that one of them did not survive.

Each process has a thread here that hands it one call at a time. A call that takes too long is ended together with its process, and the
next call gets a new one. Nothing of the calls is read here, so this process needs no torch and no device.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from ulpscope.errors import InputError
from ulpscope.model import OperandFormat
from ulpscope.model.checks import CheckedCall, CheckRole
from ulpscope.workflows.check_frames import read_frame, write_frame
from ulpscope.workflows.check_worker import Answer, Order, Setup

__all__ = ["Processes"]

Place = tuple[int, int, int]
_STARTING_S = 300.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Threads of a large call that wait for each other leave their core to whoever needs it: on a busy machine five times as fast."""


class Processes:
    """At most `jobs` processes at a time, begun when there is work, and dealt out over the setups: one for each device."""

    def __init__(self, setups: Sequence[Setup], *, jobs: int, timeout_s: float) -> None:
        many = max(jobs, len(setups))
        num_threads = 1 if many > 1 else _num_cores()
        self._timeout_s = timeout_s
        self._members = [_Process(replace(setups[at % len(setups)], num_threads=num_threads)) for at in range(many)]
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

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
        try:
            answer = self._members[0].ask(Order(role=role, members=tuple(members)), self._timeout_s * max(1, len(members)))
        except _Lost:
            return None
        return answer.operands

    def close(self) -> None:
        for member in self._members:
            member.end()

    def _work(
        self,
        member: _Process,
        waiting: deque[tuple[Place, CheckedCall]],
        operands: Callable[[Place], dict[CheckRole, OperandFormat]],
        done: Callable[[CheckedCall], None],
    ) -> None:
        while not self._errors:
            try:
                place, stub = waiting.popleft()
            except IndexError:
                return
            try:
                found = self._checked(member, place, stub, operands(place))
                with self._lock:
                    done(found)
            except BaseException as error:
                self._errors.append(error)
                return

    def _checked(self, member: _Process, place: Place, stub: CheckedCall, operands: dict[CheckRole, OperandFormat]) -> CheckedCall:
        try:
            answer = member.ask(Order(call=place, operands=operands), self._timeout_s)
        except _Lost as lost:
            on_device = lost.stage == "device"
            where = f"on {member.device}" if on_device else "while it was replayed on the CPU"
            return replace(stub, device=member.device, status="failed" if on_device else "skipped", reason=f"{lost} {where}")
        assert answer.checked is not None
        return answer.checked


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Lost(Exception):
    """A process ended before it answered; the message is what became of the call, `stage` what it was at."""

    def __init__(self, what: str, stage: str) -> None:
        super().__init__(what)
        self.stage = stage


class _Process:
    """One process that comes to life when it is asked, and again after it was lost."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def device(self) -> str:
        return self._setup.options.device

    def ask(self, order: Order, timeout_s: float) -> Answer:
        child = self._child if self._child is not None and self._child.poll() is None else self._begun()
        stage = ""
        alarm = _Alarm(child, timeout_s)
        try:
            write_frame(cast(Any, child.stdin), order)
            while (answer := read_frame(cast(Any, child.stdout), Answer)) is not None:
                if answer.checked is not None or answer.stage == "recognised":
                    return answer
                stage = answer.stage
        except (BrokenPipeError, OSError):
            pass
        finally:
            alarm.stop()
        self.end()
        raise _Lost(f"took more than {timeout_s:g} s" if alarm.has_rung else f"ended its process ({_ending(child.returncode)})", stage)

    def _begun(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ulpscope.workflows.check_worker"]
        environment = {**_PATIENT, **os.environ, **_ONE_THREAD}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        self._child = child
        alarm = _Alarm(child, _STARTING_S)
        try:
            write_frame(cast(Any, child.stdin), self._setup)
            answer = read_frame(cast(Any, child.stdout), Answer)
        except (BrokenPipeError, OSError):
            answer = None
        finally:
            alarm.stop()
        if answer is None or answer.error:
            self.end()
            raise InputError(answer.error if answer else f"a process that checks calls did not start ({_ending(child.returncode)})")
        return child

    def end(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._child.wait()
        self._child = None


class _Alarm:
    """Ends a process when its time is over."""

    def __init__(self, child: subprocess.Popen[bytes], seconds: float) -> None:
        self.has_rung = False
        self._child = child
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def _ring(self) -> None:
        self.has_rung = True
        self._child.kill()

    def stop(self) -> None:
        self._timer.cancel()


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
