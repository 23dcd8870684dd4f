# SPDX-License-Identifier: Apache-2.0
"""Run the tasks overflow_check and nan_check: hunt for inf and NaN, and write the tree of a tensor dump with the calls that left some.

A device that stops at its largest number instead of inf is believed too. After `overflow_nums` calls the training ends with an exception;
-1 and nan_check never end it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.compat.msprobe.dump.choosing import Choice
from ulpscope.compat.msprobe.dump.dump_writer import DumpOptions, MsprobeSink
from ulpscope.compat.msprobe.dump.entry_names import Names
from ulpscope.compat.msprobe.dump.exceptions import MsprobeException
from ulpscope.compat.msprobe.dump.msprobe_dump import rank_option
from ulpscope.compat.msprobe.dump.tasks import Place
from ulpscope.model import CallRecord, NonFinite, NonFiniteCall
from ulpscope.report.escaping import visible
from ulpscope.workflows.record.capturing import Capture

__all__ = ["OverflowTask"]


class _OverflowSink(MsprobeSink):
    """Holds the tensors of the hunt; it writes only the calls it is told of, and a step without an overflow leaves no files."""

    def begin_step(self, step: int) -> None:
        self.end_step()
        self._names.begin_step()
        self._choice.begin_step()

    def keep(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        if self._step is None:
            self._open()
        return super().keep(dtype, shape, buffer)

    def write(self, record: CallRecord) -> None:
        """Ignore the record: the hunt also writes the calls around a finding, and what became of it."""

    def write_call(self, record: CallRecord) -> str | None:
        """Write one call and return its name, or None where the old tool has none."""
        name = self._names.name(record.module, record.call)
        if name is None or record.phase not in ("forward", "backward"):
            return None
        self._choice.begins(record.module, record.call)
        super().write(record)
        self.flush()
        return name.of(record.phase)


class OverflowTask:
    """One running check; implements Task."""

    def __init__(self, config: DebuggerConfig, model: Any, place: Place, iteration: int) -> None:
        self._place = place
        self._iteration = iteration
        self._limit = None if config.task == "nan_check" or config.options.overflow_nums == -1 else config.options.overflow_nums
        self._count = 0
        self._is_started = False
        names = Names(model)
        options = DumpOptions(task=config.task, level=config.level, layout=place.layout, extra_info=config.extra_info, values="all")
        self._sink = _OverflowSink(self._folder, options, names, Choice(config.options, names, expands=False))
        watch = NonFinite(limit=None, passed_on=True, ring=0, calls=config.level != "L0", at_once=True, on_event=self._take_down)
        self._capture = Capture.into_sink(self._open, operators=True, model=model, ranks=rank_option(config), watch=watch)

    def resume(self) -> None:
        if self._is_started:
            self._capture.resume()
        else:
            self._is_started = True
            self._capture.start()

    def pause(self) -> None:
        self._capture.pause()

    def next_step(self, iteration: int) -> None:
        self._capture.step()
        self._iteration = iteration

    def stop(self) -> None:
        self._capture.stop()

    def _open(self, rank: int) -> MsprobeSink:
        return self._sink

    def _folder(self) -> Path:
        return self._place.of_step(self._iteration)

    def _take_down(self, call: NonFiniteCall) -> None:
        name = self._sink.write_call(call.record)
        if name is None:
            return
        self._count += 1
        how = "inf or NaN out of finite inputs" if call.kind in ("made", "soft") else "inf or NaN that it was given"
        print(visible(f"msprobe: overflow {self._count}: {name}: {how}; its data are in '{self._folder()}'"), file=sys.stderr)
        if self._limit is not None and self._count >= self._limit:
            raise MsprobeException(
                f"the training ends after {self._count} of {self._limit} overflows (overflow_nums), the last in {name}; "
                f"their data are in '{self._folder()}'"
            )
