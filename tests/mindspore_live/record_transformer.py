# SPDX-License-Identifier: Apache-2.0
"""Records the transformer for three steps: `python -m tests.mindspore_live.record_transformer FOLDER`, with MindSpore.

The folder `tests/mindspore_runs/recorded/transformer` is its result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ulpscope.mindspore
from tests.mindspore_live.transformer import made, train

__all__ = ["record_transformer"]


def record_transformer(folder: Path) -> None:
    net = made()
    with ulpscope.mindspore.Capture(folder, net, keep="tensors") as capture:
        train(net, capture.step)


if __name__ == "__main__":
    folder, sys.argv = Path(sys.argv[1]), ["record_transformer.py"]  # the run says how it was made, and nothing of this machine
    record_transformer(folder)
