# SPDX-License-Identifier: Apache-2.0
"""Describe arguments and source lines in the words of api_accuracy_checker's json files; ptdbg's overflow files use them too."""

from __future__ import annotations

from typing import Any

from ulpscope.compat.tensor_files import TensorFiles
from ulpscope.model import DTYPES, Frame, TensorRecord

__all__ = ["Described", "frame_text"]


class Described:
    """Describes the arguments of one call as the old tool does; tensors with real data are numbered as they come."""

    def __init__(self, files: TensorFiles | None, stem: str, slots: dict[str, TensorRecord]) -> None:
        self._files = files
        self._stem = stem
        self._slots = slots
        self._count = 0

    def keyword(self, name: str, value: Any) -> Any:
        return {"type": "torch.device", "value": value} if name == "device" and isinstance(value, str) else self.value(value)

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(part) for part in value]
        if isinstance(value, dict):
            return self._special(value)
        return {"type": type(value).__name__, "value": value}

    def _special(self, value: dict[str, Any]) -> Any:
        kind = next(iter(value), "")
        if kind == "$tensor" and value[kind] in self._slots:
            return self.tensor(self._slots[value[kind]])
        if kind in ("$tuple", "$size"):
            return [self.value(part) for part in value[kind]]
        if kind == "$dtype":
            return {"type": "torch.dtype", "value": f"torch.{value[kind]}"}
        if kind == "$device":
            return {"type": "torch.device", "value": value[kind]}
        if kind == "$slice":
            return {"type": "slice", "value": value[kind]}
        if kind == "$int":
            return {"type": "int", "value": int(value[kind])}
        if kind.startswith("$"):
            return {"type": str(value[kind])[:60], "value": str(value.get("repr", ""))[:200]}
        return {name: self.value(part) for name, part in value.items()}

    def tensor(self, slot: TensorRecord) -> dict[str, Any]:
        if self._files is not None and slot.content is not None:
            file = self._files.link(slot.content, f"{self._stem}.{self._count}.pt")
            self._count += 1
            return {"type": "torch.Tensor", "datapath": str(file.absolute()), "requires_grad": slot.requires_grad}
        high, low = _extremes(slot)
        return {
            "type": "torch.Tensor",
            "dtype": f"torch.{slot.dtype}",
            "shape": list(slot.shape),
            "Max": high,
            "Min": low,
            "requires_grad": slot.requires_grad,
        }


def _extremes(slot: TensorRecord) -> tuple[float | int | None, float | int | None]:
    summary = slot.summary
    if summary is None or summary.max is None or summary.min is None:
        return None, None
    if DTYPES[slot.dtype].is_floating:
        return summary.max, summary.min
    return int(summary.max), int(summary.min)


def frame_text(frame: Frame) -> str:
    return f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.code}"
