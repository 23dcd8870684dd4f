# SPDX-License-Identifier: Apache-2.0
"""Act in forks of this process, each under limits: a signal, an endless loop or a full memory then hits the child alone."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ulpscope.errors import UlpscopeError

GIB = 1 << 30


class Answer(NamedTuple):
    """How an act ended (`answer`, `sentence`, `traceback`, `signal 11` or `too slow`), its output, and its cost.

    The seconds are those of the processor, so a busy machine does not matter.
    """

    end: str
    said: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0


def answer_of(act: Callable[[], object], *, seconds: float = 60.0, limits: dict[int, int] | None = None) -> Answer:
    """Do something in a fork. Memory is counted from where the fork began."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(act, writer, limits or {})
    os.close(writer)
    try:
        said = b"".join(_read(reader, seconds))
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Answer("too slow", f"no answer in {seconds} s")
    finally:
        os.close(reader)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return Answer(f"signal {os.WTERMSIG(status)}")
    return Answer(*json.loads(said)) if said else Answer("traceback", f"exit code {os.WEXITSTATUS(status)} without a word")


def _read(reader: int, seconds: float) -> Iterator[bytes]:
    until = time.monotonic() + seconds
    while True:
        if not select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        piece = os.read(reader, 1 << 16)
        if not piece:
            return
        yield piece


def _in_child(act: Callable[[], object], writer: int, limits: dict[int, int]) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        gc.freeze()
        before, started = memory("VmRSS"), time.process_time()
        with limited({resource.RLIMIT_AS: memory("VmSize") + 64 * GIB, **limits}):  # the machine itself is not to suffer
            end, said = ended(act)
        told = end, said[:4000], time.process_time() - started, memory("VmHWM") - before
        os.write(writer, json.dumps(told).encode())
    finally:
        os._exit(0)


def ended(act: Callable[[], object]) -> tuple[str, str]:
    """Run an act; return its answer, its one sentence on purpose, or the traceback of an unforeseen error."""
    try:
        found = act()
    except UlpscopeError as error:
        return ("sentence" if is_sentence(str(error)) else "traceback"), str(error)
    except SystemExit as error:
        return "answer", f"exit {error.code}"
    except BaseException:
        return "traceback", traceback.format_exc()
    return "answer", str(found)[:1000]


def is_sentence(text: str) -> bool:
    """Tell whether a user can read it: one line, not endless, and no exception's name with a traceback behind it."""
    return bool(text) and "\n" not in text and len(text) < 3000 and "Traceback" not in text


def memory(name: str) -> int:
    """Return VmRSS, VmHWM or VmSize of this process in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def limited(limits: dict[int, int]) -> Iterator[None]:
    """Set limits of the system for as long as the context lasts."""
    before = {which: resource.getrlimit(which) for which in limits}
    try:
        for which, most in limits.items():
            resource.setrlimit(which, (most, before[which][1]))
        yield
    finally:
        for which, both in before.items():
            resource.setrlimit(which, both)


def on_linux() -> bool:
    """Tell whether memory can be counted here."""
    return sys.platform == "linux"
