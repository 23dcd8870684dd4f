# SPDX-License-Identifier: Apache-2.0
"""Run `compare`: two dump files in, the csv that old users know out, the advisor's text, and ulpscope's own finding beside them.

The result follows the guide of version 4.0. A dump without tensors is compared by its statistics, one of checksums by these. Stacks are
found by themselves; `stack_mode` says whether they are shown.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ulpscope.compat.bridge import compare_beside, tell_beside
from ulpscope.compat.file_pairs import FilePairs, measuring_files, settled
from ulpscope.compat.ptdbg.compare.advice_file import tell_unmatched, write_advice
from ulpscope.compat.ptdbg.compare.columns import (
    MD5_COLUMNS,
    NAN,
    STACK_COLUMN,
    SUMMARY_COLUMNS,
    TENSOR_COLUMNS,
    difference_cell,
    message_of,
    number_cells,
    statistic_cell,
)
from ulpscope.compat.ptdbg.compare.partner_keys import Match, match_operators
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.screen import print_error, print_info, print_warning
from ulpscope.errors import DamagedRunError, InputError
from ulpscope.judge.published.advice import advise
from ulpscope.judge.published.cosine_rule import accuracy_word
from ulpscope.judge.published.row_colours import checksum_word
from ulpscope.model import Comparison, Run
from ulpscope.model.written import OldNumbers, WrittenPair, WrittenValue
from ulpscope.report.comparison.table import defused
from ulpscope.report.replacing import replacing
from ulpscope.store.foreign.ptdbg import open_file
from ulpscope.store.foreign.ptdbg_lines import WrittenFile, read_written

__all__ = ["Dump", "Options", "compare", "compare_dumps", "leaving_with_code"]

_PATHS = ("npu_pkl_path", "bench_pkl_path", "npu_dump_data_dir", "bench_dump_data_dir")
_REMARKS = {
    "fuzzy": "Fuzzy match: the two names differ in the number of the call.",
    "aten": "The names are those of an aten operator and of a function that it comes from.",
}


@dataclass(frozen=True, slots=True)
class Dump:
    """One side: the dump file, the folder of its tensors if there is one, and its rank and step."""

    pkl: Path
    data: Path | None
    rank: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The optional parameters of `compare`, and whether to print every tensor."""

    stack_mode: bool = False
    auto_analyze: bool = True
    fuzzy_match: bool = False
    is_logging: bool = False


def compare(
    input_param: Mapping[str, Any],
    output_path: str | os.PathLike[str],
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
) -> Path:
    """Compare the dump of an NPU with that of a CPU or GPU and return the path of the csv file.

    >>> compare({"npu_pkl_path": "npu/dump.pkl", "bench_pkl_path": "gpu/dump.pkl",
    ...          "npu_dump_data_dir": "npu/dump", "bench_dump_data_dir": "gpu/dump"}, "output")  # doctest: +SKIP
    PosixPath('output/compare_result_20231206101500.csv')

    Input that cannot be compared ends the process with the old code, after one sentence.
    """
    with leaving_with_code():
        npu, bench = _sides(input_param)
        options = Options(
            stack_mode=_switch("stack_mode", stack_mode),
            auto_analyze=_switch("auto_analyze", auto_analyze),
            fuzzy_match=_switch("fuzzy_match", fuzzy_match),
            is_logging=_switch("is_print_compare_log", input_param.get("is_print_compare_log", False)),
        )
        return compare_dumps(npu, bench, _output_folder(output_path), options)


@contextmanager
def leaving_with_code() -> Iterator[None]:
    """Turn an InputError into one sentence on the screen and the exit code of the old tool."""
    try:
        yield
    except InputError as error:
        print_error(str(error))
        is_damaged = isinstance(error, DamagedRunError)
        other = CompareException.INVALID_DUMP_FILE if is_damaged else CompareException.INVALID_PATH_ERROR
        raise SystemExit(getattr(error, "code", other)) from None


def _sides(input_param: Mapping[str, Any]) -> tuple[Dump, Dump]:
    if not isinstance(input_param, Mapping):
        raise _wrong(f"input_param has to be a dict with the keys {', '.join(_PATHS)}, not {type(input_param).__name__}")
    given = {key: input_param.get(key) for key in _PATHS}
    for key, value in given.items():
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise _wrong(f"input_param['{key}'] has to be a path, not {type(value).__name__}")
    npu, bench, npu_data, bench_data = (Path(value) if value else None for value in given.values())
    if npu is None or bench is None:
        raise _wrong("input_param has to name both dump files, as 'npu_pkl_path' and 'bench_pkl_path'")
    if (npu_data is None) != (bench_data is None):
        raise _wrong("input_param names the folder of tensors of one side only: give both, or neither to compare by statistics")
    return Dump(npu, npu_data), Dump(bench, bench_data)


