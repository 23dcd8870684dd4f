# SPDX-License-Identifier: Apache-2.0
"""Measure pairs of tensor files, as older tools keep them: each pair once, on every core, through memory maps.

A file is found only in the listing of its folder, so a name in a dump cannot lead anywhere else. Several names of one file count as one
file. Measurements of ulpscope's own comparison of the same dumps are reused.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ulpscope.errors import InputError, UlpscopeError
from ulpscope.measure.written import measure_two
from ulpscope.model import Comparison, TensorMeasurement
from ulpscope.model.written import OldNumbers
from ulpscope.store.foreign.reader import open_tensor

__all__ = ["FilePairs", "TensorFolder", "measure_pair", "measuring_files", "settled"]

_MOST_THREADS = 8
_SUFFIXES = (".npy", ".pt")


class TensorFolder:
    """The tensor files of one dump; a missing folder holds none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with os.scandir(path) as entries:
                self._files = {entry.name: entry.inode() for entry in entries if _is_inside(entry, path)}
        except FileNotFoundError:
            self._files = {}
        except OSError as error:
            raise InputError(f"the folder of tensors '{path}' cannot be read ({error.strerror}); check the path") from None

    def identity(self, name: str) -> Hashable | None:
        """Return a key that is equal for two names of one file; None where there is no such file."""
        return self._files.get(name)


def _is_inside(entry: os.DirEntry[str], folder: Path) -> bool:
    if not entry.name.endswith(_SUFFIXES) or not entry.is_file():
        return False
    return not entry.is_symlink() or Path(entry.path).resolve().parent == folder.resolve()


class FilePairs:
    """Measures pairs of files as they are asked for.

    `comparison` is ulpscope's own comparison of the same dumps, in which these files stand at `place`, a rank and a step.
    """

    def __init__(
        self,
        folders: tuple[TensorFolder, TensorFolder],
        pool: Executor,
        comparison: Comparison | None = None,
        place: tuple[int, int] = (0, 0),
    ) -> None:
        self._folders = folders
        self._pool = pool
        self._measured = _measurements(comparison, place) if comparison is not None else {}
        self._known: dict[Hashable, Future[OldNumbers]] = {}

    def ask(self, subject: str, reference: str) -> Future[OldNumbers]:
        """Return the future numbers of two files, given by their names."""
        names = subject, reference
        key = tuple(folder.identity(name) for folder, name in zip(self._folders, names, strict=True))
        if None in key:
            return settled(OldNumbers(failure=self._missing(names)))
        if key not in self._known:
            ours, theirs = (folder.path / name for folder, name in zip(self._folders, names, strict=True))
            self._known[key] = self._pool.submit(measure_pair, ours, theirs, self._measured.get(names))
        return self._known[key]

    def _missing(self, names: tuple[str, str]) -> str:
        sides = zip(self._folders, names, ("NPU", "bench"), strict=True)
        files = " and ".join(f"{name} of the {side} dump" for folder, name, side in sides if folder.identity(name) is None)
        return f"Dump file not found: {files}."


@contextmanager
def measuring_files(
    subject: Path, reference: Path, comparison: Comparison | None = None, place: tuple[int, int] = (0, 0)
) -> Iterator[FilePairs]:
    """Measure the files of two folders on every core until the block ends."""
    folders = TensorFolder(subject), TensorFolder(reference)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="ulpscope-files") as pool:
        yield FilePairs(folders, pool, comparison, place)


def settled(answer: OldNumbers) -> Future[OldNumbers]:
    """Return an answer that needs no work."""
    future: Future[OldNumbers] = Future()
    future.set_result(answer)
    return future


def _measurements(comparison: Comparison, place: tuple[int, int]) -> dict[tuple[str, str], TensorMeasurement]:
    """Return the measurements of one rank and step, by the names of the two files."""
    records = ((call, call.pair.record) for call in comparison.calls)
    slots = (slot for call, record in records if (record.rank, record.step) == place for slot in call.slots)
    return {
        (slot.pair.subject.content, slot.pair.reference.content): slot.measurement
        for slot in slots
        if slot.pair.subject and slot.pair.reference and isinstance(slot.measurement, TensorMeasurement)
        if slot.pair.subject.content and slot.pair.reference.content
    }


def measure_pair(subject: Path, reference: Path, measured: TensorMeasurement | None = None) -> OldNumbers:
    """Measure the tensors in two files; reuse `measured` if it is known."""
    try:
        return measure_two(open_tensor(subject), open_tensor(reference), measured)
    except (UlpscopeError, KeyError) as error:
        return OldNumbers(failure=str(error))
