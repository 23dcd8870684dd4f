# SPDX-License-Identifier: Apache-2.0
"""Write forward_info, backward_info and stack_info of calls that overflowed out of clean inputs, for `run_overflow_check.py` to read.

    forward_info_4711.json              {"Functional_x_0_forward": {"args": [...], "kwargs": {...}}}
    forward_real_data/rank0/            the arguments themselves, beside the json and only where asked for

The checker's own writer describes the arguments; here are only other names and the old folder of real data. A tensor whose type NumPy does
not have is described by its range instead, since its file would be of another type.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ulpscope.compat.checker.describing import Described, frame_text
from ulpscope.compat.json_files import GrowingJson
from ulpscope.compat.ptdbg.files.kept import KeptTensors
from ulpscope.model import DTYPES, Arguments, CallRecord, TensorRecord

__all__ = ["OverflowInfo"]

_NOT_IN_NPY = frozenset(name for name, entry in DTYPES.items() if entry.kind == "float") - {"float16", "float32", "float64"}


class OverflowInfo:
    """The three files of one process; each is made with its first entry."""

    def __init__(self, folder: Path, rank: int, *, with_values: bool) -> None:
        self._folder = folder
        self._rank = rank
        self._with_values = with_values
        self._files: dict[str, GrowingJson] = {}

    def add(self, api: str, record: CallRecord, tensors: KeptTensors | None) -> None:
        folder = self._folder / f"{record.phase}_real_data" / f"rank{self._rank}"
        described = _DescribedHere(record, folder / api, tensors if self._with_values else None)
        if record.phase == "backward":
            self._file("backward").add(api, [described.tensor(slot) for slot in record.slots if slot.slot.role == "input"])
        else:
            arguments = record.arguments or Arguments()
            args = [described.value(value) for value in arguments.args]
            kwargs = {name: described.keyword(name, value) for name, value in (arguments.kwargs or {}).items()}
            self._file("forward").add(api, {"args": args, "kwargs": kwargs})
        self._file("stack").add(api, [frame_text(frame) for frame in record.stack])

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, kind: str) -> GrowingJson:
        if kind not in self._files:
            self._files[kind] = GrowingJson(self._folder / f"{kind}_info_{os.getpid()}.json")
        return self._files[kind]


class _DescribedHere(Described):
    """Describes arguments as the checker does, with their values in .npy files at another place."""

    def __init__(self, record: CallRecord, stem: Path, tensors: KeptTensors | None) -> None:
        super().__init__(None, "", {str(slot.slot): slot for slot in record.slots})
        self._place = stem
        self._tensors = tensors

    def tensor(self, slot: TensorRecord) -> dict[str, Any]:
        if self._tensors is None or slot.content is None or slot.dtype in _NOT_IN_NPY:
            return super().tensor(slot)
        file = self._place.with_name(f"{self._place.name}.{self._count}.npy")
        self._count += 1
        self._tensors.name(slot.content, str(file))
        return {"type": "torch.Tensor", "datapath": str(file), "requires_grad": slot.requires_grad}
