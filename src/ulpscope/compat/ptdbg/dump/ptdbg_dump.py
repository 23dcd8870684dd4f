# SPDX-License-Identifier: Apache-2.0
"""Run one dump: an ordinary capture that writes old files, and reads only what these can need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ulpscope.compat.ptdbg.files.line_names import Counts, api_name
from ulpscope.compat.ptdbg.files.modes import DumpOptions
from ulpscope.compat.ptdbg.files.pkl_writer import DumpWriter
from ulpscope.compat.ptdbg.files.places import DumpPlace
from ulpscope.compat.ptdbg.files.template import TEMPLATE_MODES, write_template
from ulpscope.compat.ptdbg.files.vendor_ops import present_functions
from ulpscope.compat.screen import print_info
from ulpscope.model import CallName
from ulpscope.workflows.record.capturing import Capture

if TYPE_CHECKING:
    import torch

__all__ = ["Dumping"]


class Dumping:
    """One dump from its switch-on to its switch-off, or one step of the debugger. `step` is None where the tree has no folder for it."""

    def __init__(self, place: DumpPlace, options: DumpOptions, counts: Counts, *, step: int | None = None, rank: int | None = None) -> None:
        self._place = place
        self._options = options
        self._counts = counts
        self._step = step
        self._may_be_wanted = options.foresight()
        self._units: dict[str, str] = {}
        self._has_unit = False
        self._writer: DumpWriter | None = None
        select = [self._wants, "phase:forward", *(["phase:backward"] if options.needs_backward else [])]
        if not options.has_tensors:
            select.append("slot:none")
        self._capture = Capture.into_sink(
            self._open,
            operators=True,
            functions=present_functions(),
            keep="tensors" if options.has_tensors else "fingerprint",
            ranks=rank,
            select=select,
        )

    def start(self) -> None:
        self._capture.start()

    def pause(self) -> None:
        self._capture.pause()
        self._leave_template()

    def resume(self) -> None:
        self._capture.resume()

    def stop(self) -> None:
        self._capture.stop()
        self._counts.end_capture()
        self._leave_template()
        if self._writer is not None and self._options.mode == "list":
            print_info(f"{self._writer.num_apis} APIs were in the scope of mode 'list'")

    @property
    def folder(self) -> Path | None:
        """Return the folder of the files; None where this rank is not dumped."""
        return self._writer.folder if self._writer is not None else None

    def take_whole(self, module: torch.nn.Module, name: str) -> None:
        """Dump this module as one unit instead of APIs, until `take_apart`."""
        self._units[f"module.{name}"] = name
        self._has_unit = True
        self._capture.take_whole(module, name)

    def take_apart(self) -> None:
        self._has_unit = False
        self._capture.take_apart()

    def _open(self, rank: int) -> DumpWriter:
        self._writer = DumpWriter(self._place.rank_folder(rank, self._step), self._options, self._old_name)
        return self._writer

    def _wants(self, module: str, call: CallName) -> bool:
        self._counts.see(call)
        if self._has_unit and call.op not in self._units:
            return False
        name = self._old_name(call)
        return name is not None and self._may_be_wanted(name)

    def _old_name(self, call: CallName) -> str | None:
        name = self._units.get(call.op) or api_name(call.op)
        return f"{name}_{self._counts.number(call)}" if name is not None else None

    def _leave_template(self) -> None:
        if self._writer is None:
            return
        try:
            if self._options.mode in TEMPLATE_MODES:
                write_template(self._writer.folder, self._options)
        except OSError as error:
            print_info(f"compare_data.py could not be written ({error.strerror})")
