# SPDX-License-Identifier: Apache-2.0
"""Writes one dump: python dump.py CONFIG. Needs mindstudio-probe; no test runs this."""

from __future__ import annotations

import inspect
import sys

from train import train

from msprobe.pytorch import PrecisionDebugger


class Debugger:
    """One face for both generations: 1.0 takes the model when it is made, later versions at start."""

    def start(self, model) -> None:
        if "model" in inspect.signature(PrecisionDebugger.start).parameters:
            self.real = PrecisionDebugger(config_path=sys.argv[1])
            self.real.start(model=model)
        else:
            self.real = PrecisionDebugger(config_path=sys.argv[1], model=model)
            self.real.start()

    def stop(self) -> None:
        self.real.stop()

    def step(self) -> None:
        self.real.step()


if __name__ == "__main__":
    train(Debugger())
