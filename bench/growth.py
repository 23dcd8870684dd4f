# SPDX-License-Identifier: Apache-2.0
"""Measure how cost grows with calls, steps, records, bytes and ranks; print it, and draw two pictures.

    python -m bench.growth [--into docs/assets] [--calls 1000000] [--steps 200] [--records 1000000] [--quick]

Recording is shown as microseconds a call against how many calls came before, and milliseconds a step against steps: both should be flat.
Comparing is shown as seconds and as memory, each in a process of its own, against records, bytes and ranks: seconds should be straight
lines, memory should be flat. Let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.trunk import Finished, run, say

CALLS_A_STEP = 2_000
RECORDS_A_STEP = 1_000
PERTURBATION = 1e-7


@dataclass(frozen=True)
class Curve:
    """The curves of one panel: how some costs grow with one thing."""

    title: str
    along: str
    costs: dict[str, Sequence[float]]
    at: Sequence[float]
    is_logarithmic: bool = True


def record_calls(calls: int) -> None:
    """Record so many calls on tiny tensors and print microseconds of processor time a call, part by part; run in a process of its own."""
    import torch

    import ulpscope

    x, y = torch.ones(8), torch.ones(8)
    marks: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder, ulpscope.Capture(Path(folder) / "run", keep="statistics", level="api") as capture:
        begin, before = time.process_time(), 0
        for done in range(1, calls + 1):
            torch.add(x, y)
            if done % CALLS_A_STEP == 0:
                capture.step()
                if done >= 1.25 * before + CALLS_A_STEP:
                    marks.append((done, (time.process_time() - begin) / (done - before) * 1e6))
                    begin, before = time.process_time(), done
    print(json.dumps(marks))


def calls_curve(calls: int) -> Curve:
    say(f"recording {calls} calls")
    finished = run([sys.executable, "-m", "bench.growth", "--record-calls", str(calls)])
    marks = json.loads(finished.stdout.splitlines()[-1])
    title = f"Recording statistics of tiny tensors, {finished.peak_bytes / 1e6:.0f} MB of memory"
    return Curve(title, "calls before", {"microseconds of processor time a call": [cost for _, cost in marks]}, [at for at, _ in marks])


def steps_curve(steps: int, scratch: Path) -> Curve:
    say(f"recording {steps} steps of the GPT")
    script = Path(__file__).with_name("record.py")
    finished = run([sys.executable, str(script), "--keep", "statistics", "--steps", str(steps), "--into", str(scratch / "steps")])
    seconds = json.loads(finished.stdout.splitlines()[-1])["steps"][1:]
    return Curve(
        "Recording statistics of a GPT", "step", {"milliseconds": [1e3 * one for one in seconds]}, range(1, steps), is_logarithmic=False
    )


def compare(subject: Path, reference: Path) -> Finished:
    answer = subject.parent / "answer.json"
    command = [sys.executable, "-m", "ulpscope", "compare", str(subject), str(reference), "--quiet", "--json", str(answer)]
    return run([*command, "--replay", "none"], expected=(0, 1))


def comparing_curve(title: str, along: str, sides: Iterable[tuple[float, Path, Path]]) -> Curve:
    at, seconds, memory = [], [], []
    for size, subject, reference in sides:
        finished = compare(subject, reference)
        at.append(size)
        seconds.append(finished.seconds)
        memory.append(finished.peak_bytes / 1e6)
        say(f"{along} {size:g}: {finished.seconds:.2f} s, {finished.peak_bytes / 1e6:.0f} MB")
    return Curve(title, along, {"seconds": seconds, "MB of memory": memory}, at)


def sides_of(sizes: Sequence[int], scratch: Path, words: Callable[[int], list[object]]) -> Iterable[tuple[float, Path, Path]]:
    """Record two runs for each size in processes of their own, so that the peak memory of a comparison does not count their making."""
    for size in sizes:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        for side, off in (("subject", PERTURBATION), ("reference", 0.0)):
            run([sys.executable, "-m", "bench.synthetic", str(folder / side), "--off", str(off), *map(str, words(size))])
        yield size, folder / "subject", folder / "reference"
        shutil.rmtree(folder)


def of_records(size: int) -> list[object]:
    return ["--records", size, "--steps", max(1, size // RECORDS_A_STEP)]


def of_ranks(size: int) -> list[object]:
    return ["--records", size * RECORDS_A_STEP, "--ranks", size]


def of_bytes(size: int) -> list[object]:
    return ["--bytes", size]


def draw(curves: Sequence[Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(5.2 * len(curves), 3.6), squeeze=False)
    for panel, curve in zip(panels[0], curves, strict=True):
        draw_panel(panel, curve)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def draw_panel(panel: Any, curve: Curve) -> None:
    from matplotlib.ticker import NullFormatter

    panel.set_title(curve.title, fontsize=10)
    panel.set_xlabel(curve.along)
    for place, (what, values) in enumerate(curve.costs.items()):
        axes = panel if place == 0 else panel.twinx()
        colour = ("tab:blue", "tab:orange")[place]
        axes.plot(curve.at, values, marker="." if len(values) < 60 else None, color=colour)
        axes.set_ylabel(what, color=colour)
        axes.set_ylim(bottom=0)
        if len(curve.costs) > 1 and place == 0:
            axes.set_yscale("log")
            axes.set_ylim(bottom=min(values) / 2, top=2 * max(values))
        if curve.is_logarithmic:
            axes.set_xscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())


def print_curve(curve: Curve) -> None:
    print(f"\n{curve.title}")
    for place, size in enumerate(curve.at):
        if len(curve.at) < 40 or place % (len(curve.at) // 20) == 0:
            print(f"  {curve.along} {size:>12g}: " + ", ".join(f"{values[place]:.4g} {what}" for what, values in curve.costs.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=Path("docs/assets"), help="where the pictures go")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--scratch", help="where to write runs; about 3 GB are needed")
    parser.add_argument("--quick", action="store_true", help="a hundredth of everything: shows that it works")
    parser.add_argument("--record-calls", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record_calls:
        record_calls(options.record_calls)
        return
    share = 100 if options.quick else 1
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= options.records // share]
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        recording = [calls_curve(options.calls // share), steps_curve(options.steps // (10 if options.quick else 1), scratch)]
        comparing = [
            comparing_curve("Comparing, statistics", "records a side", sides_of(sizes, scratch, of_records)),
            comparing_curve(
                "Comparing, tensors", "bytes a side", sides_of([size // share for size in (10**7, 10**8, 10**9)], scratch, of_bytes)
            ),
            comparing_curve("Comparing, 1 000 records a rank", "ranks", sides_of([1, 2, 4, 8, 16], scratch, of_ranks)),
        ]
    for curve in (*recording, *comparing):
        print_curve(curve)
    draw(recording, options.into / "growth-recording.png")
    draw(comparing, options.into / "growth-comparing.png")


if __name__ == "__main__":
    main()
