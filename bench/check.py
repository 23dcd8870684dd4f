# SPDX-License-Identifier: Apache-2.0
"""How fast calls are checked, and what a check says about a device: five small networks, recorded on the CPU, checked anywhere.

    python -m bench.check                                     what the CPU does with its own recordings, and how --jobs scales
    python -m bench.check --device cuda                       the same calls on a GPU, TF32 off and on
    python -m bench.check --dump DUMP --peer-python PYTHON    one dump of mindstudio-probe, checked by it and by us (it needs CUDA)

Figures of one run are comparable with each other only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.check.networks import NETWORKS, VARIANTS, record
from ulpscope.model.checks import Check
from ulpscope.workflows.checking import check_run


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
    path = record("gpt", folder / "speed", steps=4)
    for many in jobs:
        check = check_run(path, device=device, jobs=many)
        found = row(check, network="gpt, 4 steps", jobs=many)
        show(found, check)
        yield found


def against_peer(dump: Path, python: str, device: str) -> Iterator[dict[str, Any]]:
    """Both on the peer's own dump: a folder with dump.json."""
    with tempfile.TemporaryDirectory() as out:
        command = [python, "-m", "msprobe.msprobe", "acc_check", "-api_info", str(dump / "dump.json"), "-o", out]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:])
        results = sorted(Path(out).glob("accuracy_checking_result*.csv"))
        peer_calls = sum(1 for _ in results[0].open()) - 1 if results else 0
    check = check_run(dump, device=device, jobs=1)
    found = row(check, dump=str(dump), peer_calls=peer_calls, peer_seconds=round(seconds, 1))
    found["peer calls/s"] = round(peer_calls / seconds, 2)
    show(found, check)
    yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--jobs", default="1,2")
    parser.add_argument("--dump", type=Path, help="a folder with a dump.json of mindstudio-probe")
    parser.add_argument("--peer-python", help="the python of an environment with mindstudio-probe")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.dump is not None:
            rows += against_peer(options.dump, options.peer_python or sys.executable, options.device)
        else:
            rows += soundness(folder, options.device, options.networks.split(","), options.variants.split(","))
            rows += speed(folder, options.device, [int(one) for one in options.jobs.split(",")])
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
