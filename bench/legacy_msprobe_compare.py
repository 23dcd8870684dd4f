# SPDX-License-Identifier: Apache-2.0
"""Measure `msprobe compare` as we serve it against the real one, on the same dumps.

    python bench/legacy_msprobe_compare.py --peer-python PATH [--ops 4000]

The peer records two steps of the GPT of gpt.py whose weights differ by one part in a million, with tensors and with statistics; both tools
then compare those very dumps. A dump of many small calls is written by hand. Ours also writes its own page and finding within that time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from trunk import (
    PERTURBATION,
    Failed,
    Finished,
    Row,
    attempt,
    best,
    compare_peer,
    disk_use,
    memory_row,
    peer_command,
    print_table,
    run,
    say,
    timing_row,
    train,
)

OURS = str(Path(sys.executable).with_name("msprobe"))
ASKED = "at most 0.1 of the peer's"


def compare_ours(subject: Path, reference: Path, output: Path) -> Finished:
    steps = [next(side.glob("step0/*")) / "dump.json" for side in (subject, reference)]
    finished = best(lambda: run([OURS, "compare", "-tp", str(steps[0]), "-gp", str(steps[1]), "-o", str(output)]))
    if not any(output.glob("compare_result_*.csv")) or not any(output.glob("compare_result_*.html")):
        raise Failed(finished.last_words)
    return finished


def write_small_calls(folder: Path, count: int, factor: float) -> None:
    """Write a dump of statistics with many calls of one tensor each."""
    rank = folder / "step0" / "rank0"
    rank.mkdir(parents=True)
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [64, 64], "Mean": 0.0, "Norm": 64.0 * factor, "requires_grad": False}
    given, returned = {**leaf, "Max": 3.0, "Min": -3.0}, {**leaf, "Max": 3.0, "Min": 0.0}
    data = {f"Torch.relu.{at}.forward": {"input_args": [given], "input_kwargs": {}, "output": [returned]} for at in range(count)}
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (rank / "dump.json").write_text(json.dumps({**header, "data": data}))
    stack = ["File train.py, line 3, in forward, \n x = torch.relu(x)"]
    (rank / "stack.json").write_text(json.dumps({"0": [list(data), stack]}))
    (rank / "construct.json").write_text("{}")


def rows(peer: str, what: str, subject: Path, reference: Path, scratch: Path) -> list[Row]:
    size = sum(disk_use(side)[0] for side in (subject, reference))
    say(f"comparing {size / 1e6:.0f} MB by {what}")
    folder = what.replace(" ", "_")  # the peer refuses other characters in a path
    theirs = attempt(lambda: compare_peer(peer, subject, reference, scratch / "theirs" / folder))
    ours = attempt(lambda: compare_ours(subject, reference, scratch / "ours" / folder))
    return [
        timing_row(f"seconds to compare two dumps by {what}", ours, theirs, asked=ASKED),
        memory_row("MB of memory at most, there", ours, theirs),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", required=True, help="the Python of an environment with mindstudio-probe 26.2.0")
    parser.add_argument("--ops", type=int, default=4000, metavar="N", help="calls of the dump of small ones (4000)")
    parser.add_argument("--scratch", metavar="DIR", help="where to record; 2 GB are needed")
    options = parser.parse_args()
    table: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        for keep in ("tensors", "statistics"):
            say(f"the peer records two steps with {keep}")
            recorder = [*peer_command(options.peer_python, keep), "--without-optimizer"]
            sides = scratch / keep / "subject", scratch / keep / "reference"
            train(recorder, 1, sides[0], PERTURBATION)
            train(recorder, 1, sides[1])
            table += rows(options.peer_python, keep, *sides, scratch)
        small = scratch / "small" / "subject", scratch / "small" / "reference"
        for side, factor in zip(small, (1.001, 1.0), strict=True):
            write_small_calls(side, options.ops, factor)
        table += rows(options.peer_python, f"statistics of {options.ops} calls", *small, scratch)
    print_table(table)


if __name__ == "__main__":
    main()
