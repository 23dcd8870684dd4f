# SPDX-License-Identifier: Apache-2.0
"""Run `GradComparator`: count how many signs of each gradient agree at each step, in two folders of the gradient probe.

    rank0/similarities.csv                     a row of steps, a row for each parameter, and one for all of them (`summary`)
    rank0/similarities_picture/NAME_similarities.png

A parameter is suspicious where less than 0.97 of its signs agree at the first step, or where that share falls by more than 0.03.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ulpscope.errors import DamagedRunError, MissingDependencyError, NothingComparableError
from ulpscope.numerics.casting import as_array
from ulpscope.report.escaping import visible
from ulpscope.report.health.figures import Curves
from ulpscope.report.health.grad_probe import write_similarities
from ulpscope.store.foreign.reader import open_tensor

__all__ = ["GradComparator", "suspicions"]

_SUMMARY = "summary"
_LOWEST_AT_FIRST = 0.97
_LARGEST_FALL = 0.03
_MOST_TOLD = 5

_Path = str | os.PathLike[str]


class GradComparator:
    """Compares the files that two runs of the task grad_probe left, at levels L1 and L2.

    >>> GradComparator.compare_distributed("./npu_grad", "./gpu_grad", "./result")  # doctest: +SKIP
    """

    @classmethod
    def compare_distributed(cls, path1: _Path, path2: _Path, output_dir: _Path) -> None:
        """Compare the ranks that both folders have."""
        ranks = _common_numbers(Path(path1), Path(path2), "rank")
        for rank in ranks:
            cls.compare(Path(path1, f"rank{rank}"), Path(path2, f"rank{rank}"), Path(output_dir, f"rank{rank}"))

    @classmethod
    def compare(cls, path1: _Path, path2: _Path, output_dir: _Path) -> None:
        """Compare one rank."""
        first, second, out = Path(path1), Path(path2), Path(output_dir)
        steps = _common_numbers(first, second, "step")
        names = _ordered_names(first, second, steps)
        similarities = _similarities(first, second, steps, names)
        out.mkdir(parents=True, exist_ok=True)
        write_similarities(out / "similarities.csv", steps, dict(similarities))
        _draw(out / "similarities_picture", steps, similarities)
        _tell(out, steps, similarities)


def suspicions(steps: Sequence[int], similarities: dict[str, list[float]]) -> Iterator[tuple[int, str, str]]:
    """Yield where gradients begin to differ: step, parameter and why, each parameter once.

    >>> list(suspicions([0, 1], {"a": [0.99, 0.95], "b": [0.9, 0.9]}))
    [(1, 'a', 'falls from 0.990 to 0.950'), (0, 'b', 'is 0.900 at first')]
    """
    for name, values in similarities.items():
        if values and values[0] < _LOWEST_AT_FIRST:
            yield steps[0], name, f"is {values[0]:.3f} at first"
            continue
        falls = (place for place in range(1, len(values)) if values[place - 1] - values[place] > _LARGEST_FALL)
        place = next(falls, None)
        if place is not None:
            yield steps[place], name, f"falls from {values[place - 1]:.3f} to {values[place]:.3f}"


def _common_numbers(first: Path, second: Path, kind: str) -> list[int]:
    found = [{int(match[1]) for match in _numbered(path, kind)} for path in (first, second)]
    both = sorted(found[0] & found[1])
    if not both:
        raise NothingComparableError(
            f"'{first}' and '{second}' have no folder {kind}N in common ({len(found[0])} and {len(found[1])} found); "
            "give two folders that the task grad_probe wrote at level L1 or L2"
        )
    return both


def _numbered(path: Path, kind: str) -> Iterator[re.Match[str]]:
    if not path.is_dir():
        raise NothingComparableError(f"'{path}' is no folder; give a folder that the task grad_probe wrote")
    for entry in path.iterdir():
        match = re.fullmatch(rf"{kind}(\d{{1,9}})", entry.name)
        if match and entry.is_dir():
            yield match


def _ordered_names(first: Path, second: Path, steps: Sequence[int]) -> list[str]:
    """List the parameters that both sides have at every step, in the order of the model where a summary tells it."""
    names: set[str] | None = None
    for folder in (side / f"step{step}" for side in (first, second) for step in steps):
        here = {file.stem for file in folder.glob("*.npy")}
        names = here if names is None else names & here
    if not names:
        raise NothingComparableError(f"'{first}' and '{second}' have no parameter in common; were both runs given the same param_list?")
    order = {name: place for place, name in enumerate(_summary_names(first))}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def _summary_names(rank: Path) -> list[str]:
    file = min(rank.glob("grad_summary_*.csv"), default=None)
    if file is None:
        return []
    try:
        with file.open(encoding="utf-8", errors="replace", newline="") as stream:
            return [row["param_name"] for row in csv.DictReader(stream) if row.get("param_name")]
    except csv.Error as error:
        raise DamagedRunError(f"'{file}' is no csv ({error}); run the probe again, or take the file away: it only says the order") from None


def _similarities(first: Path, second: Path, steps: Sequence[int], names: Sequence[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in (*names, _SUMMARY)}
    for step in steps:
        num_equal = num_all = 0
        for name in names:
            one, other = (_mask(side / f"step{step}" / f"{name}.npy") for side in (first, second))
            if one.shape != other.shape:
                raise NothingComparableError(
                    f"{name} at step {step} has the shapes {one.shape} and {other.shape}; compare runs of one model"
                )
            equal = int(np.count_nonzero(one == other))
            found[name].append(equal / one.size if one.size else 1.0)
            num_equal, num_all = num_equal + equal, num_all + one.size
        found[_SUMMARY].append(num_equal / num_all if num_all else 1.0)
    return found


def _mask(file: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    try:
        mask = open_tensor(file)
    except DamagedRunError as error:
        raise DamagedRunError(f"'{file}' cannot be read as a mask of signs: {error}; run the probe again") from None
    if mask.dtype != "bool":
        raise DamagedRunError(f"'{file}' holds {mask.dtype}, no mask of signs; run the probe again")
    return as_array(mask).view(np.bool_)


def _draw(folder: Path, steps: Sequence[int], similarities: dict[str, list[float]]) -> None:
    from ulpscope.report.health.curves import write_curves

    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, values in similarities.items():
            curves = Curves(f"{name}_similarities", "similarities", tuple(steps), {name: np.asarray(values)}, None, None)
            write_curves(curves, folder / f"{name}_similarities.png")
    except MissingDependencyError as error:
        print(visible(f"msprobe: no pictures: {error}"))


def _tell(out: Path, steps: Sequence[int], similarities: dict[str, list[float]]) -> None:
    print(
        visible(f"msprobe: {len(similarities) - 1} parameters and {len(steps)} steps compared; the table is '{out / 'similarities.csv'}'")
    )
    found = sorted(suspicions(steps, similarities), key=lambda each: each[0])
    for step, name, why in found[:_MOST_TOLD]:
        print(f"msprobe: suspicious from step {step}: the similarity of {visible(name)} {why}")
    if len(found) > _MOST_TOLD:
        print(f"msprobe: and {len(found) - _MOST_TOLD} more")
