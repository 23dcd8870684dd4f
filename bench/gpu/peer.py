# SPDX-License-Identifier: Apache-2.0
"""Train under mindstudio-probe on the device and print its figures as JSON.

`python -m bench.gpu --peer` runs this with the peer on PYTHONPATH. Level L1 with risk_level ALL records every API that the tool wraps,
forward and backward. One step only: it is slow, and its tensors are many gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
from bench.gpu.model import FULL, QUICK, training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", choices=["statistics", "tensors"], required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()

    from msprobe.pytorch import PrecisionDebugger

    task = {"statistics": "statistics", "tensors": "tensor"}[options.keep]
    block = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = {"task": task, "dump_path": str(options.into), "rank": [], "step": [], "level": "L1", "risk_level": "ALL", task: block}
    options.into.mkdir(parents=True, exist_ok=True)
    file = options.into.with_suffix(".json")
    file.write_text(json.dumps(config))

    model, _, step = training(QUICK if options.quick else FULL, "cuda")
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    debugger = PrecisionDebugger(config_path=str(file))
    begin = time.perf_counter()
    debugger.start(model=model)
    step()
    debugger.stop()
    debugger.step()
    torch.cuda.synchronize()
    files = [path for path in options.into.rglob("*") if path.is_file()]
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    elapsed = time.perf_counter() - begin
    print(json.dumps({"seconds": elapsed, "bytes": sum(path.stat().st_size for path in files), "files": len(files)}))
    shutil.rmtree(options.into)


if __name__ == "__main__":
    main()
