# SPDX-License-Identifier: Apache-2.0
"""Measure recording on an accelerator against the bare step, the peer and the machine, and print one table.

    python -m bench.gpu [--quick] [--peer FOLDER] [--scratch FOLDER] [--without-dump]

FOLDER of the peer is where mindstudio-probe 26.2.0 and what it needs are unpacked; it runs in a process of its own, one step with each of
statistics and tensors. A dump takes about 20 GB of disk, the peer's 40 GB. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench.gpu.limits import IdleHooks, IdleMode, copy_bandwidth, disk_bandwidth, host_bandwidth, read_bandwidth
from bench.gpu.model import FULL, QUICK, training
from bench.gpu.recording import Recorder, dump_step, growth, take_turns

from ulpscope.capture.native.compiled import COMPILED

Row = tuple[str, str, str, str, str]


def recorder_name() -> str:
    if COMPILED is None:
        return "recorder in Python"
    return "recorder built for this torch" if COMPILED.HAS_NATIVE else "compiled recorder, without what `ulpscope build` makes"


def say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def recorders() -> list[Recorder]:
    """List the recorders: the cost of seeing calls at all; then inputs and outputs of calls, as the peer records them; then all.

    The last ones also record parameters, gradients and optimizer state.
    """
    calls: dict[str, Any] = {"select": ["phase:forward", "phase:backward"]}
    return [
        Recorder("bare", None),
        Recorder("limit: a mode that sees every call and does nothing", None, idle=IdleMode),
        Recorder("limit: and one hook that does nothing for each call", None, idle=IdleHooks),
        Recorder("capture, step not selected", {"steps": [10**9]}, "at most 1.02"),
        Recorder("modules, statistics", {"level": "module", **calls}, "at most 1.1"),
        Recorder("every call, fingerprints", {"keep": "fingerprint", **calls}, "at most 1.4"),
        Recorder("every call, statistics and fingerprints", calls, "at most 1.5"),
        Recorder("modules and all state", {"level": "module"}),
        Recorder("every call and all state, fingerprints", {"keep": "fingerprint"}),
        Recorder("every call and all state", {}),
    ]


def peer_figures(folder: str, keep: str, scratch: Path, quick: bool) -> dict[str, Any]:
    """Measure one step of the peer; a failure is a figure that says so."""
    say(f"peer, {keep}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    command = [
        sys.executable,
        "-m",
        "bench.gpu.peer",
        "--keep",
        keep,
        "--into",
        str(scratch / f"peer-{keep}"),
        *(["--quick"] if quick else []),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if not lines:
        return {"failure": (done.stderr.strip() or "it said nothing").splitlines()[-1][:160]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def step_rows(measured: list[Recorder], peer: dict[str, Any]) -> Iterator[Row]:
    bare = measured[0].seconds
    yield "milliseconds of a bare step", f"{bare * 1e3:.1f}", "", "", ""
    for recorder in measured[1:]:
        span = f" ({min(recorder.turns) / bare:.3f} to {max(recorder.turns) / bare:.3f})"
        is_peers = recorder.name.startswith("every call, statistics")
        theirs = f"{peer['seconds'] / bare:.1f}x" if is_peers and "seconds" in peer else peer.get("failure", "") if is_peers else ""
        yield f"recorded step over bare step, {recorder.name}", f"{recorder.seconds / bare:.3f}x{span}", theirs, "", recorder.asked


def host_row(between: list[float]) -> Row:
    middle, low, high = (seconds * 1e3 for seconds in (statistics.median(between), min(between), max(between)))
    return "milliseconds of the same plain Python between turns", f"{middle:.1f} ({low:.1f} to {high:.1f})", "", "", ""


def dump_rows(dump: tuple[float, int, bool], disk: float, bare: float, peer: dict[str, Any]) -> Iterator[Row]:
    seconds, size, is_same = dump
    known = "seconds" in peer
    theirs = (f"{peer['seconds']:.1f}", f"{peer['bytes'] / 1e9:.1f}") if known else (peer.get("failure", ""), "")
    faster = f"{peer['seconds'] / seconds:.1f} times faster" if known else ""
    yield "seconds of one step with all tensors, to the last byte on disk", f"{seconds:.2f}", theirs[0], faster, "at least 3 times faster"
    share = f"{size / peer['bytes']:.0%} of the peer's" if known else f"{size / 37.9e9:.0%} of 37.9 GB"
    yield "GB on disk", f"{size / 1e9:.2f}", theirs[1], share, "at most 55 %"
    rate = size / (seconds - bare)
    yield "GB/s to disk", f"{rate / 1e9:.2f}", "", f"{rate / disk:.0%} of the disk", "at least 80 %"
    yield "loss of the dumped step", "the same bits" if is_same else "DIFFERENT", "", "", "the same bits"


def print_table(rows: list[Row]) -> None:
    print("| what | ours | peer | ratio | asked |")
    print("|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu shows that it works, not how fast it is")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps: shows that it works, not how fast it is")
    parser.add_argument("--peer", metavar="FOLDER", help="where mindstudio-probe 26.2.0 is unpacked")
    parser.add_argument("--scratch", metavar="FOLDER", help="where to record")
    parser.add_argument("--without-dump", action="store_true", help="leave the tensors out")
    options = parser.parse_args()
    steps, turns, long = (2, 2, 12) if options.quick else (5, 5, 40)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        trained = training(QUICK if options.quick else FULL, options.device)
        for _ in range(3):
            trained[2]()
        measured = recorders()
        say("recorders")
        rows.append(host_row(take_turns(measured, trained, turns=turns, steps=steps, scratch=scratch)))
        say(f"{long} recorded steps")
        grown = growth(trained, long, scratch)
        if options.device == "cuda":
            say("limits")
            rows += [
                ("TB/s, reading on the device", f"{read_bandwidth() / 1e12:.2f}", "", "", ""),
                ("TB/s, copying on the device (read and written)", f"{copy_bandwidth() / 1e12:.2f}", "", "", ""),
                ("GB/s, device to pinned memory", f"{host_bandwidth() / 1e9:.1f}", "", "", ""),
            ]
        peer = {
            keep: peer_figures(options.peer, keep, scratch, options.quick) if options.peer else {} for keep in ("statistics", "tensors")
        }
        dump: list[Row] = []
        if not options.without_dump:
            disk, way = disk_bandwidth(scratch, (1 << 28) if options.quick else (8 << 30))
            rows.append((f"GB/s, writing a file to the end of its sync, {way}", f"{disk / 1e9:.2f}", "", "", ""))
            say("a dump")
            time.sleep(0 if options.quick else 2)
            dump_step(trained, scratch) if options.quick else None
            dump = list(dump_rows(dump_step(trained, scratch), disk, measured[0].seconds, peer["tensors"]))
        table = list(step_rows(measured, peer["statistics"]))
        table.append((f"step {long} over step 5, statistics", f"{grown:.3f}", "", "", "about 1"))
    where = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    print(f"{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {recorder_name()}")
    print_table([*table, *dump, *rows])


if __name__ == "__main__":
    main()
