# SPDX-License-Identifier: Apache-2.0
"""Print how far honest implementations are from exact, the limits that follow, and whether the held-back half keeps them.

python -m bench.zoo [--device cuda] [--dtype float32]... [--op linear]... [--jobs 8] [--out rows.csv]
python -m bench.zoo --sensitivity          how small a fault those limits still show
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path

import torch
from bench.zoo.limits import check_table, limits_of, limits_table, record_table, worst_table
from bench.zoo.operations import OPERATIONS
from bench.zoo.rows import DTYPES, Row, Task, rows_of, tasks
from bench.zoo.sensitivity import sensitivity_table


def main() -> None:
    options = _options()
    if options.sensitivity:
        print(sensitivity_table())
        return
    start = time.monotonic()
    found = _found(tasks(options.device, options.dtype or list(DTYPES), options.op or list(OPERATIONS)), options.jobs)
    if options.out:
        write_rows(options.out, found)
    _print(found, options.device, time.monotonic() - start)


def _found(work: list[Task], jobs: int) -> list[Row]:
    if jobs == 1:
        return [row for task in work for row in rows_of(task)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return [row for some in pool.map(rows_of, work) for row in some]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--op", action="append", choices=list(OPERATIONS))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="a csv file for every row")
    parser.add_argument("--sensitivity", action="store_true")
    return parser.parse_args()


def write_rows(path: Path, found: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in found)


def _print(found: list[Row], device: str, elapsed_s: float) -> None:
    ran = [row for row in found if not row.raised]
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    print(
        f"torch {torch.__version__}, Python {sys.version.split()[0]}, {name}: {len(ran)} rows, {len({row.op for row in ran})} operations, ",
        end="",
    )
    print(
        f"{len({(row.op, row.implementation) for row in ran})} implementations, {elapsed_s:.0f} s, {len(found) - len(ran)} could not run\n"
    )
    limits = limits_of(ran)
    print(limits_table(ran, limits))
    print(check_table(ran, limits))
    print(worst_table(ran))
    print(record_table(ran))
    for reason in sorted({f"{row.op}, {row.implementation}, {row.dtype}, {row.phase}: {row.raised}" for row in found if row.raised}):
        print("could not run:", reason)


if __name__ == "__main__":
    main()
