# SPDX-License-Identifier: Apache-2.0
"""Write a health run for TensorBoard: its scalars, the gradient norm of each layer and the update ratio of each parameter.

The package tensorboard writes the event files; torch is not needed for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ulpscope._optional import require
from ulpscope.model.health import HealthStep

__all__ = ["EventWriter"]

_RMS = 3


class EventWriter:
    """Writes one step after another."""

    def __init__(self, folder: Path) -> None:
        events = require("tensorboard.summary.writer.event_file_writer", extra="tensorboard", purpose="writing for TensorBoard")
        self._event = require("tensorboard.compat.proto.event_pb2", extra="tensorboard", purpose="writing for TensorBoard").Event
        self._summary = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard", purpose="writing for TensorBoard").Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._file: Any = events.EventFileWriter(str(folder))

    def write(self, step: HealthStep) -> None:
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in tagged_scalars(step).items()]
        self._file.add_event(self._event(wall_time=step.time, step=step.step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()


def tagged_scalars(step: HealthStep) -> dict[str, float]:
    """Return the values that TensorBoard shows of a step, by tag: `scalar/loss`, `gradient/layers.0.fc`, `update_ratio/layers.0.fc`."""
    found = {f"scalar/{name}": value for name, value in step.scalars.items()}
    rows = {(target.kind, target.name): row for row, target in enumerate(step.layout.targets)}
    squares: dict[str, float] = {}
    for (kind, name), row in rows.items():
        target, rms = step.layout.targets[row], float(step.statistics[row, _RMS])
        layer = target.layer or name
        if kind == "gradient" and np.isfinite(rms):
            squares[layer] = squares.get(layer, 0.0) + rms * rms * target.numel
        weight = rows.get(("parameter", name))
        if kind == "update" and weight is not None and step.statistics[weight, _RMS] > 0:
            found[f"update_ratio/{name}"] = rms / float(step.statistics[weight, _RMS])
    found |= {f"gradient/{layer}": total**0.5 for layer, total in squares.items()}
    if squares:
        found["scalar/gradient_norm"] = sum(squares.values()) ** 0.5
    return found
