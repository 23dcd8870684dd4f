# SPDX-License-Identifier: Apache-2.0
"""Run `msprobe acc_check` and `multi_acc_check`, in 1.x `run_ut` and `multi_run_ut`: check every API of a dump.json alone.

accuracy_checking_result_{time}.csv     one row for each API: pass, warning, error or SKIP for forward and backward
accuracy_checking_details_{time}.csv    one row for each result, with its figures under the headings that msprobe gives them
ut_error_data{time}/                    with -save_error_data: inputs and outputs of what failed
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ulpscope._shell import as_path, command_line
from ulpscope.compat.checker.checker_tables import RESULT_COLUMNS, finished_apis
from ulpscope.compat.checker.run_ut import best_device, print_progress, print_tables, save_error_data
from ulpscope.compat.msprobe.compare.result_files import fresh_stamp, output_folder
from ulpscope.compat.msprobe.config import TaskConfig, read_config
from ulpscope.errors import InputError
from ulpscope.model.check.check_details import CheckDetail, CheckOutcome
from ulpscope.model.written import WrittenCall
from ulpscope.report.comparison.table import defused
from ulpscope.report.escaping import visible
from ulpscope.report.replacing import replacing
from ulpscope.store.foreign.check_table import UPSTREAM_COLUMNS
from ulpscope.store.foreign.msprobe import open_dump
from ulpscope.store.foreign.msprobe_words import read_written
from ulpscope.workflows.check.checking import check_run
from ulpscope.workflows.check.old_tables import STATUS_WORDS, details_of, outcomes_of

__all__ = ["DETAIL_COLUMNS", "existing_device", "run_check", "write_table"]

_MOST_SPLITS = 64
_MOST_A_DEVICE = 8
_DECIMALS = 14
_FIGURES = {heading: metric for heading, metric in UPSTREAM_COLUMNS.items() if not heading.isascii() or heading.startswith("inf")}
DETAIL_COLUMNS = ("API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *_FIGURES, "Status", "Message")


def run_check(given: argparse.Namespace) -> int:
    """Run the command; return 0 if the check ran to its end, whatever it found."""
    dump: Path = given.api_info_file
    if not dump.is_file():
        raise InputError(f"there is no '{dump}': give the dump.json whose APIs are to be checked")
    if not given.out_path.is_dir():
        raise InputError(f"the out_path '{given.out_path}' is no folder; make it first")
    jobs, devices = _jobs(given)
    chosen = read_config(given.config_path).options if given.config_path else TaskConfig()
    names = _Names(dump)
    earlier = _earlier(given.result_csv_path, names)
    if earlier and not names.without(set(names) - {row[0] for row in earlier}):
        print(visible(f"everything in '{dump}' is in '{given.result_csv_path}' already: there is nothing left to check"))
        return 0
    select = [*_listed(chosen), *names.without(row[0] for row in earlier), *(names.without(names.repeated()) if given.filter_api else ())]
    stamp = fresh_stamp(given.out_path)
    result, details = (given.out_path / f"accuracy_checking_{kind}_{stamp}.csv" for kind in ("result", "details"))
    with tempfile.TemporaryDirectory(prefix="ulpscope-ut-") as scratch:
        check = check_run(
            dump,
            device=devices,
            rules="checker",
            edition="2024" if given.framework else "26.2",
            jobs=jobs,
            select=select or None,
            save_failures=scratch if given.save_error_data else None,
            journal=result.with_suffix(".csv.journal"),
            progress=print_progress if sys.stderr.isatty() else None,
        )
        if given.save_error_data:
            kept = output_folder(Path(chosen.error_data_path)) if given.config_path else given.out_path
            save_error_data(Path(scratch), kept / f"ut_error_data{stamp}")
    write_table(result, RESULT_COLUMNS, [*earlier, *map(_result, outcomes_of(check.calls))])
    write_table(details, DETAIL_COLUMNS, [_detail(row) for call in check.calls for row in details_of(call)])
    result.with_suffix(".csv.journal").unlink(missing_ok=True)
    print_tables(check)
    places = visible(f"'{result}' and '{details}'")
    print(f"the results are in {places}; the same by our own yardstick: {command_line('ulpscope', 'check', as_path(dump))}")
    return 0


def _jobs(given: argparse.Namespace) -> tuple[int, tuple[str, ...]]:
    if min(given.device) < 0:
        raise InputError(f"-d takes indices of devices from 0 up, not {min(given.device)}")
    devices = tuple(dict.fromkeys(existing_device(index) for index in given.device))
    jobs = getattr(given, "num_splits", 1)
    if not 1 <= jobs <= _MOST_SPLITS:
        raise InputError(f"-n takes 1 to {_MOST_SPLITS} processes, not {jobs}")
    if hasattr(given, "num_splits") and jobs > _MOST_A_DEVICE * len(given.device):
        raise InputError(f"-n {jobs} is more than {_MOST_A_DEVICE} processes for each of {len(given.device)} devices; name more with -d")
    return jobs, devices


def existing_device(index: int) -> str:
    """Return the accelerator of that index, or the CPU where there is no accelerator at all."""
    import torch

    device = best_device(index)
    kind = device.partition(":")[0]
    count = getattr(torch, kind).device_count() if kind != "cpu" else 0
    if kind != "cpu" and index >= count:
        raise InputError(f"there is no device {device}: this machine has {count}; give another index with -d")
    return device


def _listed(chosen: TaskConfig) -> list[str]:
    """Turn white and black list into a selection; a name in both lists is not checked."""
    if chosen.white_list:
        wanted = [name for name in chosen.white_list if name not in chosen.black_list]
        if not wanted:
            raise InputError("the black_list names everything that the white_list does: there is nothing to check")
        return wanted
    return [f"!{name}" for name in chosen.black_list]


class _Names:
    """The calls of a dump, by msprobe's name and by ulpscope's."""

    def __init__(self, dump: Path) -> None:
        self._dump = dump
        self._ours: dict[str, str] = {}
        run = open_dump(dump)
        for record in (record for rank in run.ranks() for step in run.steps(rank) for record in run.records(rank, step)):
            key, _, phase = record.recorded_as.rpartition(".")
            if phase == "forward":
                self._ours[key] = str(record.call)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ours)

    def without(self, keys: Iterable[str]) -> list[str]:
        """Return a selection that leaves these calls out."""
        return [f"!{self._ours[key]}" for key in keys if key in self._ours]

    def repeated(self) -> Iterator[str]:
        """Yield calls whose operation, arguments, dtypes, shapes and extremes an earlier call had already."""
        seen: set[tuple[object, ...]] = set()
        for call in read_written(self._dump).calls:
            key, _, phase = call.name.rpartition(".")
            if phase != "forward" or key not in self._ours:
                continue
            likeness = (key.rpartition(".")[0], *_arguments(call))
            if likeness in seen:
                yield key
            seen.add(likeness)


def _arguments(call: WrittenCall) -> Iterator[tuple[object, ...]]:
    for value in call.values:
        if value.role == "input":
            yield value.name[len(call.name) :], value.dtype, value.shape, *value.statistics[:2]


def _earlier(path: Path | None, names: _Names) -> list[list[str]]:
    """Read the rows of a check that broke off; refuse rows of another dump."""
    if path is None:
        return []
    rows = finished_apis(path)
    if not rows:
        raise InputError(f"'{path}' is no accuracy_checking_result csv of an earlier check; give the one that broke off")
    stranger = next((row[0] for row in rows if row[0] not in names), None)
    if stranger is not None:
        raise InputError(
            f"'{path}' is the result of another dump: it has '{stranger}', and this dump has not; "
            "give the csv that belongs to this dump, or leave -csv_path out"
        )
    return rows


def _result(one: CheckOutcome) -> list[str]:
    return [one.key, *(STATUS_WORDS[status] if status else "" for status in (one.forward, one.backward)), one.message]


def _detail(one: CheckDetail) -> list[str]:
    figures = (one.metrics.get(metric) for metric in _FIGURES.values())
    shape = str(list(one.shape)) if one.shape is not None and one.dtype else ""
    words = [" " if value is None else f"{value:.{_DECIMALS}f}" for value in figures]
    dtypes = (f"torch.{dtype}" if dtype else "" for dtype in (one.golden_dtype, one.dtype))
    return [one.name, *dtypes, shape, *words, STATUS_WORDS[one.status], one.message]


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a csv file; a text that a spreadsheet would run as a formula gets an apostrophe."""
    with replacing(path) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows([cell if _is_number(cell) else defused(cell) for cell in row] for row in rows)
        temporary.chmod(0o640)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
