# SPDX-License-Identifier: Apache-2.0
"""Tensors that older tools keep one in a file, measured in pairs: each pair of files once, on every core, through memory maps.

A file is found only in the listing of its folder, so a name in a dump cannot lead anywhere else. Names of one file are one file.
What our own comparison of the same dumps measured already is taken from there.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ulpscope.errors import InputError, UlpscopeError
from ulpscope.measure import measure_tensors
from ulpscope.model import Comparison, TensorData, TensorMeasurement
from ulpscope.numerics.buffers import address_of, flat_view
from ulpscope.numerics.kernel import KERNEL, KINDS
from ulpscope.store.foreign.reader import open_tensor

__all__ = ["FilePairs", "MeasuredPair", "TensorFolder", "measure_pair", "settled"]

_BLOCK = 1 << 16
_EPS = sys.float_info.epsilon
_SUFFIXES = (".npy", ".pt")
_Shape = tuple[int, ...]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """Two tensors side by side. `found` is None where the shapes differ, and where `failure` says why nothing could be measured.

    `at_zeros` is the largest relative error where the reference is zero: the old tools put the smallest step from 1.0 in the place of
    that zero. `num_finite` counts the finite elements, where both sides agree on which those are.
    """

    shapes: tuple[_Shape, _Shape] = ((), ())
    found: TensorMeasurement | None = None
    at_zeros: float = 0.0
    num_finite: int = 0
    failure: str = ""


class TensorFolder:
    """The tensor files of one dump; a folder that is not there holds none."""

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
        """Equal for two names of one file; None where there is no such file."""
        return self._files.get(name)


def _is_inside(entry: os.DirEntry[str], folder: Path) -> bool:
    if not entry.name.endswith(_SUFFIXES) or not entry.is_file():
        return False
    return not entry.is_symlink() or Path(entry.path).resolve().parent == folder.resolve()


class FilePairs(Generic[_T]):
    """Measures pairs of files as they are asked for; `told` makes of each what the caller wants to know.

    `comparison` is our own of the same dumps, in which these files stand at `place`, a rank and a step.
    """

    def __init__(
        self,
        folders: tuple[TensorFolder, TensorFolder],
        pool: Executor,
        told: Callable[[MeasuredPair], _T],
        comparison: Comparison | None = None,
        place: tuple[int, int] = (0, 0),
    ) -> None:
        self._folders = folders
        self._pool = pool
        self._told = told
        self._measured = _measurements(comparison, place) if comparison is not None else {}
        self._known: dict[Hashable, Future[_T]] = {}

    def ask(self, subject: str, reference: str) -> Future[_T]:
        """What is told of two files by their names."""
        names = subject, reference
        key = tuple(folder.identity(name) for folder, name in zip(self._folders, names, strict=True))
        if None in key:
            return settled(self._told(MeasuredPair(failure=self._missing(names))))
        if key not in self._known:
            ours, theirs = (folder.path / name for folder, name in zip(self._folders, names, strict=True))
            self._known[key] = self._pool.submit(self._tell, ours, theirs, self._measured.get(names))
        return self._known[key]

    def _tell(self, subject: Path, reference: Path, measured: TensorMeasurement | None) -> _T:
        return self._told(measure_pair(subject, reference, measured))

    def _missing(self, names: tuple[str, str]) -> str:
        sides = zip(self._folders, names, ("NPU", "bench"), strict=True)
        files = " and ".join(f"{name} of the {side} dump" for folder, name, side in sides if folder.identity(name) is None)
        return f"Dump file not found: {files}."


def settled(answer: _T) -> Future[_T]:
    """An answer that needs no work."""
    future: Future[_T] = Future()
    future.set_result(answer)
    return future


def _measurements(comparison: Comparison, place: tuple[int, int]) -> dict[tuple[str, str], TensorMeasurement]:
    """What was measured of one rank and step, by the names of the two files."""
    records = ((call, call.pair.record) for call in comparison.calls)
    slots = (slot for call, record in records if (record.rank, record.step) == place for slot in call.slots)
    return {
        (slot.pair.subject.content, slot.pair.reference.content): slot.measurement
        for slot in slots
        if slot.pair.subject and slot.pair.reference and isinstance(slot.measurement, TensorMeasurement)
        if slot.pair.subject.content and slot.pair.reference.content
    }


def measure_pair(subject: Path, reference: Path, measured: TensorMeasurement | None = None) -> MeasuredPair:
    """The tensors in two files, of which `measured` may be known."""
    try:
        ours, theirs = open_tensor(subject), open_tensor(reference)
        shapes = ours.shape, theirs.shape
        if ours.shape != theirs.shape:
            return MeasuredPair(shapes)
        if ours.dtype.startswith("complex") != theirs.dtype.startswith("complex"):
            return MeasuredPair(shapes, failure=f"One side is complex: {ours.dtype} and {theirs.dtype}.")
        found = measured or measure_tensors(ours, theirs)
        at_zeros, num_finite = (0.0, found.numel) if found.equal else _details(ours, theirs)
        return MeasuredPair(shapes, found, at_zeros, num_finite)
    except (UlpscopeError, KeyError) as error:
        return MeasuredPair(failure=str(error))


def _details(subject: TensorData, reference: TensorData) -> tuple[float, int]:
    """The largest relative error at zeros of the reference, and the number of the subject's elements that are finite."""
    if KERNEL is not None and subject.dtype == reference.dtype and subject.dtype in ("float64", "float32"):
        ours, theirs, largest = flat_view(subject), flat_view(reference), ctypes.c_double()
        sides = KINDS[subject.dtype], address_of(ours), address_of(theirs), math.prod(subject.shape)
        num_finite = KERNEL.ulpscope_at_zeros(*sides, ctypes.addressof(largest))
        return largest.value / _EPS, num_finite
    return _details_by_numpy(subject, reference)


def _details_by_numpy(subject: TensorData, reference: TensorData) -> tuple[float, int]:
    import numpy as np

    from ulpscope.numerics.casting import as_bytes, real_dtype, reals, widen

    ours, theirs = (reals(data.dtype, as_bytes(data)) for data in (subject, reference))
    kinds = real_dtype(subject.dtype), real_dtype(reference.dtype)
    largest, num_finite = 0.0, 0
    for start in range(0, theirs.size, _BLOCK):
        blocks = zip(kinds, (ours[start : start + _BLOCK], theirs[start : start + _BLOCK]), strict=True)
        left, right = (block if block.dtype.name == kind else widen(kind, block) for kind, block in blocks)
        finite, zeros = np.isfinite(left), right == 0
        num_finite += int(np.count_nonzero(finite))
        if zeros.any():
            largest = max(largest, float(np.abs(left[finite & zeros].astype(np.float64)).max(initial=0.0)))
    return largest / _EPS, num_finite
