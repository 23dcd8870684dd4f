# SPDX-License-Identifier: Apache-2.0
"""Measure whether a health recording stays flat: memory and size on disk over a million written steps, and over 25 000 trained ones.

    python bench/health_growth.py [--written 1000000] [--trained 25000] [--json FILE]

The written steps pass through the series on disk with its rotation and through the alerts, as in a health recording, without a model; the
trained ones are real steps of a small model under `ulpscope.record_health`. Printed are the resident memory of the process at ten moments
and the bytes on disk, and at the end how much memory was added after the first tenth. A few MB are the allocator's; growth with the steps
is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from ulpscope.judge.health.alerts import Vigil
from ulpscope.model import RunInfo
from ulpscope.model.health import HealthLayout, HealthStep, HealthTarget
from ulpscope.store import create_run
from ulpscope.store.series import SeriesSink, open_health

MOMENTS = 10


def resident_bytes() -> int:
    """Return the resident memory of this process, by /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS line: this needs Linux")


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def written(steps: int, folder: Path, *, max_bytes: int = 64 << 20) -> list[dict[str, float]]:
    """Write steps of 24 targets with signs, through the writer and the alerts."""
    targets = tuple(
        HealthTarget(kind=kind, name=f"layers.{layer}.weight", numel=4096, global_numel=4096, num_samples=64 if kind == "gradient" else 0)
        for kind in ("gradient", "parameter", "update")
        for layer in range(8)
    )
    layout = HealthLayout(targets)
    path = create_run(folder / "written", RunInfo())
    sink, vigil = SeriesSink(path, 0, max_bytes=max_bytes), Vigil(0)
    noise = np.random.default_rng(0).normal(1.0, 0.01, (997, len(targets), 6))

    def take(number: int) -> None:
        statistics = noise[number % 997]
        signs = bytes([number % 256]) * (8 * 8)
        step = HealthStep(step=number, time=float(number), layout=layout, statistics=statistics, scalars={"loss": 1.0}, signs=signs)
        sink.write(step)
        for alert in vigil.observe(step):
            sink.alert(alert)

    found = observed(take, steps, path)
    sink.close()
    return found


def trained(steps: int, folder: Path) -> list[dict[str, float]]:
    """Train real steps of a small model under a health recording with everything on."""
    import torch

    import ulpscope

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with ulpscope.record_health(
        model, optimizer, into=folder / "trained", bounds=(-1.0, 0.0, 1.0), max_bytes=8 << 20, quiet=True
    ) as health:

        def take(number: int) -> None:
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            health.log(loss=loss)

        assert health.path is not None
        return observed(take, steps, health.path)


def observed(take: Callable[[int], None], steps: int, path: Path) -> list[dict[str, float]]:
    """Measure memory, disk and microseconds a step at ten moments."""
    moments = {max(steps * tenth // MOMENTS, 1) for tenth in range(1, MOMENTS + 1)}
    found = []
    begin, before = time.perf_counter(), 0
    for number in range(1, steps + 1):
        take(number)
        if number in moments:
            seconds = (time.perf_counter() - begin) / (number - before)
            found.append({"step": number, "resident": resident_bytes(), "disk": disk_bytes(path), "seconds": seconds})
            begin, before = time.perf_counter(), number
    return found


def history(path: Path) -> dict[str, Any]:
    """Describe the steps left in the run: how many, from where to where, and the largest gap in each tenth."""
    steps = [step.step for step in open_health(path).steps(0)]
    gaps = np.diff(steps)
    tenths = np.array_split(gaps, min(MOMENTS, len(gaps)))
    return {
        "num_steps": len(steps),
        "first": steps[0],
        "last": steps[-1],
        "largest_gaps": [int(part.max()) for part in tenths if len(part)],
    }


def added_bytes(found: list[dict[str, float]]) -> float:
    """Return the memory that came after the first tenth."""
    return found[-1]["resident"] - found[0]["resident"]


def show(title: str, found: list[dict[str, float]], left: dict[str, Any]) -> None:
    print(f"\n{title}\n\n| steps | resident MB | disk MB | µs a step |\n|---|---|---|---|")
    for moment in found:
        print(f"| {moment['step']} | {moment['resident'] / 1e6:.1f} | {moment['disk'] / 1e6:.1f} | {moment['seconds'] * 1e6:.0f} |")
    print(f"\nadded after the first tenth: {added_bytes(found) / 1e6:.2f} MB")
    print(f"{left['num_steps']} steps are left, {left['first']} to {left['last']}, largest gap in each tenth: {left['largest_gaps']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--written", type=int, default=1_000_000)
    parser.add_argument("--trained", type=int, default=25_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    every: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ulpscope-growth-") as scratch:
        for name, run, steps in (("written", written, options.written), ("trained", trained, options.trained)):
            found = run(steps, Path(scratch))
            left = history(Path(scratch) / name)
            show(f"{steps} {name} steps", found, left)
            every[name] = {"moments": found, "history": left, "added": added_bytes(found)}
    if options.json:
        options.json.write_text(json.dumps(every))


if __name__ == "__main__":
    main()
