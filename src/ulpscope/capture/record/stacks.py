# SPDX-License-Identifier: Apache-2.0
"""Say which files on a stack are torch's, and whether torch runs a forward again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

__all__ = ["TORCH_FILES", "is_recompute"]

TORCH_FILES = (
    str(Path(torch.__file__).parent) + "/",
    "<eval_with_key>",  # the code of a graph, whose number changes from run to run
)
_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")


def is_recompute() -> bool:
    """Tell whether activation checkpointing runs a forward again right now: only then does its file stand on the stack of a backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False