def _switch(name: str, value: object) -> bool:
    """Parse a bool; the template of the old guide prints it in quotes."""
    words = {"True": True, "False": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in words:
        return words[value]
    raise _wrong(f"{name} has to be True or False, not {value!r}")


def _wrong(text: str) -> CompareException:
    return CompareException(CompareException.INVALID_PARAM_ERROR, text)


def _output_folder(output_path: str | os.PathLike[str]) -> Path:
    if not isinstance(output_path, (str, os.PathLike)):
        raise _wrong(f"output_path has to be a folder, not {type(output_path).__name__}")
    folder = Path(output_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompareException(
            CompareException.INVALID_PATH_ERROR, f"the output folder '{folder}' cannot be made ({error.strerror}); choose another"
        ) from None
    return folder


def compare_dumps(npu: Dump, bench: Dump, output: Path, options: Options, suffix: str = "") -> Path:
    """Write the csv file, the advice and the page into an existing folder; return the csv file."""
    files = read_written(npu.pkl), read_written(bench.pkl)
    _tell_strangers(files)
    mode = _mode(npu, bench, files)
    matches = list(match_operators(files[0].calls, files[1].calls, fuzzy=options.fuzzy_match))
    stamp = _stamp(output, suffix)
    table = output / f"compare_result{suffix}_{stamp}.csv"
    print_info(f"Comparing {npu.pkl} with {bench.pkl}: {len(files[0].calls)} and {len(files[1].calls)} APIs.")
    comparison = compare_beside(lambda: _opened(npu, bench))
    rows = list(mode.rows(matches, npu, bench, options, comparison))
    _write(table, mode.columns, rows, matches if options.stack_mode else None, has_stacks=all(file.has_stacks for file in files))
    if comparison is not None:
        tell_beside(comparison, table.with_suffix(".html"))
    _tell_result(table, matches, files, rows, mode.columns)
    if options.auto_analyze and mode.columns is TENSOR_COLUMNS:
        names, words = [row[0] for row in rows], [row[-2] for row in rows]
        tell_unmatched(names, words)
        advice = advise(names, words)
        write_advice(advice, "NA" if advice.row is None else names[advice.row], output / f"advisor_{stamp}.txt")
    return table


def _tell_strangers(files: Sequence[WrittenFile]) -> None:
    for file in files:
        if file.strangers:
            print_warning(f"{file.strangers} lines of {file.path} name no part of an API and are left out.")


def _stamp(output: Path, suffix: str) -> str:
    """Return the time to the second, or a later second if results of that second exist already."""
    now = time.time()
    while True:
        stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))
        if not (output / f"compare_result{suffix}_{stamp}.csv").exists() and not (output / f"advisor_{stamp}.txt").exists():
            return stamp
        now += 1


# --- rows of the three kinds of comparison

_Rows = Callable[[Sequence[Match], Dump, Dump, Options, Comparison | None], Iterator[list[str]]]


@dataclass(frozen=True, slots=True)
class _Mode:
    """One kind of comparison: its columns, and how it fills them."""

    columns: tuple[str, ...]
    rows: _Rows


def _mode(npu: Dump, bench: Dump, files: Sequence[WrittenFile]) -> _Mode:
    of_checksums = [file.has_checksums_only for file in files]
    if all(of_checksums):
        return _Mode(MD5_COLUMNS, _checksum_rows)
    if any(of_checksums):
        checksums, values = (file.path for file in sorted(files, key=lambda file: not file.has_checksums_only))
        raise _wrong(f"'{checksums}' holds checksums and '{values}' holds values: dump both in the same mode")
    return _Mode(TENSOR_COLUMNS, _tensor_rows) if npu.data and bench.data else _Mode(SUMMARY_COLUMNS, _summary_rows)


def _tensor_rows(matches: Sequence[Match], npu: Dump, bench: Dump, options: Options, comparison: Comparison | None) -> Iterator[list[str]]:
    assert npu.data is not None
    assert bench.data is not None
    with _measuring(npu.data, bench.data, comparison, (npu.rank, npu.step)) as files:
        asked = [(match, *lines, _ask(files, *lines)) for match in matches for lines in _line_pairs(match)]
        for match, ours, theirs, answer in asked:
            found = answer.result()
            verdict, (cosine, max_abs, max_rel) = accuracy_word(found), number_cells(found)
            message = " ".join(filter(None, (message_of(found), _types_remark(ours, theirs), _REMARKS.get(match.rule, ""))))
            if options.is_logging:
                print_info(f"[{ours.name}] Compare start, bench: {theirs.name if theirs else NAN}")
                print_info(f"[{ours.name}] Cosine {cosine}, MaxAbsErr {max_abs}, MaxRelativeErr {max_rel}, {verdict}. {message}")
            statistics = [*_statistics(ours, 3), *_statistics(theirs, 3)]
            yield [*_name_cells(ours, theirs), cosine, max_abs, max_rel, *statistics, verdict, message]


@contextmanager
def _measuring(npu: Path, bench: Path, comparison: Comparison | None, place: tuple[int, int]) -> Iterator[FilePairs]:
    for path in (npu, bench):
        if not path.is_dir():
            raise InputError(f"the folder of tensors '{path}' cannot be read (No such directory); check the path")
    with measuring_files(npu, bench, comparison, place) as files:
        yield files


