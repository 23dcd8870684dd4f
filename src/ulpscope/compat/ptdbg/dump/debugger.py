# SPDX-License-Identifier: Apache-2.0
"""Run `PrecisionDebugger`: dump or check for overflow by steps, with start, stop and step in the script or found from a DataLoader."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ulpscope.capture.intercept.patching import Patches
from ulpscope.compat.ptdbg.dump import acl_settings as acl
from ulpscope.compat.ptdbg.dump.functions import checked_rank
from ulpscope.compat.ptdbg.dump.overflow_check import OverflowCheck, OverflowOptions
from ulpscope.compat.ptdbg.dump.process import PROCESS
from ulpscope.compat.ptdbg.exceptions import CompareException
from ulpscope.compat.ptdbg.files.modes import DumpOptions
from ulpscope.compat.ptdbg.files.places import DumpPlace
from ulpscope.compat.screen import print_info
from ulpscope.errors import InputError

__all__ = ["PrecisionDebugger"]


class PrecisionDebugger:
    """The debugger of this process; making another replaces it.

    >>> debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="dump", step=[0, 2])  # doctest: +SKIP

    `start`, `stop` and `step` work on the class as well. With `enable_dataloader` a step begins with each batch of a DataLoader, and
    training ends with an exception after the last step of the list; without it, at the next `start` after that step.
    """

    _current: ClassVar[PrecisionDebugger | None] = None

    def __init__(
        self,
        dump_path: str | os.PathLike[str] | None = None,
        hook_name: str | None = None,
        rank: int | None = None,
        step: Sequence[int] | None = None,
        enable_dataloader: bool = False,
    ) -> None:
        self._hook = _checked_hook(hook_name)
        self._steps = _checked_steps(step)
        if not isinstance(enable_dataloader, bool):
            raise InputError(f"enable_dataloader is True or False, not {enable_dataloader!r}")
        self.forget()
        PROCESS.rank = checked_rank(rank)
        PROCESS.place = DumpPlace.parse(dump_path)
        PROCESS.is_registered = True
        self._counts_batches = enable_dataloader
        self._iteration = -1 if enable_dataloader else 0
        self._overflow = OverflowOptions()
        self._is_acl = False
        self._patches = Patches()
        self.configure_hook()
        PrecisionDebugger._current = self
        if enable_dataloader:
            self._patches.batches(self._around_batch)

    def configure_hook(
        self,
        mode: str | None = None,
        scope: Sequence[str] | None = None,
        api_list: Sequence[str] | None = None,
        filter_switch: str = "OFF",
        acl_config: str | os.PathLike[str] | None = None,
        backward_input: Sequence[str | os.PathLike[str]] | None = None,
        input_output_mode: Sequence[str] | None = None,
        summary_only: bool = False,
        overflow_nums: int = 1,
        need_replicate: bool = False,
    ) -> None:
        """Say what is dumped (without this: everything, mode="api_stack"), or how many overflows end the training.

        >>> debugger.configure_hook(mode="list", scope=["Tensor_permute_1_forward"])  # doctest: +SKIP
        """
        if mode == "acl":
            acl.check_config(acl_config, "acl_config")
        PROCESS.backward_input = acl.check_backward_input(backward_input or [])
        self._is_acl = mode == "acl"
        if self._hook == "dump":
            PROCESS.options = DumpOptions.parse(
                "api_stack" if mode is None else mode, scope, api_list, filter_switch, input_output_mode, summary_only
            )
            return
        if mode not in (None, "api", "acl"):
            raise CompareException(
                CompareException.INVALID_PARAM_ERROR, f"an overflow check knows mode='api' and mode='acl', not {mode!r}; leave mode out"
            )
        self._overflow = OverflowOptions.parse(overflow_nums, need_replicate, filter_switch)

    @classmethod
    def start(cls) -> None:
        """Begin, if the step under way is one of those asked for; after the last of them training ends here, with an exception."""
        debugger = cls._existing()
        if debugger._steps and debugger._iteration > max(debugger._steps):
            debugger._patches.undo()
            PROCESS.end()
            raise Exception(f"ptdbg: exit after iteration {debugger._steps}")
        if not debugger._steps or debugger._iteration in debugger._steps:
            debugger._begin()

    @classmethod
    def stop(cls) -> None:
        """Pause; what was dumped so far is written."""
        cls._existing()
        if PROCESS.dumping is not None:
            PROCESS.dumping.pause()
        if PROCESS.overflow is not None:
            PROCESS.overflow.pause()

    @classmethod
    def step(cls) -> None:
        """Say that a step is over: the next one has files of its own, and calls are counted from 0 again."""
        debugger = cls._existing()
        debugger._iteration += 1
        folder = PROCESS.end_dump()
        if folder is not None:
            print_info(f"the dump of this step is in '{folder}'")
        if PROCESS.overflow is not None:
            PROCESS.overflow.next_step(debugger._step_folder())
        PROCESS.counts.reset()

    @classmethod
    def forget(cls) -> None:
        """Stop everything and put back what follows the DataLoader; the old tool had no word for it."""
        if cls._current is not None:
            cls._current._patches.undo()
        PrecisionDebugger._current = None
        PROCESS.reset()

    @classmethod
    def _existing(cls) -> PrecisionDebugger:
        if cls._current is None:
            raise CompareException(
                CompareException.INVALID_PARAM_ERROR,
                "no PrecisionDebugger was made yet; write debugger = PrecisionDebugger(dump_path, hook_name) first",
            )
        return cls._current

    def _begin(self) -> None:
        if self._is_acl:
            acl.refuse("a dump" if self._hook == "dump" else "an overflow check")
        if self._hook == "dump":
            if PROCESS.dumping is None:
                PROCESS.begin_dump(self._step_folder())
            else:
                PROCESS.dumping.resume()
        elif PROCESS.overflow is None:
            PROCESS.overflow = OverflowCheck(PROCESS.known_place(), self._overflow, rank=PROCESS.rank, step=self._step_folder())
            PROCESS.overflow.start()
        else:
            PROCESS.overflow.resume()

    def _step_folder(self) -> int | None:
        """Return the step's place in the tree: used if steps were asked for, or if a later step would overwrite the first."""
        has_folder = bool(self._steps) or self._counts_batches or self._iteration > 0
        return self._iteration if has_folder else None

    def _around_batch(self, next_batch: Callable[[], Any]) -> Any:
        self.stop()
        batch = next_batch()
        self.step()
        self.start()
        return batch


def _checked_hook(hook_name: str | None) -> str:
    if hook_name is None:
        raise InputError("PrecisionDebugger needs hook_name='dump' or hook_name='overflow_check'")
    if hook_name not in ("dump", "overflow_check"):
        raise InputError(f"hook_name is 'dump' or 'overflow_check', not {hook_name!r}")
    return hook_name


def _checked_steps(step: object) -> list[int]:
    if step is None:
        return []
    if not isinstance(step, (list, tuple)) or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in step):
        raise InputError(f"step is a list of whole numbers from 0 up, for example [0, 2] or list(range(0, 9)), not {step!r}")
    return sorted(step)
