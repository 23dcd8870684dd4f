# SPDX-License-Identifier: Apache-2.0
"""Run programs that nobody here wrote, and say where recording disturbs, compare accuses, or check fails without cause.

python -m bench.programs                                        # everything on the CPU, an hour or so
python -m bench.programs --sample                               # what make test runs
python -m bench.programs --kind architecture --name 'qwen*'
python -m bench.programs --kind architecture --device cuda --jobs 8 --out cuda.jsonl
python -m bench.programs --read cpu.jsonl --read cuda.jsonl --docs docs/programs.md

Exit code 0 says: every program is bitwise what it is without a capture, compares as the same with itself, and passes the check; no other
precision, attention or device is called a fault; no fewer calls are recorded and no lower share of them is checked than the baseline holds.
Exit code 1 says which do not, 2 that there is no such program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench.programs.asking import Row
from bench.programs.catalogue import DTYPES, KINDS, Program, all_programs, kept_short
from bench.programs.rows import Baseline, fallen, full_table, read_rows, replace_table, summary_table
from bench.programs.workers import ask_all


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    programs = all_programs(tuple(options.kind or KINDS), tuple(options.name or ["*"]), tuple(options.dtype or DTYPES))
    programs = kept_short(programs) if options.sample else programs
    programs = [one for one in programs if options.device == "cpu" or one.kind == "architecture"]
    if not programs:
        print("no program is called that; see --help for the kinds and how names are given", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    baseline = Baseline.read()
    rows = read_rows(options.read) if options.read else _rows(programs, options, baseline)
    tables = f"{summary_table(rows, baseline)}\n{full_table(rows)}"
    print(f"{tables}\n{len(rows)} programs in {time.perf_counter() - begin:.0f} s")
    if options.docs:
        replace_table(options.docs, tables)
    if options.update:
        baseline.with_rows(rows).write()
        return 0
    if not baseline.is_of_this_torch:
        print(f"the baseline was counted with {baseline.versions or 'nothing'}: nothing is held against it")
    return 1 if any(_complaints(row, baseline) for row in rows) else 0


def _rows(programs: list[Program], options: argparse.Namespace, baseline: Baseline) -> list[Row]:
    rows: list[Row] = []
    for row in ask_all(programs, options.device, options.jobs, options.scratch):
        rows.append(row)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        for text in _complaints(row, baseline):
            print(f"{row.key}, {row.device}: {text}", flush=True)
        if sys.stderr.isatty() or len(rows) % 25 == 0 or len(rows) == len(programs):
            print(f"{len(rows)} of {len(programs)}, {row.key}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    return rows


def _complaints(row: Row, baseline: Baseline) -> list[str]:
    return row.complaints + (fallen(row, baseline) if baseline.is_of_this_torch else [])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these programs")
    parser.add_argument("--name", action="append", metavar="GLOB", help="only programs with such a name")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of an operator's samples; of autocast for the others")
    parser.add_argument("--sample", action="store_true", help="the few programs that make test runs")
    parser.add_argument("--device", default="cpu", help="cuda: each architecture there against the CPU, TF32 and autocast too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="programs at a time")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="add every answer to this file, a line for each program")
    parser.add_argument("--read", type=Path, action="append", metavar="FILE.jsonl", help="run nothing: the answers that --out wrote there")
    parser.add_argument("--docs", type=Path, metavar="PAGE.md", help="put the tables into this page, where it holds the last ones")
    parser.add_argument("--update", action="store_true", help="make what was counted now the baseline")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="record there (default: where temporary files go)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
