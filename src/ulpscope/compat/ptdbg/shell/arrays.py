# SPDX-License-Identifier: Apache-2.0
"""Run `pt` and `cn`: show a .npy file, and compare two element by element. Files are mapped and walked block by block.

An element is wrong where |left - right| > atol + rtol * |right|, as numpy's allclose has it. NaN is equal to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ulpscope.compat.ptdbg.shell.programs import matching_paths
from ulpscope.errors import InputError
from ulpscope.numerics.casting import as_array
from ulpscope.report.escaping import visible
from ulpscope.store.foreign.reader import open_tensor

__all__ = ["compare_arrays", "show_array"]

Array = npt.NDArray[Any]

_ROWS, _VALUES_A_ROW = 16, 8
_BLOCK = 1 << 18
_MOST_AS_TEXT = 20_000_000


def show_array(name: str, console: Console) -> None:
    """Print the first values, the statistics, and the path of the text copy."""
    file = _only_file(name)
    values = _load(file)
    table = Table("Index", *map(str, range(_VALUES_A_ROW)))
    flat = values.reshape(-1)
    for start in range(0, min(flat.size, _ROWS * _VALUES_A_ROW), _VALUES_A_ROW):
        table.add_row(str(start), *(str(value) for value in flat[start : start + _VALUES_A_ROW]))
    console.print(table)
    for line in (_spec(values), f"Path: {file}", f"TextFile: {_text_copy(file, values)}"):
        console.print(Text(visible(line)), soft_wrap=True)


def _only_file(name: str) -> Path:
    """Find the one file that a name with wildcards fits."""
    path = Path(name)
    found = [path] if path.exists() else [Path(entry) for entry in matching_paths(name)]
    if len(found) != 1:
        raise InputError(f"'{name}' fits {len(found)} files; give one .npy file")
    return found[0]


def _load(file: Path) -> Array:
    if file.suffix != ".npy" or not file.is_file():
        raise InputError(f"'{file}' is not a .npy file; dc converts a dump file to one")
    data = open_tensor(file)
    return as_array(data).view(np.bool_) if data.dtype == "bool" else as_array(data)


def _spec(values: Array) -> str:
    high, low, mean = map(str, (values.max(), values.min(), values.mean())) if values.size and values.dtype.kind != "c" else ("NA",) * 3
    return f"[Shape: {values.shape}] [Dtype: {values.dtype}] [Max: {high}] [Min: {low}] [Mean: {mean}]"


def _text_copy(file: Path, values: Array) -> str:
    """Write a text copy; return its path, or why there is none."""
    if values.size > _MOST_AS_TEXT:
        return f"not written: {values.size} values would make a text of gigabytes"
    copy = file.with_name(f"{file.name}.txt")
    flat = values.reshape(-1)
    try:
        with copy.open("w", encoding="ascii") as stream:
            for start in range(0, flat.size, _VALUES_A_ROW):
                stream.write(" ".join(map(str, flat[start : start + _VALUES_A_ROW].tolist())) + "\n")
    except OSError as error:
        return f"not written: {error.strerror}"
    return str(copy)


@dataclass(slots=True)
class _Found:
    """Sums over two arrays, and the first wrong elements."""

    errors: int = 0
    wrong: list[tuple[int, Any, Any]] = field(default_factory=list)
    products: float = 0.0
    left_squares: float = 0.0
    right_squares: float = 0.0

    @property
    def cosine(self) -> str:
        lengths = math.sqrt(self.left_squares) * math.sqrt(self.right_squares)
        return str(np.float32(self.products / lengths)) if lengths else "nan"


def compare_arrays(left: str, right: str, rows: int, atol: float, rtol: float, console: Console) -> None:
    """Print two tables, of wrong elements and of the first ones, and a panel with the statistics."""
    files = _only_file(left), _only_file(right)
    arrays = _load(files[0]), _load(files[1])
    if arrays[0].shape != arrays[1].shape:
        console.print(Text(f"[WARNING] The shapes differ: {arrays[0].shape} and {arrays[1].shape}."), soft_wrap=True)
    total = max(array.size for array in map(_reals, arrays))
    if arrays[0].size != arrays[1].size:
        console.print(Text("[WARNING] The sizes differ: the shorter one is filled up with zeros."), soft_wrap=True)
    found = _walk(arrays, total, rows, atol, rtol)
    top = [(at, *values) for at, values in enumerate(zip(*(block[:rows] for block in next(_blocks(arrays, total))[1:]), strict=True))]
    tables = Table.grid(padding=(0, 1))
    tables.add_row(_table("Error Item Table", found.wrong), _table("Top Item Table", top))
    console.print(tables)
    console.print(Panel.fit(Group(*map(Text, map(visible, _summary(files, arrays, found, total, atol, rtol))))))


def _reals(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _blocks(arrays: tuple[Array, Array], total: int) -> Iterator[tuple[int, Array, Array]]:
    """Yield both arrays as float32, the shorter one filled up with zeros; at least one block, which may be empty."""
    flat = [_reals(array) for array in arrays]
    for start in range(0, max(total, 1), _BLOCK):
        size = min(_BLOCK, total - start)
        with np.errstate(over="ignore"):
            parts = [part[start : start + size].astype(np.float32) for part in flat]
        left, right = (np.pad(part, (0, size - part.size)) if part.size < size else part for part in parts)
        yield start, left, right


def _walk(arrays: tuple[Array, Array], total: int, rows: int, atol: float, rtol: float) -> _Found:
    found = _Found()
    with np.errstate(all="ignore"):
        for start, left, right in _blocks(arrays, total):
            near = np.isfinite(right) & (np.abs(left - right) <= atol + rtol * np.abs(right))
            wrong = np.flatnonzero(~(near | (left == right)))
            found.errors += wrong.size
            found.wrong += [(start + int(at), left[at], right[at]) for at in wrong[: rows - len(found.wrong)]]
            x, y = left.astype(np.float64), right.astype(np.float64)
            found.products += float(x @ y)
            found.left_squares += float(x @ x)
            found.right_squares += float(y @ y)
    return found


def _table(title: str, rows: list[tuple[int, Any, Any]]) -> Table:
    table = Table("Index", "Left", "Right", "Diff", title=title)
    with np.errstate(all="ignore"):
        for at, left, right in rows:
            table.add_row(str(at), str(left), str(right), str(np.abs(left - right)))
    return table


def _summary(files: tuple[Path, Path], arrays: tuple[Array, Array], found: _Found, total: int, atol: float, rtol: float) -> Iterator[str]:
    for side, file, array in zip(("Left:", "Right:"), files, arrays, strict=True):
        yield side
        yield f" |- NpyFile: {file}"
        yield f" |- TxtFile: {_text_copy(file, array)}"
        yield f" |- NpySpec: {_spec(array)}"
    yield f"NumCnt:   {total}"
    yield f"AllClose: {found.errors == 0}"
    yield f"CosSim:   {found.cosine}"
    yield f"ErrorPer: {found.errors / total if total else 0.0}  (rl= {rtol}, al= {atol})"
