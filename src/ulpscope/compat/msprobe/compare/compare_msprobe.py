# SPDX-License-Identifier: Apache-2.0
"""Run `compare` of msprobe: two dumps in, the table that its users know out, with ulpscope's own finding and page beside it.

Dumps are compared by their tensors where both have them, by checksums where both have those, else by statistics. A dump is a dump.json, or
a folder of ranks or steps; ranks are partners by their numbers. A call on only one side is reported and has rows of its own.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ulpscope.compat.bridge import compare_beside, tell_beside
from ulpscope.compat.file_pairs import FilePairs, measuring_files
from ulpscope.compat.msprobe.compare.advice import write_old_advice
from ulpscope.compat.msprobe.compare.call_names import Translation, pair_calls
from ulpscope.compat.msprobe.compare.dump_places import Places, find_places
from ulpscope.compat.msprobe.compare.first_differences import write_first_differences
from ulpscope.compat.msprobe.compare.result_files import fresh_stamp, output_folder, write_csv, write_xlsx
from ulpscope.compat.msprobe.compare.result_rows import Edition, ResultRow, columns, is_good, result_rows
from ulpscope.compat.screen import print_info, print_warning
from ulpscope.errors import InputError
from ulpscope.judge.published.error_growth import Mode
from ulpscope.measure.written import measure_statistics
from ulpscope.model import Comparison, Run
from ulpscope.model.written import OldNumbers, WrittenCallPair, WrittenPair
from ulpscope.store.foreign.msprobe import open_files
from ulpscope.store.foreign.msprobe_words import WrittenDump, read_written
from ulpscope.workflows.compare.garbage import rare_collections

__all__ = ["CompareOptions", "compare", "compare_distributed", "compare_paths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of a comparison, from any of the doors."""

    edition: Edition = "26.x"
    xlsx: bool = False
    stacks: bool = True
    stack_path: Path | None = None
    advice: bool = False
    fuzzy: bool = False
    translation: Translation = field(default_factory=Translation)
    analyzes: bool = False
    is_logging: bool = False
    names_both: bool = False


def compare(
    input_param: Mapping[str, Any],
    output_path: str | os.PathLike[str],
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
) -> list[Path]:
    """Compare two dumps of 1.x from a script of one's own and return the paths of the xlsx files.

    >>> compare({"npu_json_path": "npu/step0/rank0/dump.json", "bench_json_path": "gpu/step0/rank0/dump.json",
    ...          "stack_json_path": "npu/step0/rank0/stack.json"}, "./output")  # doctest: +SKIP
    [PosixPath('output/compare_result_20240820101500.xlsx')]
    """
    target, golden, stacks, is_logging = read_param(input_param)
    options = _old_options(stack_mode, auto_analyze, fuzzy_match)
    return compare_paths(target, golden, Path(output_path), replace(options, stack_path=stacks, is_logging=is_logging))


def compare_distributed(
    npu_dump_dir: str | os.PathLike[str], bench_dump_dir: str | os.PathLike[str], output_path: str | os.PathLike[str], **kwargs: Any
) -> list[Path]:
    """Compare all ranks of two dumps of 1.x; the optional parameters are those of `compare`.

    >>> compare_distributed("npu/step0", "gpu/step0", "./output")  # doctest: +SKIP
    [PosixPath('output/compare_result_rank0-rank0_20240820101500.xlsx')]
    """
    unknown = sorted(set(kwargs) - {"stack_mode", "auto_analyze", "fuzzy_match"})
    if unknown:
        raise InputError(f"compare_distributed takes stack_mode, auto_analyze and fuzzy_match besides its paths, not {unknown[0]}")
    options = _old_options(**{"stack_mode": False, "auto_analyze": True, "fuzzy_match": False, **kwargs})
    return compare_paths(Path(npu_dump_dir), Path(bench_dump_dir), Path(output_path), replace(options, names_both=True, is_logging=True))


def _old_options(stack_mode: object, auto_analyze: object, fuzzy_match: object) -> CompareOptions:
    given = {"stack_mode": stack_mode, "auto_analyze": auto_analyze, "fuzzy_match": fuzzy_match}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} has to be True or False, not {value!r}")
    return CompareOptions(edition="1.x", xlsx=True, stacks=bool(stack_mode), advice=bool(auto_analyze), fuzzy=bool(fuzzy_match))


def read_param(param: Mapping[str, Any]) -> tuple[Path, Path, Path | None, bool]:
    """Read target, golden, stacks and whether to log, from a compare.json or a script; both spellings of the keys count."""
    if not isinstance(param, Mapping):
        raise InputError(f"the parameters of a comparison have to be an object with npu_path and bench_path, not {type(param).__name__}")
    paths = [param.get(f"{side}_path") or param.get(f"{side}_json_path") for side in ("npu", "bench", "stack")]
    for name, path in zip(("npu_path", "bench_path", "stack_path"), paths, strict=True):
        if not isinstance(path, (str, os.PathLike)) and not (name == "stack_path" and path is None):
            raise InputError(f"{name} is {path!r}, not a path: give a dump.json, or the folder of a step, for npu_path and bench_path")
    is_logging = param.get("is_print_compare_log", False)
    if not isinstance(is_logging, bool):
        raise InputError(f"is_print_compare_log has to be true or false, not {is_logging!r}")
    return Path(paths[0]), Path(paths[1]), Path(paths[2]) if paths[2] else None, is_logging  # type: ignore[arg-type]


