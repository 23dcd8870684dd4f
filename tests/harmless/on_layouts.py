# SPDX-License-Identifier: Apache-2.0
"""Run one of several processes that train together: `on_layouts.py RANK WORLD_SIZE FOLDER NAME:LEVEL,LEVEL...`.

Each layout runs without a capture and then twice with one at each of its levels. Differences are written to FOLDER/RANK.json, the
recordings to FOLDER/NAME-LEVEL-first and -second.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import ulpscope
from tests.harmless import programs
from tests.harmless.layouts import LAYOUTS, WITHOUT_MODULES, nothing


def run(name: str, rank: int, world_size: int, step: Any = nothing) -> dict[str, Any]:
    torch.manual_seed(1)
    return LAYOUTS[name](rank, world_size, step)


def compare(name: str, level: str, folder: Path, rank: int, world_size: int, without: dict[str, Any]) -> str:
    """Run one layout at one level, and return what went wrong."""
    wrong = []
    for which in ("first", "second"):
        place = folder / f"{name}-{level}-{which}"
        try:
            with ulpscope.Capture(place, level=level, keep="tensors") as capture:
                found = run(name, rank, world_size, capture.step)
            wrong += programs.differences(without, found)
            dist.barrier()
            recorded = ulpscope.open_run(place)
            wrong += [f"ledger: {entry.what}: {entry.why}" for entry in recorded.ledger(rank)]
            calls = sum(1 for step in recorded.steps(rank) for record in recorded.records(rank, step) if record.level != "state")
            if calls < 4 and name not in WITHOUT_MODULES:
                wrong.append("next to nothing was recorded")
        except Exception:
            wrong.append(traceback.format_exc())
    return "\n".join(wrong)


def main() -> None:
    rank, world_size, folder, cases = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    wrong: dict[str, str] = {}
    for name, _, levels in (case.partition(":") for case in cases):
        begun = time.perf_counter()
        without = run(name, rank, world_size)
        for level in levels.split(","):
            wrong[f"{name}-{level}"] = compare(name, level, folder, rank, world_size, without)
        print(f"{name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    (folder / f"{rank}.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
