# SPDX-License-Identifier: Apache-2.0
"""Hunt on the emulated device, and stop the program at the call: print the reported calls, and the line, as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import ulpscope
from ulpscope.model import NonFinite, NonFiniteCall
from ulpscope.testing import npu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def main() -> None:
    warnings.simplefilter("error")
    npu.install()
    told: list[str] = []

    def stop(call: NonFiniteCall) -> None:
        told.append(str(call.record.call))
        raise ValueError("enough")

    model = nn.Sequential(Block(), Block()).to("npu")
    options = NonFinite(limit=None, passed_on=True, calls=True, at_once=True, on_event=stop)
    with tempfile.TemporaryDirectory() as folder, npu.inject("aten.gelu.default", "inf", call=1):
        try:
            with ulpscope.Capture(Path(folder) / "run", model, watch=options):
                model(torch.randn(4, 8, device="npu"))
        except ValueError as error:
            lines = [
                frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.name == "forward" and frame.filename == __file__
            ]
            print(json.dumps({"told": told, "line": lines[-1]}))


if __name__ == "__main__":
    main()
