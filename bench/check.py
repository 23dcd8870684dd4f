# SPDX-License-Identifier: Apache-2.0
"""Measure how fast calls are checked, and what a check says about a device: five small networks, recorded on the CPU, checked anywhere.

    python -m bench.check                                     what the CPU does with its own recordings, and how --jobs scales
    python -m bench.check --device cuda                       the same calls on a GPU, TF32 off and on
    python -m bench.check --networks "" --jobs "" --where     where the time of a check goes, part by part and call by call

Figures of one run are comparable with each other only. `calls/s` is with the start of all processes, `going` from the first call that is
known to the last. `bench.check_peer` measures the same against mindstudio-probe.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.check.networks import NETWORKS, VARIANTS, record
from ulpscope.model.check.checks import Check
from ulpscope.replay.yardstick import honest, yardstick
from ulpscope.workflows.check import one_call as check_calls
from ulpscope.workflows.check.checking import check_run

STEPS = 8


@contextmanager
def tf32(is_on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def row(check: Check, **facts: Any) -> dict[str, Any]:
    elapsed = sorted(call.elapsed_s for call in check.calls)
    return {
        **facts,
        "calls": len(check.calls),
        **check.counts,
        "coverage": round(check.coverage, 4),
        "precision": ", ".join(f"{one.family}: {one.operands}" for one in check.precision),
        "nearest": round(max((call.multiple or 0.0 for call in check.calls if call.status == "passed"), default=0.0), 3),
        "calls/s": round(len(check.calls) / check.elapsed_s, 1),
        "median ms": round(1000 * elapsed[len(elapsed) // 2], 2),
    }


def show(found: dict[str, Any], check: Check) -> None:
    print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    for call in check.calls:
        if call.status in ("failed", "warning"):
            print(f"    {call.status} {call.name} {call.phase}: {call.reason[:200]}")
    for reason, many in check.reasons.items():
        print(f"    skipped {many}: {reason[:160]}")


def soundness(folder: Path, device: str, networks: list[str], variants: list[str]) -> Iterator[dict[str, Any]]:
    for name in networks:
        for variant in variants:
            path = record(name, folder / f"{name}-{variant}", variant=variant)
            modes = [False, True] if device.startswith("cuda") and variant == "float32" else [False]
            for is_on in modes:
                with tf32(is_on):
                    check = check_run(path, device=device, isolated=False)
                found = row(check, network=name, variant=variant, tf32=is_on)
                show(found, check)
                yield found


def speed(folder: Path, device: str, jobs: list[int]) -> Iterator[dict[str, Any]]:
    path = record("gpt", folder / "speed", steps=STEPS) if jobs else folder
    going: list[float] = []
    for many in jobs:
        times: list[float] = []
        check = check_run(path, device=device, jobs=many, found=lambda call, times=times: times.append(time.perf_counter()))
        going.append((len(times) - 1) / (times[-1] - times[0]))
        found = row(check, network=f"gpt, {STEPS} steps", jobs=many) | {
            "going": round(going[-1], 1),
            "times": round(going[-1] / going[0], 2),
        }
        show(found, check)
        yield found


PARTS = {
    "read inputs, and results": (check_calls.CallChecker, "_prepare"),
    "on the device": (check_calls, "run_on_device"),
    "float64": (honest.Evaluations, "exact"),
    "probes": (honest.Moves, "_probe"),
    "other kernels": (honest.Evaluations, "_decomposed"),
    "second opinion": (check_calls, "second_opinions"),
    "ratios": (yardstick, "ratios"),
}


@contextmanager
def timed_parts(seconds: dict[str, float]) -> Iterator[None]:
    """Add up how long the parts of a check take; a part inside another counts in both."""
    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            before = vars(owner)[name]
            function = before.func if isinstance(before, cached_property) else before

            def timed(*args: Any, part: str = part, function: Any = function, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return function(*args, **kwargs)
                finally:
                    seconds[part] += time.perf_counter() - begin

            after: Any = timed
            if isinstance(before, cached_property):
                after = cached_property(timed)
                after.__set_name__(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, after)
        yield


def where(folder: Path, device: str) -> None:
    """Check one recording twice in this process: the first column holds the costs that only the first calls have."""
    path = record("gpt", folder / "where", steps=2)
    seconds = [defaultdict[str, float](float) for _ in range(2)]
    checks = []
    for columns in seconds:
        with timed_parts(columns):
            begin = time.perf_counter()
            checks.append(check_run(path, device=device, isolated=False))
            columns["all"] = time.perf_counter() - begin
    many = len(checks[1].calls)
    for part in ("all", *PARTS):
        print(f"{part:28}" + "".join(f"{1000 * columns[part] / many:10.3f} ms a call" for columns in seconds))
    by_kind: defaultdict[str, list[float]] = defaultdict(list)
    for call in checks[1].calls:
        by_kind[f"{call.call.op} {call.phase}"].append(1000 * call.elapsed_s)
    for kind, times in sorted(by_kind.items(), key=lambda item: -sum(item[1]))[:12]:
        print(f"{kind:52} {len(times):4} calls {sum(times) / len(times):9.2f} ms each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--jobs", default="1,2")
    parser.add_argument("--where", action="store_true", help="show where the time of a check goes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows += soundness(folder, options.device, [*filter(None, options.networks.split(","))], options.variants.split(","))
        if options.where:
            where(folder, options.device)
        rows += speed(folder, options.device, [int(one) for one in options.jobs.split(",") if one])
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
