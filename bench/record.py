# SPDX-License-Identifier: Apache-2.0
"""Train under one recorder of ours, or none, and print the seconds of each step as JSON. Run by trunk.py."""

from __future__ import annotations

import argparse
import contextlib
import json
import time

from gpt import training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", choices=["nothing", "fingerprint", "statistics", "tensors"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--into", required=True)
    parser.add_argument("--perturb", type=float, default=0.0)
    options = parser.parse_args()

    model, optimizer, step = training(perturb=options.perturb)
    seconds: list[float] = []
    with contextlib.ExitStack() as stack:
        capture = None
        if options.keep != "nothing":
            import ulpscope

            capture = stack.enter_context(ulpscope.Capture(options.into, model=model, optimizer=optimizer, level="api", keep=options.keep))
        for _ in range(options.steps):
            begin = time.perf_counter()
            step()
            if capture is not None:
                capture.step()
            seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    print(json.dumps({"steps": seconds, "close": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
