# SPDX-License-Identifier: Apache-2.0
"""Keep the largest values that each clean call left: they show which call came nearest to the end of its dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ulpscope.capture.nonfinite.hunt_records import SeenCall
from ulpscope.model import Phase, Slot, Summary, TensorRecord

__all__ = ["Ranges"]

_MOST_RANGES = 64


@dataclass(slots=True)
class _Range:
    low: float | None
    high: float
    magnitude: float
    step: int
    numel: int


class Ranges:
    """The moment of the largest magnitude, for each place, phase and dtype."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, Phase, torch.dtype], _Range] = {}

    def note(self, call: SeenCall, tensor: torch.Tensor, low: float | None, high: float) -> None:
        magnitude = high if low is None else max(-low, high)
        key = (call.place.module, call.place.op, call.phase, tensor.dtype)
        known = self._found.get(key)
        if known is None or magnitude > known.magnitude:
            self._found[key] = _Range(low, high, magnitude, call.step, tensor.numel())

    def nearest(self) -> list[TensorRecord]:
        """Return the ranges that came nearest to the end of their dtype, as records."""
        nearest = sorted(self._found.items(), key=lambda item: _headroom(item[0][3], item[1].magnitude))[:_MOST_RANGES]
        return [_range_record(key, found) for key, found in nearest if found.magnitude > 0]


def _headroom(dtype: torch.dtype, magnitude: float) -> float:
    return torch.finfo(dtype).max / magnitude if magnitude else float("inf")


def _range_record(key: tuple[str, str, Phase, torch.dtype], found: _Range) -> TensorRecord:
    module, op, phase, dtype = key
    name = str(dtype).removeprefix("torch.")
    summary = Summary(found.numel, found.low, found.high)
    return TensorRecord(slot=Slot("state", (module, op, phase)), dtype=name, shape=(), summary=summary, note=f"step {found.step}")
