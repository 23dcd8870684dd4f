# SPDX-License-Identifier: Apache-2.0
"""Measure checks per second, ours against mindstudio-probe's acc_check, on one dump that mindstudio-probe itself recorded.

    python -m bench.check_peer --device cuda --peer-python PYTHON [--peer-path FOLDER] [--keep tensors]

The dump is one training step of a small GPT with a convolutional net in front, recorded on the CPU (level L1, risk_level ALL). Both tools
then check it as their commands do, start and all. `going` is without the start, for both in the same way: what a larger net costs more
than a smaller one, both with the same start, the same first kernels and the same libraries to load. Our commands are short beside
their start, so that each is run `--repeats` times, and the quickest counts. A check is one direction of one API that was judged; what a
tool skips does not count. The peer needs CUDA or an NPU; with `--device cpu` only our side is measured. FOLDER goes before the peer's
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, HEADS, WORDS = 64, 4, 100
TASKS = {"statistics": "statistics", "tensors": "tensor"}


def train(layers: int, before: Any, after: Any) -> None:
    """Train one step; runs in the peer's environment and imports nothing but torch."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, WIDTH, 3, 2, 1)
            self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.GroupNorm(4, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x: Any) -> Any:
            x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
            x = F.silu(self.norm2(self.conv2(x))).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Net()
    images, target = torch.randn(4, 3, 16, 16), torch.randint(0, WORDS, (4 * 16,))
    before(model)
    F.cross_entropy(model(images).flatten(0, 1), target).backward()
    after()


def record(into: Path, keep: str, layers: int) -> None:
    """Record with the peer's own debugger; run by its own python."""
    from msprobe.pytorch import PrecisionDebugger

    task = TASKS[keep]
    block = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = {"task": task, "dump_path": str(into), "rank": [], "step": [], "level": "L1", "risk_level": "ALL", task: block}
    into.mkdir(parents=True, exist_ok=True)
    file = into.with_suffix(".json")
    file.write_text(json.dumps(config))
    debugger = PrecisionDebugger(config_path=str(file))

    def after() -> None:
        debugger.stop()
        debugger.step()

    train(layers, lambda model: debugger.start(model=model), after)


def timed(command: list[str], environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        print(done.stdout[-3000:], done.stderr[-3000:])
    return time.perf_counter() - begin


def theirs(dump: Path, python: str, environment: dict[str, str]) -> dict[str, Any]:
    out = dump.parent / "acc_check"
    out.mkdir()
    seconds = timed([python, "-m", "msprobe.msprobe", "acc_check", "-api_info", str(dump), "-o", str(out)], environment)
    counts = {"checked": 0, "skipped": 0, "not passed": 0}
    for file in out.glob("accuracy_checking_result*.csv"):
        for row in csv.DictReader(file.open(newline="", encoding="utf-8-sig")):
            for cell in (row["Forward Test Success"].strip().lower(), row["Backward Test Success"].strip().lower()):
                counts["checked"] += cell in ("true", "false", "pass", "warning", "error")
                counts["not passed"] += cell in ("false", "warning", "error")
                counts["skipped"] += cell == "skip"
    return {"seconds": seconds, **counts}


def ours(dump: Path, device: str, jobs: int) -> dict[str, Any]:
    file = dump.parent / f"check{jobs}.out.json"
    command = [
        sys.executable,
        "-m",
        "ulpscope",
        "check",
        str(dump),
        "--device",
        device,
        "--quiet",
        "--json",
        str(file),
        "--jobs",
        str(jobs),
    ]
    seconds = timed(command, dict(os.environ))
    found = json.loads(file.read_text())["counts"]
    not_passed = found["failed"] + found["warning"]
    return {"seconds": seconds, "checked": found["passed"] + not_passed, "skipped": found["skipped"], "not passed": not_passed}


def going(small: dict[str, Any], large: dict[str, Any]) -> float:
    return float(large["checked"] - small["checked"]) / (large["seconds"] - small["seconds"])


def quickest(dump: Path, device: str, jobs: int, repeats: int) -> dict[str, Any]:
    return min((ours(dump, device, jobs) for _ in range(repeats)), key=lambda found: float(found["seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", choices=list(TASKS), default="statistics")
    parser.add_argument("--repeats", type=int, default=3, help="of our commands")
    parser.add_argument("--layers", default="1,24", help="of the smaller and of the larger net")
    parser.add_argument("--peer-python", default=sys.executable, help="the python of an environment with mindstudio-probe")
    parser.add_argument("--peer-path", default="", help="a folder to look for it in")
    parser.add_argument("--jobs", default="1,4")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = [int(one) for one in options.layers.split(",")]
    if options.record is not None:
        record(options.record, options.keep, layers[0])
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [options.peer_path, os.environ.get("PYTHONPATH", "")]))}
    with tempfile.TemporaryDirectory() as scratch:
        dumps = []
        for many in layers:
            into = Path(scratch) / f"layers{many}"
            words = ["--record", str(into), "--keep", options.keep, "--layers", str(many)]
            timed([options.peer_python, __file__, *words], environment)
            dumps += into.rglob("dump.json")
        small, large = dumps
        rows = []
        for jobs in (int(one) for one in options.jobs.split(",")):
            less, found = (quickest(dump, options.device, jobs, options.repeats) for dump in (small, large))
            rows.append(row(f"ulpscope check --jobs {jobs}", less, found))
            print(told(rows[-1]), flush=True)
        if options.device != "cpu":
            python = options.peer_python
            less, found = (theirs(dump, python, environment) for dump in (small, large))
            rows.append(row("acc_check", less, found))
            print(told(rows[-1]), flush=True)
            for one in rows[:-1]:
                one["times"], one["times, going"] = (one[name] / rows[-1][name] for name in ("checks/s", "going"))
                print(told(one), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


def row(tool: str, less: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    return {"tool": tool, **found, "checks/s": found["checked"] / found["seconds"], "going": going(less, found)}


def told(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {round(value, 2) if isinstance(value, float) else value}" for name, value in row.items())


if __name__ == "__main__":
    main()
