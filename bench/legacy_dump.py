# SPDX-License-Identifier: Apache-2.0
"""Measure the dump of ptdbg_ascend, as ours serves it, against the tensor dump of mindstudio-probe on the same training.

    python bench/legacy_dump.py --peer-python PATH

Both dump every API of the GPT of gpt.py, forward and backward, with its tensors and stacks; neither dumps the optimizer. Turns and figures
are those of trunk.py. The last rows are the guide's own figure (P112): the volume of a dump over the time that it adds to a step, once with
every file counted under each of its names, as the guide's files are, and once as it lies on the disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from gpt import training
from trunk import OURS, Recorder, Row, cells, number, peer_command, print_table, recorder_command, say

ROUNDS, STEPS, BARE_STEPS = 3, 4, 8


def record(into: Path, steps: int, perturb: float = 0.0) -> list[float]:
    """Train under the old debugger; return the seconds of each step."""
    from ptdbg_ascend import PrecisionDebugger

    _, _, step = training(perturb=perturb)
    debugger = PrecisionDebugger(dump_path=str(into), hook_name="dump", step=list(range(steps)))
    seconds: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        debugger.start()
        step(before_update=debugger.stop)
        debugger.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def stored_bytes(folder: Path) -> int:
    """Sum the bytes of the files; a file with several names counts once."""
    found = {(entry := file.stat()).st_ino: entry.st_size for file in folder.rglob("*") if file.is_file()}
    return sum(found.values())


def measure(peer: str, scratch: Path) -> dict[str, Recorder]:
    recorders = [
        Recorder("bare", recorder_command("nothing"), BARE_STEPS),
        Recorder("ours", [OURS, __file__], STEPS),
        Recorder("peer", [*peer_command(peer, "tensors"), "--without-optimizer"], STEPS),
    ]
    for turn in range(ROUNDS):
        for recorder in recorders:
            say(f"turn {turn + 1} of {ROUNDS}: {recorder.name}")
            recorder.take_turn(scratch)
    return {recorder.name: recorder for recorder in recorders}


def rows(recorders: dict[str, Recorder], stored: float) -> list[Row]:
    bare, ours, peer = recorders["bare"].best, recorders["ours"], recorders["peer"]
    added = ours.best - bare
    return [
        Row("dumped step over bare step", *cells(ours, peer, lambda one: one.best / bare, "x")),
        Row("seconds that the dump adds to a step", *cells(ours, peer, lambda one: one.best - bare), asked="at most a third of the peer's"),
        Row("files a step", *cells(ours, peer, lambda one: one.files_a_step)),
        Row("MB a step, every name counted", *cells(ours, peer, lambda one: one.bytes_a_step / 1e6)),
        Row("MB a step on the disk", number(stored / 1e6)),
        Row(
            "GB/s by the guide's formula, volume / (step with dump - step without)",
            *cells(ours, peer, lambda one: one.bytes_a_step / (one.best - bare) / 1e9)[:2],
            asked="guide: 0.1 below 5 GB",
        ),
        Row("the same by what lies on the disk", number(stored / added / 1e9)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="the Python of an environment with mindstudio-probe 26.2.0")
    parser.add_argument("--scratch", metavar="DIR", help="where to dump; 4 GB are needed")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--perturb", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into is not None:
        print(json.dumps({"steps": record(options.into, options.steps, options.perturb), "close": 0.0}))
        return
    if options.peer_python is None:
        parser.error("give --peer-python, the Python of an environment with mindstudio-probe")
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        recorders = measure(options.peer_python, scratch)
        record(scratch / "once", 1)
        stored = float(stored_bytes(scratch / "once"))
    print_table(rows(recorders, stored))


if __name__ == "__main__":
    main()
