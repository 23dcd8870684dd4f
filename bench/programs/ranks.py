# SPDX-License-Identifier: Apache-2.0
"""Record the layouts of tests/harmless: each in processes of its own, bare and recorded twice at every level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["record_layout"]

_SCRIPT = Path(__file__).parents[2] / "tests" / "harmless" / "on_layouts.py"
_LIMIT_S = 300


def record_layout(name: str, world_size: int, levels: Sequence[str], folder: Path) -> list[str]:
    """Record a layout into `folder/NAME-LEVEL-first` and `-second`; return the differences from the bare run on any rank."""
    command = [sys.executable, str(_SCRIPT)]
    arguments = [str(world_size), str(folder), f"{name}:{','.join(levels)}"]
    environment = {**os.environ, "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *arguments], env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=_LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if ended := [f"rank {number} ended with {rank.returncode}" for number, rank in enumerate(ranks) if rank.returncode]:
        raise RuntimeError(f"{', '.join(ended)}: {said[0].strip()[-400:]}")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return [f"rank {rank}, {case}: {text}" for rank, cases in enumerate(found) for case, text in cases.items() if text]