def _ask(files: FilePairs, npu: WrittenValue, bench: WrittenValue | None) -> Future[OldNumbers]:
    if bench is None:
        return settled(OldNumbers(failure="No bench data matched."))
    return files.ask(f"{npu.name}.npy", f"{bench.name}.npy")


def _summary_rows(matches: Sequence[Match], npu: Dump, bench: Dump, options: Options, comparison: Comparison | None) -> Iterator[list[str]]:
    for ours, theirs in (lines for match in matches for lines in _line_pairs(match)):
        left = (*ours.statistics, None, None, None, None)[:4]
        right = (*(theirs.statistics if theirs else ()), None, None, None, None)[:4]
        differences = [difference_cell(one, other) for one, other in zip(left, right, strict=True)]
        yield [*_name_cells(ours, theirs), *differences, *_statistics(ours, 4), *_statistics(theirs, 4)]


def _checksum_rows(
    matches: Sequence[Match], npu: Dump, bench: Dump, options: Options, comparison: Comparison | None
) -> Iterator[list[str]]:
    for ours, theirs in (lines for match in matches for lines in _line_pairs(match)):
        checksums = ours.checksum or "", (theirs.checksum or "") if theirs else NAN
        yield [*_name_cells(ours, theirs), *checksums, checksum_word(WrittenPair(ours, theirs))]


def _line_pairs(match: Match) -> Iterator[tuple[WrittenValue, WrittenValue | None]]:
    """Yield the tensors of the NPU operator with those of its partner at the same place."""
    for role in ("input", "output"):
        ours, theirs = ([line for line in (call.values if call else ()) if line.role == role] for call in (match.npu, match.bench))
        yield from zip_longest(ours, theirs[: len(ours)])


def _name_cells(npu: WrittenValue, bench: WrittenValue | None) -> list[str]:
    if bench is None:
        return [npu.name, NAN, npu.dtype, NAN, npu.shape, NAN]
    return [npu.name, bench.name, npu.dtype, bench.dtype, npu.shape, bench.shape]


def _statistics(line: WrittenValue | None, number: int) -> list[str]:
    return [statistic_cell(value) for value in ((*line.statistics, *[None] * number) if line else [None] * number)[:number]]


def _types_remark(npu: WrittenValue, bench: WrittenValue | None) -> str:
    return f"The types differ: {npu.dtype} and {bench.dtype}." if bench is not None and npu.dtype != bench.dtype else ""


# --- files and screen


def _write(table: Path, columns: Sequence[str], rows: Sequence[list[str]], matches: Sequence[Match] | None, *, has_stacks: bool) -> None:
    """Write the csv file, with a column of stacks where `matches` are given."""
    stacks = None if matches is None else [stack if has_stacks else "" for match in matches for stack in _stack_cells(match)]
    if stacks is not None and not has_stacks:
        print_warning("stack_mode is on, but not both dumps hold stacks: the column of stacks stays empty.")
    with replacing(table) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*columns, *([STACK_COLUMN] if stacks is not None else [])])
        for at, row in enumerate(rows):
            cells = [*row, *([stacks[at]] if stacks is not None else [])]
            writer.writerow([_cell(cell) for cell in cells])
        temporary.chmod(0o640)


def _stack_cells(match: Match) -> Iterator[str]:
    """Yield the stack on the first row of an operator that has a partner, nothing on the others."""
    shown = match.npu.stack if match.bench is not None else ""
    for at, _ in enumerate(match.npu.values):
        yield shown if at == 0 else ""


def _cell(text: str) -> str:
    """Keep numbers as they are, also negative ones; make other texts safe for a spreadsheet."""
    try:
        float(text)
    except ValueError:
        return defused(text)
    return text


def _tell_result(
    table: Path, matches: Sequence[Match], files: Sequence[WrittenFile], rows: Sequence[list[str]], columns: Sequence[str]
) -> None:
    matched = sum(match.bench is not None for match in matches)
    print_info(f"The comparison result is in {table}: {len(rows)} rows.")
    if matched < len(matches):
        print_warning(f"{len(matches) - matched} APIs of the NPU dump have no partner; their rows say No bench data matched.")
    if matched < len(files[1].calls):
        print_warning(f"{len(files[1].calls) - matched} APIs of the bench dump have no partner and no row.")
    if columns is TENSOR_COLUMNS:
        undecided = sum(row[-2] == NAN and row[1] != NAN for row in rows)
        if undecided:
            print_warning(f"{undecided} rows have no cosine, so nothing is decided: Accuracy Reached or Not is {NAN} there.")


def _opened(npu: Dump, bench: Dump) -> tuple[Run, Run]:
    ours, theirs = (open_file(side.pkl, side.data or side.pkl.with_suffix(""), rank=npu.rank, step=npu.step) for side in (npu, bench))
    return ours, theirs
