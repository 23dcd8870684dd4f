# SPDX-License-Identifier: Apache-2.0
"""Find which dump.json is compared with which: two files, or the ranks and steps of two folders.

dump/step0/rank0/dump.json      a folder may be given at any of these levels, on each side at another
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ulpscope.errors import InputError
from ulpscope.store.foreign.reader import number_ranks

__all__ = ["PlacePair", "Places", "find_places"]

_RANK = re.compile(r"(rank|proc|pid)\d*")
_STEP = re.compile(r"step\d{1,9}")
_T = TypeVar("_T")
_FILES = ("dump.json", "debug.json")


@dataclass(frozen=True, slots=True)
class PlacePair:
    """One step of one rank on both sides."""

    rank: int
    step: int
    target: Path
    golden: Path
    is_folder: bool = True

    def suffix(self, *, both: bool) -> str:
        """Return the suffix of its result files: the folder of the target's rank, or those of both."""
        if not self.is_folder:
            return ""
        names = [file.parent.name for file in (self.target, self.golden)]
        return f"_{names[0]}-{names[1]}" if both else f"_{names[0]}"


@dataclass(frozen=True, slots=True)
class Places:
    """All pairs of two dumps, and remarks on those left out."""

    target: Path
    golden: Path
    pairs: tuple[PlacePair, ...]
    remarks: tuple[str, ...] = ()

    @property
    def steps(self) -> frozenset[int]:
        return frozenset(pair.step for pair in self.pairs)


def find_places(target: Path, golden: Path) -> Places:
    """Pair the dump files of two paths."""
    for path in (target, golden):
        if not path.exists():
            raise InputError(f"there is no '{path}': give a dump.json, or the folder of a step that holds rank folders")
    if target.is_file() and golden.is_file():
        return Places(target, golden, (PlacePair(0, 0, target, golden, is_folder=False),))
    if target.is_file() or golden.is_file():
        raise InputError(f"one of '{target}' and '{golden}' is a file and the other a folder: give two dump.json files or two folders")
    return _folders(target, golden)


def _folders(target: Path, golden: Path) -> Places:
    ours, theirs = _steps(target), _steps(golden)
    pairs: list[PlacePair] = []
    remarks: list[str] = []
    for step, (one, other) in _common(ours, theirs, f"step of '{target}' and '{golden}'", remarks).items():
        ranks = _common(one, other, f"rank of step {step}" if len(ours) > 1 else "rank", remarks)
        is_folder = any(_RANK.fullmatch(file.parent.name) for pair in ranks.values() for file in pair)
        pairs += (PlacePair(rank, step, *files, is_folder=is_folder) for rank, files in ranks.items())
    return Places(target, golden, tuple(pairs), tuple(remarks))


def _steps(folder: Path) -> dict[int, dict[int, Path]]:
    """Find the dump files of a folder by step and rank; the step is 0 where the folder is one step."""
    ranks = _ranks(folder)
    if ranks:
        return {0: ranks}
    steps = {int(entry.name[4:]): found for entry in _subfolders(folder, _STEP) if (found := _ranks(entry))}
    if not steps:
        raise InputError(f"'{folder}' holds no dump.json, neither itself nor in step*/rank* below; give the folder of a step")
    return dict(sorted(steps.items()))


def _ranks(folder: Path) -> dict[int, Path]:
    if (own := _dump_file(folder)) is not None:
        return {0: own}
    folders = number_ranks(entry for entry in _subfolders(folder, _RANK) if _dump_file(entry) is not None)
    return {rank: file for rank, entry in folders.items() if (file := _dump_file(entry)) is not None}


def _subfolders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if pattern.fullmatch(entry.name) and entry.is_dir())
    except OSError as error:
        raise InputError(f"the folder '{folder}' cannot be read ({error.strerror}); check the path") from None


def _dump_file(folder: Path) -> Path | None:
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def _common(ours: dict[int, _T], theirs: dict[int, _T], what: str, remarks: list[str]) -> dict[int, tuple[_T, _T]]:
    """Pair by number; one against one whatever their numbers; in order where no number is common."""
    numbers = sorted(set(ours) & set(theirs))
    if (len(ours) == 1 and len(theirs) == 1) or (not numbers and len(ours) == len(theirs)):
        return {number: pair for number, pair in zip(ours, zip(ours.values(), theirs.values(), strict=True), strict=True)}
    if not numbers:
        raise InputError(f"no {what} is on both sides: {sorted(ours)} and {sorted(theirs)}; give folders that belong together")
    for side, numbers_of in (("NPU", ours), ("bench", theirs)):
        lone = sorted(set(numbers_of) - set(numbers))
        if lone:
            remarks.append(f"Only the {side} side has {what.partition(' ')[0]} {', '.join(map(str, lone))}: not compared.")
    return {number: (ours[number], theirs[number]) for number in numbers}
