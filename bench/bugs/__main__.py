# SPDX-License-Identifier: Apache-2.0
"""Score ulpscope, two baselines and, where there is one, the peer on the corpus, and print one table.

python -m bench.bugs [--case GLOB] [--keep tensors|statistics|both] [--peer PYTHON] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.bugs.answering import KEEPS, answer_all
from bench.bugs.case import all_cases
from bench.bugs.tables import case_list, print_tables, reaches_bar


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bugs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="*", metavar="GLOB", help="only cases with such a name")
    parser.add_argument("--keep", choices=[*KEEPS, "both"], default="both", help="what the runs hold")
    parser.add_argument("--peer", metavar="PYTHON", help="the Python of an environment with mindstudio-probe 26.2.0")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every answer, for later")
    parser.add_argument("--list", action="store_true", help="print the cases as Markdown, and run nothing")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cases at a time")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the recorded runs there")
    options = parser.parse_args()
    cases = all_cases(options.case)
    if not cases:
        parser.error(f"no case is called {options.case!r}")
    if options.list:
        print(case_list(cases))
        return 0
    begin = time.perf_counter()
    answers = list(answer_all(cases, KEEPS if options.keep == "both" else (options.keep,), options.peer, options.jobs, options.runs))
    print_tables(cases, answers)
    print(f"\n{len(cases)} cases in {time.perf_counter() - begin:.0f} s")
    if options.out:
        options.out.write_text(json.dumps([asdict(answer) for answer in answers], indent=1))
    return 0 if reaches_bar(cases, answers) else 1


if __name__ == "__main__":
    sys.exit(main())
