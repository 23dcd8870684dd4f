# SPDX-License-Identifier: Apache-2.0
"""Measure the dumps of msprobe, as ours serves them, against mindstudio-probe on the same training.

    python bench/legacy_msprobe.py --peer-python PATH

Both run the same script, peer_record.py: every API of the GPT of gpt.py, forward and backward, at level L1 with risk_level ALL and stacks,
once with start and stop around the whole step, as the guide places them, and once with stop before the optimizer, whose inner calls only
the peer dumps. Turns and figures are those of trunk.py. The last row is one long step of small calls, and what a call costs in it over what
it costs in a short one: 1 is flat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trunk import OURS, Failed, Recorder, Row, cells, number, peer_command, print_table, recorder_command, run, say

ROUNDS, BARE_STEPS = 3, 8
STEPS = {"statistics": 6, "tensors": 4}
WHAT = {"whole step": [], "before the optimizer": ["--without-optimizer"]}
FEW_CALLS, MANY_CALLS = 2_000, 24_000


def seconds_a_call(into: Path, num_calls: int) -> float:
    """Measure one call in a step of so many, dumped as statistics; runs under either tool."""
    import torch

    from msprobe.pytorch import PrecisionDebugger

    file = into.with_suffix(".json")
    file.write_text(json.dumps({"task": "statistics", "dump_path": str(into), "level": "L1", "risk_level": "ALL", "statistics": {}}))
    debugger = PrecisionDebugger(config_path=str(file))
    x = torch.linspace(0.1, 1, 64)
    begin = time.perf_counter()
    debugger.start()
    for _ in range(num_calls):
        x = torch.sin(x)
    debugger.stop()
    debugger.step()
    return (time.perf_counter() - begin) / num_calls


def growth(python: str, scratch: Path) -> float:
    """Compare the cost of a call in a long step with that in a short one."""
    found = []
    for num_calls in (FEW_CALLS, MANY_CALLS):
        command = [python, __file__, "--into", str(scratch / f"calls{num_calls}"), "--calls", str(num_calls)]
        found.append(min(float(run(command).stdout.splitlines()[-1]) for _ in range(2)))
    return found[1] / found[0]


def measure(peer: str, scratch: Path) -> dict[str, Recorder]:
    recorders = [Recorder("bare", recorder_command("nothing"), BARE_STEPS)]
    for keep, steps in STEPS.items():
        for what, options in WHAT.items():
            for who, python in (("ours", OURS), ("peer", peer)):
                recorders.append(Recorder(f"{who} {keep} {what}", [*peer_command(python, keep), *options], steps))
    for turn in range(ROUNDS):
        for recorder in recorders:
            say(f"turn {turn + 1} of {ROUNDS}: {recorder.name}")
            recorder.take_turn(scratch)
    return {recorder.name: recorder for recorder in recorders}


def rows(recorders: dict[str, Recorder]) -> Iterator[Row]:
    bare = recorders["bare"].best
    for keep, what in itertools.product(STEPS, WHAT):
        ours, peer = recorders[f"ours {keep} {what}"], recorders[f"peer {keep} {what}"]
        asked = "at most a third of the peer's" if what == "whole step" else ""
        yield Row(f"{keep}, {what}: dumped step over bare step", *cells(ours, peer, lambda one: one.best / bare, "x"))
        yield Row(f"{keep}, {what}: seconds that the dump adds", *cells(ours, peer, lambda one: one.best - bare), asked=asked)
        yield Row(f"{keep}, {what}: MB a step, every name counted", *cells(ours, peer, lambda one: one.bytes_a_step / 1e6))


def growth_row(peer: str, scratch: Path) -> Row:
    shown = []
    for name, python in (("ours", OURS), ("peer", peer)):
        say(f"a long step: {name}")
        try:
            (scratch / name).mkdir()
            shown.append(number(growth(python, scratch / name), "x"))
        except Failed as error:
            shown.append(str(error))
    return Row(f"cost of a call, {MANY_CALLS} a step over {FEW_CALLS}", *shown, asked="ours 1: flat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="the Python of an environment with mindstudio-probe 26.2.0")
    parser.add_argument("--scratch", metavar="DIR", help="where to dump; 4 GB are needed")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls is not None:
        print(seconds_a_call(options.into, options.calls))
        return
    if options.peer_python is None:
        parser.error("give --peer-python, the Python of an environment with mindstudio-probe")
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        recorders = measure(options.peer_python, scratch)
        found = [*rows(recorders), growth_row(options.peer_python, scratch)]
    print_table(found)


if __name__ == "__main__":
    main()
