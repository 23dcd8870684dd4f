# SPDX-License-Identifier: Apache-2.0
"""Run `msprobe parse`: a shell for dumps of Ascend's runtime, with `cad` and with `vc` on converted folders. With -d, only convert.

Parse >>> cad -m my_dump/20240101000000/0     the dump files as .npy, in folders by the operator's name and its time
Parse >>> vc -m converted/a -g converted/b    two such trees compared into batch_compare_{time}.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from ulpscope.compat.file_pairs import measure_pair
from ulpscope.compat.msprobe.compare.result_files import output_folder
from ulpscope.compat.msprobe.compare.result_rows import number_cells
from ulpscope.compat.pt_files import save_pt
from ulpscope.compat.ptdbg.compare.columns import message_of
from ulpscope.compat.ptdbg.shell import ParseShell, main
from ulpscope.compat.ptdbg.shell.acl_dumps import compare_acl, convert_acl
from ulpscope.compat.ptdbg.shell.shell_parsers import PARSERS, ShellParser, add_ascend_path, shell_parser
from ulpscope.errors import InputError
from ulpscope.judge.published.cosine_rule import accuracy_word
from ulpscope.model import TensorData
from ulpscope.report.comparison.table import defused
from ulpscope.report.escaping import visible
from ulpscope.report.replacing import replacing
from ulpscope.store.acl.file import read_acl_file
from ulpscope.store.acl.folder import AclFile, acl_files

__all__ = ["MsprobeShell", "run_parse"]

_CONVERTED = Path("parse_data/acl_batch_convert")
_COMPARED = Path("parse_data/acl_batch_compare")
_SLOT = re.compile(r".+\.(?P<slot>(?:input|output)\.\d{1,6}(?:\.[\dx]+)?)\.npy")
_TIME = re.compile(r"\d{1,20}")
_DEEPEST = 3
_COLUMNS = (
    "Op Name",
    "NPU File",
    "Bench File",
    "Cosine",
    "EucDist",
    *("MaxAbsErr", "MaxRelativeErr"),
    "Accuracy Reached or Not",
    "Message",
)


def _cad() -> ShellParser:
    parser = shell_parser("cad", "Convert all dump files of a device to .npy, in folders by the operator's name and its time.")
    parser.add_argument(
        "-m", "--my_dump_path", type=Path, required=True, metavar="DIR", help="the folder of a device, with its model folders"
    )
    parser.add_argument("-out", "--output_path", type=Path, metavar="DIR", help=f"an existing folder; else {_CONVERTED}")
    add_ascend_path(parser)
    return parser


class MsprobeShell(ParseShell):
    """The shell of msprobe: that of ptdbg with cad and without pk."""

    parsers: ClassVar[dict[str, ShellParser]] = {**PARSERS, "cad": _cad()}
    about = ParseShell.about.replace(
        "  pk       show an API of a dump file\n",
        "  cad      convert all dumps of a device, by operator and time; vc compares two such folders\n",
    )

    def do_cad(self, line: str) -> None:
        self._do("cad", line, lambda given: _convert_all(given.my_dump_path, given.output_path, given.ascend_path, self._console))

    def do_vc(self, line: str) -> None:
        self._do("vc", line, _compare)

    def do_pk(self, line: str) -> None:
        print("pk is not supported here: there are no pkl files any more; look at a dump.json with: ulpscope show DUMP")


def run_parse(given: argparse.Namespace) -> int:
    """Open the shell, or with -d convert one dump."""
    if given.dump_path is None:
        main(MsprobeShell)
        return 0
    if not given.dump_path.exists():
        raise InputError(f"there is no '{given.dump_path}': give a dump file of Ascend's runtime, or a folder of them")
    folder = output_folder(given.output_path)
    if given.type == "npy":
        convert_acl(given.dump_path, None, folder, None, Console(markup=False, highlight=False, width=400))
        return 0
    for path in [file.path for file in _all_files(given.dump_path)] if given.dump_path.is_dir() else [given.dump_path]:
        for name in _save_as_pt(path, folder):
            print(visible(name))
    print(f"The .pt files are in {visible(str(folder))}.")
    return 0


def _save_as_pt(path: Path, folder: Path) -> Iterator[str]:
    for tensor in read_acl_file(path).tensors:
        values = tensor.array(None)
        name = f"{path.name}.{tensor.role}.{tensor.index}.pt"
        data = TensorData(values.dtype.name, values.shape, values.tobytes())
        with replacing(folder / name) as temporary:
            save_pt(temporary, data.dtype, data.shape, data.buffer)
        yield name


def _all_files(folder: Path, depth: int = 0) -> Iterator[AclFile]:
    """Yield the dump files of a folder and of the folders in it."""
    yield from (file for file in acl_files(folder) if not file.is_statistics)
    if depth < _DEEPEST:
        with os.scandir(folder) as entries:
            below = sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
        for entry in below:
            yield from _all_files(entry, depth + 1)


def _convert_all(source: Path, output: Path | None, msaccucmp: Path | None, console: Console) -> None:
    if not source.is_dir():
        raise InputError(f"there is no folder '{source}': give the folder of a device, with its model folders")
    if output is not None and not output.is_dir():
        raise InputError(f"the output folder '{output}' is not there: create it first")
    files = list(_all_files(source))
    if not files:
        raise InputError(f"'{source}' holds no dump file of Ascend: their names are type.name.task.stream.time")
    folder = (output or _CONVERTED) / str(int(time.time()))
    for file in files:
        place = folder / file.name.op_name.replace("/", "_") / str(file.name.time)
        place.mkdir(parents=True, exist_ok=True)
        convert_acl(file.path, None, place, msaccucmp, console)
    print(f'[INFO] The result have been written to "{visible(str(folder))}".')


# --- vc on converted folders


def _compare(given: argparse.Namespace) -> None:
    trees = [_operators(path) for path in (given.my_dump_path, given.golden_dump_path)]
    if not all(trees):
        compare_acl(given.my_dump_path, given.golden_dump_path, given.output_path, given.ascend_path)
        return
    folder = given.output_path or output_folder(_COMPARED)
    if not folder.is_dir():
        raise InputError(f"the output folder '{folder}' is not there: create it first")
    table = folder / f"batch_compare_{int(time.time())}.csv"
    with replacing(table) as temporary, temporary.open("x", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in _rows(*trees):
            writer.writerow([defused(cell) if isinstance(cell, str) else cell for cell in row])
    print(f"[INFO]Compare result is saved in : {visible(str(table))}")


def _operators(path: Path) -> dict[str, list[Path]]:
    """Find the times of each operator in a tree that cad made; empty where it is none."""
    found: dict[str, list[Path]] = {}
    for operator in sorted(path.iterdir()) if path.is_dir() else ():
        times = [entry for entry in operator.iterdir() if entry.is_dir() and _TIME.fullmatch(entry.name)] if operator.is_dir() else []
        if any(_slots(entry) for entry in times):
            found[operator.name] = sorted(times, key=lambda entry: int(entry.name))
    return found


def _slots(folder: Path) -> dict[str, Path]:
    matches = ((file, _SLOT.fullmatch(file.name)) for file in sorted(folder.iterdir()))
    return {match["slot"]: file for file, match in matches if match}


def _rows(target: dict[str, list[Path]], golden: dict[str, list[Path]]) -> Iterator[Sequence[object]]:
    """Yield rows that pair an operator's first time with its first, its second with its second; a row without partner says so."""
    for operator in dict.fromkeys((*target, *golden)):
        ours, theirs = target.get(operator, []), golden.get(operator, [])
        for at in range(max(len(ours), len(theirs))):
            left, right = (_slots(side[at]) if at < len(side) else {} for side in (ours, theirs))
            for slot in dict.fromkeys((*left, *right)):
                yield _row(operator, left.get(slot), right.get(slot))


def _row(operator: str, target: Path | None, golden: Path | None) -> Sequence[object]:
    names = [file.name if file else "N/A" for file in (target, golden)]
    if target is None or golden is None:
        return [operator, *names, *["N/A"] * 4, "Unmatched", "It is in one dump only."]
    found = measure_pair(target, golden)
    return [operator, *names, *number_cells(found)[:4], accuracy_word(found), message_of(found)]
