# SPDX-License-Identifier: Apache-2.0
"""Run the tasks statistics, tensor, structure and acc_check (once run_ut): an ordinary capture that writes the old tree.

The pre-check reads the statistics of a dump. So its task dumps the calls that `white_list` and `black_list` leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.compat.msprobe.dump.choosing import Choice, check_scope
from ulpscope.compat.msprobe.dump.custom_apis import registered_functions
from ulpscope.compat.msprobe.dump.dump_writer import DumpOptions, MsprobeSink
from ulpscope.compat.msprobe.dump.entry_names import Names
from ulpscope.compat.msprobe.dump.tasks import Place
from ulpscope.compat.ptdbg.files.vendor_ops import present_functions
from ulpscope.errors import InputError
from ulpscope.model import CallName
from ulpscope.workflows.record.capturing import Capture

if TYPE_CHECKING:
    import torch

__all__ = ["DumpTask", "rank_option"]

_LEVELS = {"L0": "module", "L1": "api", "mix": "both"}


class DumpTask:
    """One running dump; implements Task."""

    def __init__(self, config: DebuggerConfig, model: Any, place: Place, iteration: int) -> None:
        config = _completed(config)
        check_scope(config)
        if config.level in ("L0", "mix") and model is None:
            raise InputError(f"level {config.level} wants the model: write debugger.start(model)")
        self._place = place
        self._iteration = iteration
        self._is_started = False
        self._names = Names(model)
        self._choice = Choice(config.options, self._names, expands=config.level == "mix")
        self._options = _dump_options(config, place)
        self._is_checked = _checked_by_lists(config)
        self._sink: MsprobeSink | None = None
        self._capture = Capture.into_sink(
            self._open,
            operators=True,
            functions=[*present_functions(), *registered_functions()],
            model=model,
            level=_LEVELS[config.level],
            keep=_keep(self._options),
            ranks=rank_option(config),
            select=self._selection(config.level),
        )

    def resume(self) -> None:
        if self._is_started:
            self._capture.resume()
        else:
            self._is_started = True
            self._capture.start()

    def pause(self) -> None:
        self._capture.pause()
        if self._sink is not None:
            self._sink.flush()

    def next_step(self, iteration: int) -> None:
        self._capture.step()
        self._iteration = iteration

    def stop(self) -> None:
        self._capture.stop()

    def take_whole(self, module: torch.nn.Module, name: str) -> None:
        """Dump this module as one unit instead of APIs, until `take_apart`."""
        self._names.units[f"module.{name}"] = f"Module.{name}.{type(module).__name__}"
        self._choice.only_unit = True
        self._capture.take_whole(module, name)

    def take_apart(self) -> None:
        self._choice.only_unit = False
        self._capture.take_apart()

    def _open(self, rank: int) -> MsprobeSink:
        self._sink = MsprobeSink(self._folder, self._options, self._names, self._choice)
        return self._sink

    def _folder(self) -> Path:
        return self._place.of_step(self._iteration)

    def _begins(self, module: str, call: CallName) -> bool:
        return self._is_checked(call) and self._choice.begins(module, call)

    def _selection(self, level: str) -> list[Any]:
        phases = ["phase:forward", *(["phase:backward"] if self._choice.needs_backward else [])]
        if level != "L1":
            phases.append("phase:start")  # its records hold the parameters of the modules
        return [self._begins, *phases, *([] if self._options.has_data else ["slot:none"])]


def rank_option(config: DebuggerConfig) -> tuple[int, ...] | None:
    return config.rank or None


def _completed(config: DebuggerConfig) -> DebuggerConfig:
    """Fill in what a task decides by itself: `structure` is about modules and calls together."""
    return replace(config, level="mix") if config.task == "structure" and config.level not in ("L0", "mix") else config


def _dump_options(config: DebuggerConfig, place: Place) -> DumpOptions:
    mode = config.options.summary_mode
    return DumpOptions(
        task=config.task,
        level=config.level,
        layout=place.layout,
        checksum=mode if mode in ("md5", "xor") else "",  # type: ignore[arg-type]
        extra_info=config.extra_info,
        values="all" if config.task == "tensor" else "some" if config.options.tensor_list else "none",
    )


def _keep(options: DumpOptions) -> str:
    if not options.has_data:
        return "fingerprint"
    return "tensors" if options.values != "none" or options.checksum else "statistics"


def _checked_by_lists(config: DebuggerConfig) -> Callable[[CallName], bool]:
    """Return a filter by the lists of the pre-check, which name functions such as `conv2d`.

    With both lists, the black list removes names from the white one.
    """
    if config.task not in ("run_ut", "acc_check"):
        return lambda call: True
    white, black = frozenset(config.options.white_list), frozenset(config.options.black_list)
    return lambda call: (not white or call.short in white) and call.short not in black
