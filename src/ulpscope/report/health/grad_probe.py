# SPDX-License-Identifier: Apache-2.0
"""Write gradients in the files of the older gradient probe: one summary a step, masks of positive gradients, and similarities.

    rank0/grad_summary_3.csv       level L0: MD5 and statistics; L1: statistics; L2: shares of intervals and statistics
    rank0/step3/NAME.npy           levels L1 and L2: where the gradient is positive
    rank0/similarities.csv         of two runs: the share of equal masks, by parameter and step

Statistics and MD5 are those of the gradient as float32. Intervals are closed on the right.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ulpscope.errors import InputError
from ulpscope.numerics.summary.composing import counts_of_intervals
from ulpscope.report.replacing import replacing

__all__ = ["GradLevel", "gradient_row", "header", "write_mask", "write_similarities", "write_summary"]

GradLevel: TypeAlias = Literal["L0", "L1", "L2"]
BOUNDS: tuple[float, ...] = (-1, 0, 1)
_STATISTICS = ("max", "min", "norm", "shape")


def header(level: GradLevel, bounds: Sequence[float] = BOUNDS) -> list[str]:
    """Return the columns of a summary.

    >>> header("L2", (0.0,))
    ['param_name', '(-inf, 0.0]', '(0.0, inf)', '=0', 'max', 'min', 'norm', 'shape']
    """
    if level == "L0":
        return ["param_name", "MD5", *_STATISTICS]
    if level == "L1":
        return ["param_name", *_STATISTICS]
    edges = list(bounds)
    between = [f"({low}, {high}]" for low, high in pairwise(edges)]
    return ["param_name", f"(-inf, {edges[0]}]", *between, f"({edges[-1]}, inf)", "=0", *_STATISTICS]


def gradient_row(name: str, gradient: Any, level: GradLevel, bounds: Sequence[float] = BOUNDS) -> list[Any]:
    """Return one line of a summary, in the order of `header`."""
    values = np.ascontiguousarray(np.asarray(gradient), dtype=np.float32)
    norm = float(np.sqrt(np.sum(np.square(values, dtype=np.float64)), dtype=np.float32))
    empty = not values.size
    statistics = [0.0 if empty else float(values.max()), 0.0 if empty else float(values.min()), norm, list(values.shape)]
    if level == "L0":
        return [name, hashlib.md5(values.tobytes(), usedforsecurity=False).hexdigest(), *statistics]
    if level == "L1":
        return [name, *statistics]
    counts = counts_of_intervals(values, tuple(bounds))
    shares = [0.0 if empty else float(count / values.size) for count in (*counts, np.count_nonzero(values == 0))]
    return [name, *shares, *statistics]


def write_summary(
    folder: Path, rank: int, step: int, rows: Iterable[Sequence[Any]], level: GradLevel, bounds: Sequence[float] = BOUNDS
) -> Path:
    """Write the summary of one step below `folder`."""
    path = _made(folder / f"rank{rank}") / f"grad_summary_{step}.csv"
    _write_rows(path, [header(level, bounds), *rows])
    return path


def write_mask(folder: Path, rank: int, step: int, name: str, gradient: Any) -> Path:
    """Write where a gradient is positive."""
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise InputError(f"the parameter {name!r} cannot be the name of a file; leave it out of the parameters to probe")
    path = _made(folder / f"rank{rank}" / f"step{step}") / f"{name}.npy"
    with replacing(path) as temporary, temporary.open("xb") as file:
        np.save(file, np.asarray(gradient, dtype=np.float32) > 0, allow_pickle=False)
    return path


def write_similarities(path: Path, steps: Sequence[int], similarities: dict[str, Sequence[float]]) -> None:
    """Write one row for each parameter, after a row with the steps; an unknown similarity is an empty cell."""
    rows: list[list[Any]] = [["step", *map(int, steps)]]
    rows += [[name, *("" if np.isnan(value) else float(value) for value in values)] for name, values in similarities.items()]
    _write_rows(path, rows)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([_cell(value) for value in row] for row in rows)


def _cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would run as a formula, except the headings `=0` and `(-inf`."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") and value != "=0":
        return f"'{value}"
    return value
