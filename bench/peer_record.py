# SPDX-License-Identifier: Apache-2.0
"""Train under mindstudio-probe, in its own environment, and print the seconds of each step as JSON. Run by trunk.py.

Level L1 with risk_level ALL records every API that the tool wraps, forward and backward, as our level `api` does, and the calls inside
the optimizer too, for which we write one record with the gradients, weights and state.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from gpt import training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", choices=["statistics", "tensors"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--perturb", type=float, default=0.0)
    parser.add_argument("--without-optimizer", action="store_true", help="stop before the weights are updated")
    options = parser.parse_args()

    from msprobe.pytorch import PrecisionDebugger

    task = {"statistics": "statistics", "tensors": "tensor"}[options.keep]
    block = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = {"task": task, "dump_path": str(options.into), "rank": [], "step": [], "level": "L1", "risk_level": "ALL", task: block}
    options.into.mkdir(parents=True, exist_ok=True)
    file = options.into.with_suffix(".json")
    file.write_text(json.dumps(config))

    model, _, step = training(perturb=options.perturb)
    debugger = PrecisionDebugger(config_path=str(file))
    seconds: list[float] = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        debugger.start(model=model)
        if options.without_optimizer:
            step(before_update=debugger.stop)
        else:
            step()
            debugger.stop()
        debugger.step()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"steps": seconds, "close": 0.0}))


if __name__ == "__main__":
    main()
