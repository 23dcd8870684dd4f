# SPDX-License-Identifier: Apache-2.0
"""Run the programs on the emulated device, with and without a capture: `on_npu.py FOLDER` prints differences as JSON."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.harmless import programs
from tests.harmless.test_harmless import allowed, recorded, recording, watching
from ulpscope.testing import npu

NAMES = [
    *("mlp", "conv_batch_norm", "gpt_unfused", "gpt_sdpa", "gpt_dropout", "tied_weights", "checkpoint_reentrant"),
    *("checkpoint_not_reentrant", "in_place", "views_written_to", "autograd_function", "autocast_grad_scaler", "skipped_steps"),
    *("gradient_accumulation", "users_hooks", "users_dispatch_mode", "flop_counter", "double_backward", "retain_graph", "evaluation"),
    *("several_optimizers", "exception_in_mid_step"),
]
WATCHED = ["gpt_dropout", "checkpoint_not_reentrant", "users_dispatch_mode", "autocast_grad_scaler"]
CASES = [("api", "statistics"), ("module", "statistics"), ("both", "tensors"), ("op", "tensors")]


def main() -> None:
    warnings.simplefilter("ignore")
    npu.install()
    wrong = {}
    for number, name in enumerate(NAMES):
        without = programs.run(name, programs.Nothing, "npu")
        for level, keep in CASES if name == "gpt_dropout" else [CASES[number % len(CASES)]]:
            folder = Path(sys.argv[1]) / f"{name}-{level}"
            try:
                found = programs.differences(without, programs.run(name, recording(folder, level, keep), "npu"))
                calls, complaints = recorded(folder)
                found += [text for text in complaints if not allowed(text)] + (["nothing was recorded"] if calls < 2 else [])
            except Exception:
                found = [traceback.format_exc()]
            wrong[f"{name}-{level}-{keep}"] = "\n".join(found)
    for name in WATCHED:
        without = programs.run(name, programs.Nothing, "npu")
        for calls in (None, True):
            folder = Path(sys.argv[1]) / f"{name}-watch-{calls}"
            found = programs.differences(without, programs.run(name, watching(folder, calls), "npu"))
            wrong[f"{name}-watch-{calls}"] = "\n".join([*found, *(text for text in recorded(folder)[1] if not allowed(text))])
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
