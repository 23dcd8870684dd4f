# SPDX-License-Identifier: Apache-2.0
"""The numbers of all rows, from the .npy files of two dumps."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from pathlib import Path

from ulpscope.compat.file_pairs import FilePairs, MeasuredPair, TensorFolder
from ulpscope.compat.ptdbg.compare.columns import Numbers, no_numbers, numbers
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.errors import InputError
from ulpscope.model import Comparison

__all__ = ["Measuring", "row_numbers"]


class Measuring:
    """Measures tensors by their names in two dumps; what a comparison of ours measured already is taken from there."""

    def __init__(self, npu: Path, bench: Path, pool: Executor, comparison: Comparison | None, place: tuple[int, int]) -> None:
        self._pairs = FilePairs((_folder(npu), _folder(bench)), pool, row_numbers, comparison, place)

    def ask(self, npu: str, bench: str) -> Future[Numbers]:
        return self._pairs.ask(f"{npu}.npy", f"{bench}.npy")


def _folder(path: Path) -> TensorFolder:
    try:
        if not path.is_dir():
            raise InputError(f"the folder of tensors '{path}' cannot be read (No such directory); check the path")
        return TensorFolder(path)
    except InputError as error:
        raise CompareException(CompareException.INVALID_PATH_ERROR, str(error)) from None


def row_numbers(pair: MeasuredPair) -> Numbers:
    """Two tensors in the words of the old result."""
    return no_numbers(pair.failure) if pair.failure else numbers(pair.shapes, pair.found, pair.at_zeros)
