# SPDX-License-Identifier: Apache-2.0
"""Run `compare_distributed`: compare all ranks of two dumps, each pair of ranks into a csv file of its own.

The folders may be the one that holds the ranks or one above, with a folder for each step before or after the tag:

    npu_dump/ptdbg_dump_v4.0/rank0      npu_dump/step0/ptdbg_dump_v4.0/rank0      npu_dump/ptdbg_dump_v4.0/step0/rank0
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ulpscope.compat.ptdbg.compare.compare_ptdbg import Dump, Options, compare_dumps, leaving_with_code
from ulpscope.compat.ptdbg.exceptions import CompareException

__all__ = ["compare_distributed"]

_OPTIONS = ("stack_mode", "auto_analyze", "fuzzy_match")
_RANK = re.compile(r"rank(\d{1,9})")
_STEP = re.compile(r"step(\d{1,9})")
_TAG = re.compile(r".*_v\d[\w.]*")


def compare_distributed(
    npu_dump_dir: str | os.PathLike[str], bench_dump_dir: str | os.PathLike[str], output_path: str | os.PathLike[str], **kwargs: Any
) -> list[Path]:
    """Compare the dumps of all ranks; returns the csv files. The optional parameters are those of `compare`.

    >>> compare_distributed("npu_dump/ptdbg_dump_v4.0", "gpu_dump/ptdbg_dump_v4.0", "output")  # doctest: +SKIP
    [PosixPath('output/compare_result_rank0-rank0_20231206101500.csv')]

    A rank is compared with the rank of the same number, or, where the numbers differ, with the one at the same place. With several steps
    each step has a folder of its own in `output_path`.
    """
    with leaving_with_code():
        options = _options(kwargs)
        output = _existing(output_path, "output_path")
        npu, bench = (_steps(_existing(path, name)) for path, name in ((npu_dump_dir, "npu_dump_dir"), (bench_dump_dir, "bench_dump_dir")))
        if set(npu) != set(bench):
            raise _bad_path(f"the dumps hold different steps, {sorted(npu)} and {sorted(bench)}: give two folders with the same steps")
        pairs = [(step, *pair) for step in sorted(npu) for pair in _rank_pairs(npu[step], bench[step])]
        dumps = [(step, ours, theirs, _dumps(step, ours, theirs)) for step, ours, theirs in pairs]
        tables = []
        for step, ours, theirs, sides in dumps:
            folder = output / f"step{step}" if len(npu) > 1 else output
            folder.mkdir(exist_ok=True)
            tables.append(compare_dumps(*sides, folder, options, suffix=f"_{ours.name}-{theirs.name}"))
        return tables


def _options(given: Mapping[str, Any]) -> Options:
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise CompareException(
            CompareException.INVALID_PARAM_ERROR, f"compare_distributed takes {', '.join(_OPTIONS)} besides its paths, not {unknown[0]}"
        )
    for name, value in given.items():
        if not isinstance(value, bool):
            raise CompareException(CompareException.INVALID_PARAM_ERROR, f"{name} has to be True or False, not {value!r}")
    return Options(**given, is_logging=True)


def _existing(path: str | os.PathLike[str], name: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise _bad_path(f"{name} is '{folder}', which is no folder; it has to be there already")
    return folder


def _steps(folder: Path) -> dict[int, list[Path]]:
    """Find the rank folders of each step; the step is 0 where the tree has no steps."""
    names = sorted(entry.name for entry in folder.iterdir())
    if names and all(_STEP.fullmatch(name) for name in names):
        return {int(name[4:]): _rank_folders(_through_tag(folder / name)) for name in names}
    inner = _through_tag(folder)
    return _steps(inner) if inner != folder else {0: _rank_folders(folder)}


def _through_tag(folder: Path) -> Path:
    """Enter the folder named after the tag and the version, where there is nothing else."""
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and _TAG.fullmatch(entries[0].name) and entries[0].is_dir() else folder


def _rank_folders(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir())
    strangers = [entry.name for entry in entries if not _RANK.fullmatch(entry.name)]
    if strangers or not entries:
        held = f"'{strangers[0]}', which is no folder of a rank" if strangers else "nothing"
        raise _bad_path(f"'{folder}' holds {held}: it has to hold folders named rank0, rank1 ... and nothing else")
    return sorted(entries, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name[4:])


def _rank_pairs(npu: list[Path], bench: list[Path]) -> list[tuple[Path, Path]]:
    if len(npu) != len(bench):
        raise _bad_path(
            f"'{npu[0].parent}' holds {len(npu)} ranks and '{bench[0].parent}' holds {len(bench)}: "
            "both runs need the same number of cards to be compared"
        )
    return list(zip(npu, bench, strict=True))


def _dumps(step: int, npu: Path, bench: Path) -> tuple[Dump, Dump]:
    """Return both sides of one rank; a dump of statistics has no folder of tensors, and then neither side may have one."""
    ours, theirs = (_dump(folder, step, _number(npu)) for folder in (npu, bench))
    if (ours.data is None) != (theirs.data is None):
        lacking = ours if ours.data is None else theirs
        raise CompareException(
            CompareException.INVALID_FILE_ERROR,
            f"'{lacking.pkl}' has no folder of tensors '{lacking.pkl.stem}' beside it, and the other side has one: "
            "copy the folder too, or dump both with summary_only",
        )
    return ours, theirs


def _dump(folder: Path, step: int, rank: int) -> Dump:
    files = sorted(entry for entry in folder.iterdir() if entry.suffix == ".pkl")
    if len(files) != 1:
        raise CompareException(
            CompareException.NO_DUMP_FILE_ERROR,
            f"'{folder}' holds {len(files)} dump files and has to hold one: leave the one to compare there",
        )
    data = files[0].with_suffix("")
    return Dump(files[0], data if data.is_dir() else None, rank, step)


def _bad_path(text: str) -> CompareException:
    return CompareException(CompareException.INVALID_PATH_ERROR, text)
