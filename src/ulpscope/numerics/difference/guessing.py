# SPDX-License-Identifier: Apache-2.0
"""Tensors that two runs will probably have compared, begun by other threads before anybody knows what belongs together.

The same program keeps its tensors in the same order, so the guess is that the first of one run belongs to the first of the other. Importing
what reads records and matches calls takes as long as comparing a small run, and but for this the other cores would have nothing to do
meanwhile. So this imports nothing that it can do without. When the pairs are known nothing more is begun by guess: what was begun and
is wanted is handed over, and the rest was nobody's time. A guess that is wrong changes no answer, since hashes tell what was read. Of the
store format (docs/store-format.md) it knows where the first step lies and how a journal lists tensors; where that changes it finds none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from threading import Thread
from typing import TYPE_CHECKING

from ulpscope.numerics.kernel import BEST_TARGET, KERNEL, KINDS

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["BYTES_OF_PARTS", "RESULT_BYTES", "UNIT_WORDS", "VIEW_WORDS", "Guess", "Units", "guess_from", "room_of"]

UNIT_WORDS = 14  # of `struct unit` in _kernel.c, the last of which is its state
VIEW_WORDS = 14  # of `struct view`
RESULT_BYTES = 176  # of `struct result`
BYTES_OF_PARTS = 2 * ((1 << 18) + 64)  # two of CHUNK and STRIPE in _kernel.c
_MOST_UNITS = 2048
_MOST_FILES = 32  # twice MOST_SHARDS in _kernel.c
_MOST_THREADS = 8
_NAMES = {number: name for name, number in KINDS.items()}


class Units(ctypes.Structure):
    """`struct units` of _kernel.c."""

    _fields_ = [
        ("units", ctypes.c_void_p),
        ("views", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("results", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
    ]


def guess_from(words: list[str]) -> Guess | None:
    """A guess for the first two runs among the words of a command, under way; None where there are none, or nobody could work on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runs = [word for word in words if not word.startswith("-") and os.path.isfile(f"{word}/run.json")][:2]  # noqa: PTH113 (and no pathlib)
    if len(runs) < 2 or cores < 2 or not hasattr(KERNEL, "ulpscope_guess"):
        return None
    step = _first_step(*runs)
    return Guess(runs[0], runs[1], step, min(cores, _MOST_THREADS) - 1) if step else None


def _first_step(subject: str, reference: str) -> str | None:
    """The folder of the first step of the first rank that both runs have."""
    try:
        ours, theirs = ({entry.name for entry in os.scandir(f"{run}/rank00000")} for run in (subject, reference))
    except OSError:
        return None
    names = [name for name in ours & theirs if name.startswith("step") and name[4:].isascii() and name[4:].isdigit()]
    return min(names, key=lambda name: (len(name), name), default=None)


class Guess:
    """Pairs of the first step of two runs that other threads compare. It has to be closed, by `with`, before the process ends."""

    def __init__(self, subject: str, reference: str, step: str, num_threads: int) -> None:
        assert KERNEL is not None
        self._runs = (subject, reference)
        self._part = (0, int(step[4:]))
        self._files = (ctypes.c_int64 * _MOST_FILES)()
        self.units, self.views, self.results = (room_of(_MOST_UNITS * size) for size in (8 * UNIT_WORDS, 8 * VIEW_WORDS, RESULT_BYTES))
        folders = [os.fsencode(f"{run}/rank00000/{step}") for run in self._runs]
        count = KERNEL.ulpscope_guess(*folders, self.units, self.views, _MOST_UNITS, self._files)
        self.shared = Units(ctypes.addressof(self.units), ctypes.addressof(self.views), None, ctypes.addressof(self.results), count, 0)
        self._threads = [Thread(target=self._work, name="ulpscope-guess", daemon=True) for _ in range(num_threads if count else 0)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Guess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        assert KERNEL is not None
        KERNEL.ulpscope_compare_kept(ctypes.byref(self.shared), -1, room_of(BYTES_OF_PARTS), BEST_TARGET)

    def is_of(self, subject: Path, reference: Path | None) -> bool:
        kind = type(subject)
        return reference is not None and tuple(map(kind, self._runs)) == (subject, reference)

    def wait_for(self, number: int) -> bool:
        """Whether a pair that somebody has begun could be compared."""
        assert KERNEL is not None
        return bool(KERNEL.ulpscope_compare_kept(ctypes.byref(self.shared), number, None, BEST_TARGET))

    def stop(self) -> None:
        """Nothing more is begun; what was begun goes on."""
        self.shared.next = self.shared.count

    def close(self) -> None:
        """Wait for what was begun, and close the files."""
        self.stop()
        for thread in self._threads:
            thread.join()
        for at, fd in enumerate(self._files):
            if fd >= 0:
                self._files[at] = -1
                os.close(fd)

    def begun(self, rank: int, step: int) -> dict[tuple[str, str, str, int], int]:
        """The pairs of a step that somebody has begun, after `stop`: hashes, dtype and number of elements, and the number of the pair."""
        if (rank, step) != self._part:
            return {}
        found = {}
        units, views = (memoryview(room).cast("B").cast("Q") for room in (self.units, self.views))
        for number in range(self.shared.count):
            first = number * UNIT_WORDS
            if units[first + UNIT_WORDS - 1]:
                high, low, _, _, _, other_high, other_low = units[first + 3 : first + 10]
                kind, numel = views[number * VIEW_WORDS : number * VIEW_WORDS + 2]
                found[f"{high:016x}{low:016x}", f"{other_high:016x}{other_low:016x}", _NAMES[kind], numel] = number
        return found


def room_of(size: int) -> ctypes.Array[ctypes.c_char]:
    """Memory that is made by whoever first writes to it."""
    return (ctypes.c_char * size).from_buffer(mmap.mmap(-1, size))
