# SPDX-License-Identifier: Apache-2.0
"""Run every program on a CUDA device, with and without a capture, at every level: `python tests/harmless/on_cuda.py FOLDER`.

No test runs it, since the machines that run the tests have no such device. It ends with code 1 if anything differs. Programs that give two
different answers without a capture already are named and left out.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.harmless import programs
from tests.harmless.on_npu import CASES
from tests.harmless.test_harmless import allowed, recorded, recording


def main() -> int:
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # their backward is not deterministic
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    wrong: list[str] = []
    num_cases = 0
    for name in sorted(programs.PROGRAMS):
        without = programs.run(name, programs.Nothing, "cuda")
        if programs.differences(without, programs.run(name, programs.Nothing, "cuda")):
            print(f"{name}: two answers without a capture, left out")
            continue
        for level, keep in CASES:
            num_cases += 1
            folder = Path(sys.argv[1]) / f"{name}-{level}"
            wrong += [f"{name}, level {level}, keep {keep}: {text}" for text in _differences(name, without, level, keep, folder)]
    print(f"{num_cases} cases on {torch.cuda.get_device_name()} with torch {torch.__version__}, {len(wrong)} differences", *wrong, sep="\n")
    return 1 if wrong else 0


def _differences(name: str, without: object, level: str, keep: str, folder: Path) -> list[str]:
    try:
        found = list(programs.differences(without, programs.run(name, recording(folder, level, keep), "cuda")))
    except Exception:
        return [traceback.format_exc()]
    calls, complaints = recorded(folder)
    return found + [text for text in complaints if not allowed(text)] + ([] if calls >= 2 else ["nothing was recorded"])


if __name__ == "__main__":
    sys.exit(main())