@rare_collections()
def compare_paths(target: Path, golden: Path, output: Path, options: CompareOptions) -> list[Path]:
    """Compare two dumps into tables in `output`, write the page and print the finding; return the tables."""
    places = find_places(target, golden)
    for remark in places.remarks:
        print_warning(remark)
    folder = output_folder(output)
    stamp = fresh_stamp(folder)
    comparison = compare_beside(lambda: _opened(places))
    if comparison is not None:
        tell_beside(comparison, folder / f"compare_result_{stamp}.html")
    tables = [_compare_place(places, number, folder, stamp, options, comparison) for number in range(len(places.pairs))]
    if comparison is not None:
        if options.analyzes:
            write_first_differences(comparison, places, folder)
    elif options.analyzes:
        print_warning("diff_analyze needs our own comparison, which these dumps do not allow: no diff_analyze file is written.")
    return tables


def _compare_place(places: Places, number: int, folder: Path, stamp: str, options: CompareOptions, comparison: Comparison | None) -> Path:
    pair = places.pairs[number]
    target, golden = read_written(pair.target, options.stack_path), read_written(pair.golden)
    mode = _mode(target, golden)
    if len(places.steps) > 1:
        folder = output_folder(folder / f"step{pair.step}")
    kind = "debug_compare_result" if pair.target.name == "debug.json" else "compare_result"
    table = folder / f"{kind}{pair.suffix(both=options.names_both)}_{stamp}.{'xlsx' if options.xlsx else 'csv'}"
    print_info(f"Comparing {pair.target} with {pair.golden} by {mode}: {len(target.calls)} and {len(golden.calls)} APIs and modules.")
    translation = replace(options.translation, frameworks=target.framework != golden.framework)
    calls = pair_calls(target, golden, translation, fuzzy=options.fuzzy)
    stacks = options.stacks and target.has_stacks
    rows = list(_rows(calls, target, golden, mode, options, comparison, (pair.rank, pair.step), stacks=stacks))
    write = write_xlsx if options.xlsx else write_csv
    write(table, columns(options.edition, mode, stacks=stacks), rows)
    _tell_table(table, calls, rows)
    if options.advice:
        write_old_advice(calls, rows, table.with_name(f"advisor{pair.suffix(both=options.names_both)}_{stamp}.txt"))
    return table


def _mode(target: WrittenDump, golden: WrittenDump) -> Mode:
    """Choose the way to compare that both dumps allow; values can always be compared by their statistics."""
    modes = target.mode, golden.mode
    if modes[0] == modes[1]:
        return modes[0]
    if "md5" in modes:
        checksums, values = (target, golden) if modes[0] == "md5" else (golden, target)
        has_numbers = any(value.statistics[0] is not None for call in checksums.calls for value in call.values if value.is_tensor)
        if not has_numbers:
            raise InputError(f"'{checksums.path}' holds checksums and '{values.path}' holds values: dump both with the same summary_mode")
    return "statistics"


def _rows(
    calls: Sequence[WrittenCallPair],
    target: WrittenDump,
    golden: WrittenDump,
    mode: Mode,
    options: CompareOptions,
    comparison: Comparison | None,
    place: tuple[int, int],
    *,
    stacks: bool,
) -> Iterator[ResultRow]:
    folders = target.tensors, golden.tensors
    with measuring_files(*folders, comparison, place) if mode == "tensor" else nullcontext() as files:
        asked = [(call, [_ask(files, pair) for pair in call.values]) for call in calls]
        for call, answers in asked:
            numbers = (answer.result() if answer else None for answer in answers)
            measured = list(map(measure_statistics, call.values, numbers))
            for row in result_rows(call, measured, options.edition, mode, stacks=stacks):
                if options.is_logging:
                    print_info(f"[{row.cells[0]}] against [{row.cells[1]}]: {row.verdict or 'nothing to say'}")
                yield row


def _ask(files: FilePairs | None, pair: WrittenPair) -> Future[OldNumbers] | None:
    subject, reference = pair.subject, pair.reference
    if files is None or subject is None or reference is None or not (subject.file or reference.file):
        return None
    return files.ask(subject.file or f"{subject.name}.pt", reference.file or f"{reference.name}.pt")


def _tell_table(table: Path, calls: Sequence[WrittenCallPair], rows: Sequence[ResultRow]) -> None:
    counts = Counter(row.verdict or "without a warning" for row in rows)
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    print_info(f"The comparison result is in {table}: {len(rows)} rows; by the rule of msprobe: {words}.")
    for side, missing in (("NPU", "reference"), ("bench", "subject")):
        lone = [call.name for call in calls if getattr(call, missing) is None]
        if lone:
            print_warning(f"{len(lone)} APIs or modules of the {side} dump have no partner, the first is {lone[0]}.")
    if not any(is_good(row.verdict) for row in rows):
        print_warning("No row could be compared and found good: do the two dumps belong together?")


def _opened(places: Places) -> tuple[Run, Run]:
    """Open both dumps as runs, each pair of files at the same rank and step."""
    numbers = [(pair.rank, pair.step) for pair in places.pairs]
    target = dict(zip(numbers, (pair.target for pair in places.pairs), strict=True))
    golden = dict(zip(numbers, (pair.golden for pair in places.pairs), strict=True))
    return open_files(places.target, target), open_files(places.golden, golden)
