# SPDX-License-Identifier: Apache-2.0
"""Measure the compare of ptdbg_ascend, as ours serves it, against the compare of mindstudio-probe on the same tensors.

    python bench/legacy_compare.py --peer-python PATH

The peer records two steps of the GPT of gpt.py whose weights differ by one part in a million. Each of its dumps is then written a second
time in the layout of ptdbg: the same tensors under the old names as .npy files, with dump.pkl. Each tool reads its own layout. Ours also
writes its own page and finding within that time. The last line is the guide's own figure, both dumps over the time, in GB/s (P161).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from trunk import (
    OURS,
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

from ulpscope.numerics.casting import as_array
from ulpscope.store.foreign.reader import open_tensor

PERTURBATION = 1e-6
COMPARE = """
import sys
from ptdbg_ascend import compare
npu, bench, output = sys.argv[1:]
paths = {"npu_pkl_path": npu + ".pkl", "bench_pkl_path": bench + ".pkl", "npu_dump_data_dir": npu, "bench_dump_data_dir": bench}
compare(paths, output)
"""


def as_ptdbg(peer: Path, into: Path) -> Path:
    """Write the peer's dump in the old layout; return the path of dump.pkl without its ending."""
    source = next(peer.glob("step0/*"))
    calls = json.loads((source / "dump.json").read_text())["data"]
    (into / "dump").mkdir(parents=True)
    with (into / "dump.pkl").open("w") as stream:
        for name, call in calls.items():
            for key, described in slots(name, call):
                data = open_tensor(source / "dump_tensor_data" / described["data_name"])
                np.save(into / "dump" / f"{key}.npy", as_array(data))
                statistics = [described["Max"], described["Min"], described["Mean"]]
                stream.write(json.dumps([key, 0, [], described["dtype"], described["shape"], statistics]) + "\n")
    return into / "dump"


def slots(name: str, call: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tensors of one call with their old names."""
    prefix = name.replace(".", "_")
    for role, key in (("input_args", "input"), ("input", "input"), ("output", "output")):
        found = call.get(role, [])
        for at, described in enumerate(found):
            if isinstance(described, dict) and "data_name" in described:
                is_alone = key == "output" and len(found) == 1 and name.endswith("forward")
                yield f"{prefix}_{key}" + ("" if is_alone else f".{at}"), described


def compare_ours(npu: Path, bench: Path, output: Path) -> Finished:
    finished = best(lambda: run([OURS, "-c", COMPARE, str(npu), str(bench), str(output)]))
    if not any(output.glob("compare_result_*.csv")) or not any(output.glob("compare_result_*.html")):
        raise Failed(finished.last_words)
    return finished


def speed_row(size: int, ours: Finished | str, theirs: Finished | str) -> Row:
    cells = [one if isinstance(one, str) else f"{size / one.seconds / 1e9:.3g}" for one in (ours, theirs)]
    return Row("GB/s by the guide's formula, size of both / time", *cells, asked="guide: 0.1 below 10 GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", required=True, help="the Python of an environment with mindstudio-probe 26.2.0")
    parser.add_argument("--scratch", metavar="DIR", help="where to record; 3 GB are needed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        recorder = [*peer_command(options.peer_python, "tensors"), "--without-optimizer"]
        say("the peer records two steps")
        train(recorder, 1, scratch / "subject", PERTURBATION)
        train(recorder, 1, scratch / "reference")
        say("the same tensors in the layout of ptdbg")
        npu, bench = (as_ptdbg(scratch / side, scratch / "ptdbg" / side) for side in ("subject", "reference"))
        size = sum(disk_use(folder)[0] for folder in (npu, bench))
        say(f"comparing {size / 1e6:.0f} MB")
        theirs = attempt(lambda: compare_peer(options.peer_python, scratch / "subject", scratch / "reference", scratch))
        ours = attempt(lambda: compare_ours(npu, bench, scratch / "result"))
        shutil.rmtree(scratch / "ptdbg", ignore_errors=True)
    print_table(
        [
            timing_row("seconds to compare two dumps of one step", ours, theirs, asked="at most 0.1 of the peer's"),
            memory_row("MB of memory at most, there", ours, theirs),
            speed_row(size, ours, theirs),
        ]
    )


if __name__ == "__main__":
    main()
