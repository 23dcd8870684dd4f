# SPDX-License-Identifier: Apache-2.0
"""Write the three json files of api_accuracy_checker, and the real data beside them.

    forward_info_4711.json     {"Functional*silu*0": {"args": [...], "kwargs": {...}}, one API a line
    backward_info_4711.json    {"Functional*silu*0": [gradients of the outputs],
    stack_info_4711.json       {"Functional*silu*0": ["File ..., line ...", ...],
    forward_real_data/Functional*silu*0.0.pt

Each file is valid JSON after every entry: the closing brace is overwritten and written again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ulpscope.compat.checker.describing import Described, frame_text
from ulpscope.compat.json_files import GrowingJson
from ulpscope.compat.positions import with_positions
from ulpscope.compat.pt_files import save_pt
from ulpscope.compat.tensor_files import TensorFiles
from ulpscope.model import Arguments, CallRecord, LedgerEntry, SinkAbilities
from ulpscope.report.escaping import visible

__all__ = ["CheckerSink", "api_key"]

_TYPES = {"functional": "Functional", "Tensor": "Tensor", "torch": "Torch"}


def api_key(record: CallRecord) -> str | None:
    """Return the old key of a call, `Functional*silu*0`; None for a call that the old tool does not check."""
    namespace, _, name = record.call.op.partition(".")
    if namespace not in _TYPES or record.recompute or (name.startswith("_") and not name.startswith("__")):
        return None
    return f"{_TYPES[namespace]}*{name}*{record.call.index}"


class CheckerSink:
    """Writes the calls of one iteration; implements Sink."""

    abilities = SinkAbilities(shows_overwritten=True)

    def __init__(self, folder: Path, *, real_data: bool) -> None:
        self._files = TensorFiles(folder, save_pt) if real_data else None
        self._infos = {kind: GrowingJson(folder / f"{kind}_info_{os.getpid()}.json") for kind in ("forward", "backward", "stack")}

    def begin_step(self, step: int) -> None:
        """Do nothing: one iteration is one dump."""

    def end_step(self) -> None:
        """Do nothing: one iteration is one dump."""

    def note(self, entry: LedgerEntry) -> None:
        print(visible(f"api_accuracy_checker: could not {entry.what}: {entry.why}"), file=sys.stderr)

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        return self._files.keep(dtype, shape, buffer) if self._files is not None else None

    def write(self, record: CallRecord) -> None:
        key = api_key(record)
        if key is None or record.phase not in ("forward", "backward"):
            return
        record = with_positions(record, with_defaults=True)
        described = Described(self._files, f"{record.phase}_real_data/{key}", {str(slot.slot): slot for slot in record.slots})
        if record.phase == "backward":
            self._infos["backward"].add(key, [described.tensor(slot) for slot in record.slots if slot.slot.role == "input"])
            return
        arguments = record.arguments or Arguments()
        args = [described.value(value) for value in arguments.args]
        kwargs = {name: described.keyword(name, value) for name, value in (arguments.kwargs or {}).items()}
        self._infos["forward"].add(key, {"args": args, "kwargs": kwargs})
        self._infos["stack"].add(key, [frame_text(frame) for frame in record.stack])

    def close(self, *, complete: bool = True) -> None:
        for info in self._infos.values():
            info.close()
        if self._files is not None:
            self._files.close()
