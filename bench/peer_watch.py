# SPDX-License-Identifier: Apache-2.0
"""Trains under mindstudio-probe, in its own environment, in turns with the bare step. Run by watch.py.

Its task nan_check needs an NPU and refuses to start elsewhere. What it has for other machines is `msprobe overflow_check`, which reads a
dump of statistics afterwards; so that dump is what is measured. Prints {"ratio": step with it over bare step} as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from gpt import training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    from msprobe.pytorch import PrecisionDebugger

    folder = Path(tempfile.mkdtemp())
    block = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = {"task": "statistics", "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": "L1", "statistics": block}
    (folder / "config.json").write_text(json.dumps(config))
    model, _, step = training()
    step()
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    ratios = []
    for _ in range(options.rounds):
        bare = min(_timed(step) for _ in range(options.steps))

        def checked() -> None:
            debugger.start(model=model)
            step()
            debugger.stop()
            debugger.step()

        checked()
        ratios.append(min(_timed(checked) for _ in range(options.steps)) / bare)
    print(json.dumps({"ratio": statistics.median(ratios)}))


def _timed(function: object) -> float:
    begin = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
