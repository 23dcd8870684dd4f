# SPDX-License-Identifier: Apache-2.0
"""Run `run_ut.py`: check every API of a dump alone, judge it by the rules of the old tool, and write its csv files and tables.

python run_ut.py -forward ./forward_info_0.json -backward ./backward_info_0.json [-save_error_data] [--out_path DIR]
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ulpscope._shell import as_path, command_line
from ulpscope.compat.checker.checker_config import msCheckerConfig
from ulpscope.compat.checker.checker_tables import finished_apis, write_details, write_results
from ulpscope.compat.parsers import CommandParser
from ulpscope.errors import InputError, sentence_for
from ulpscope.model import TensorData
from ulpscope.model.check.checks import Check
from ulpscope.report.escaping import visible
from ulpscope.workflows.check.checking import check_run
from ulpscope.workflows.check.old_tables import details_of, outcomes_of, own_name, saved_failures

__all__ = ["best_device", "main", "print_progress", "print_tables", "save_error_data"]

_RESULT = re.compile(r"accuracy_checking_result(?:_(?P<time>\d{14}))?\.csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if it ran to its end, whatever it found, as the old tool did."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        print(f"run_ut: {visible(' '.join(sentence.splitlines()))}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="run_ut.py",
        description="Run every API of a dump alone and compare it with a higher precision.",
        epilog="Example: python run_ut.py -forward ./forward_info_0.json -backward ./backward_info_0.json",
    )
    parser.add_argument("-forward", "--forward_input_file", required=True, type=Path, help="forward_info_{pid}.json")
    parser.add_argument("-backward", "--backward_input_file", type=Path, help="backward_info_{pid}.json")
    parser.add_argument("-o", "--out_path", type=Path, default=Path("./"), help="folder of the results")
    parser.add_argument("-save_error_data", action="store_true", help="keep inputs and outputs of APIs that fail")
    parser.add_argument("-j", "--jit_compile", action="store_true", help="accepted; nothing is compiled here")
    parser.add_argument("-d", "--device", type=int, default=0, help="index of the device; the CPU where there is none")
    parser.add_argument("-csv_path", "--result_csv_path", type=Path, help="result csv of a check that broke off: go on after it")
    return parser


def _run(options: argparse.Namespace) -> None:
    for file in filter(None, (options.forward_input_file, options.backward_input_file)):
        if not file.is_file() or file.suffix != ".json":
            raise InputError(f"'{file}' is no json file of a dump; give the forward_info_*.json that the dump wrote")
    if not options.out_path.is_dir():
        raise InputError(f"the out_path '{options.out_path}' is no folder; make it first")
    result, details, earlier = _files(options)
    done = [f"!{own_name(row[0])}" for row in earlier]
    device = best_device(options.device)
    with tempfile.TemporaryDirectory(prefix="ulpscope-ut-") as scratch:
        check = check_run(
            options.forward_input_file,
            backward=options.backward_input_file,
            device=device,
            rules="checker",
            select=done or None,
            save_failures=scratch if options.save_error_data else None,
            journal=result.with_suffix(".csv.journal"),
            progress=print_progress if sys.stderr.isatty() else None,
        )
        if options.save_error_data:
            save_error_data(Path(scratch), _error_folder())
    write_results(result, outcomes_of(check.calls), earlier)
    write_details(details, [row for call in check.calls for row in details_of(call)], msCheckerConfig.precision)
    result.with_suffix(".csv.journal").unlink(missing_ok=True)
    print_tables(check)
    command = command_line("ulpscope", "check", as_path(options.forward_input_file))
    places = visible(f"'{result}' and '{details}'")
    print(f"the results are in {places}; the same by our own yardstick: {command}")


def _files(options: argparse.Namespace) -> tuple[Path, Path, list[list[str]]]:
    """Choose the result files, and read the rows of a check that is continued. An existing result is never overwritten."""
    if options.result_csv_path is not None:
        match = _RESULT.fullmatch(options.result_csv_path.name)
        earlier = finished_apis(options.result_csv_path)
        if match is None or not earlier:
            raise InputError(
                f"'{options.result_csv_path}' is no accuracy_checking_result csv of an earlier check; give the one that broke off"
            )
        _check_same_dump(options, earlier)
    else:
        earlier = []
    stamp = f"_{time.strftime('%Y%m%d%H%M%S')}" if earlier or _taken(options.out_path) else ""
    folder = options.out_path
    return folder / f"accuracy_checking_result{stamp}.csv", folder / f"accuracy_checking_details{stamp}.csv", earlier


def _taken(folder: Path) -> bool:
    return any((folder / f"accuracy_checking_{kind}.csv").exists() for kind in ("result", "details"))


def _check_same_dump(options: argparse.Namespace, earlier: list[list[str]]) -> None:
    text = options.forward_input_file.read_text(encoding="utf-8", errors="replace")
    foreign = next((row[0] for row in earlier if f'"{row[0]}' not in text), None)
    if foreign is not None:
        raise InputError(
            f"'{options.result_csv_path}' is the result of another dump: it has '{foreign}', and '{options.forward_input_file}' has not; "
            "give the csv that belongs to this dump, or leave -csv_path out"
        )


def best_device(index: int) -> str:
    """Return the accelerator of that index, or the CPU."""
    import torch

    if not hasattr(torch, "npu") and find_spec("torch_npu") is not None:
        __import__("torch_npu")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return f"npu:{index}"
    return f"cuda:{index}" if torch.cuda.is_available() else "cpu"


def _error_folder() -> Path:
    folder = Path(msCheckerConfig.error_data_path) / "ut_error_data"
    if folder.exists():
        folder = folder.with_name(f"ut_error_data{time.strftime('%Y%m%d%H%M%S')}")
    return folder


def save_error_data(kept: Path, folder: Path) -> None:
    """Save the inputs and results of failed calls under the names of the old tool."""
    for failure in saved_failures(kept):
        stem = f"{failure.key.replace('*', '.')}.{failure.phase}"
        for name, tensor in failure.tensors.items():
            side, _, slot = name.rpartition("output.") if "output." in name else ("", "", name)
            number = (slot or name).rpartition(".")[2]
            if side:
                _save(folder / f"{stem}.output.{'bench' if side.startswith('exact') else 'device'}.{number}.pt", tensor)
            else:
                _save(folder / f"{stem}.input.{number}.pt", tensor)


def _save(file: Path, tensor: TensorData) -> None:
    from ulpscope.compat.pt_files import save_pt

    file.parent.mkdir(parents=True, exist_ok=True)
    save_pt(file, tensor.dtype, tensor.shape, tensor.buffer)


def print_progress(done: int, total: int) -> None:
    """Draw a progress bar on the terminal."""
    width = 40 * done // max(total, 1)
    print(f"\r[{'#' * width}{' ' * (40 - width)}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr)


def print_tables(check: Check) -> None:
    """Print two tables as wide as the old ones: how many APIs passed, and where the others failed."""
    from rich.console import Console
    from rich.table import Table

    judged = [one for one in outcomes_of(check.calls) if "skipped" not in (one.forward, one.backward)]
    failed = [(one.forward in ("failed", "warning"), one.backward in ("failed", "warning")) for one in judged]
    passed = sum(not any(sides) for sides in failed)
    overall = Table(title="Overall", width=75)
    detail = Table(title="Detail", width=75)
    for table, columns in (
        (overall, ("Pass", "Fail", "Passing Rate")),
        (detail, ("Only forward fails", "Only backward fails", "Both fail")),
    ):
        for column in columns:
            table.add_column(column)
    overall.add_row(str(passed), str(len(judged) - passed), f"{passed / len(judged):.2%}" if judged else "N/A")
    detail.add_row(*(str(failed.count(sides)) for sides in ((True, False), (False, True), (True, True))))
    console = Console(width=max(75, min(shutil.get_terminal_size().columns, 120)), highlight=False)
    console.print(overall)
    console.print(detail)
