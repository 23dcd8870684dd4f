# SPDX-License-Identifier: Apache-2.0
"""Run `PrecisionDebugger` of msprobe: one for the process, set up by config.json or by its arguments.

    debugger = PrecisionDebugger(config_path="./config.json")
    for batch in loader:
        debugger.start(model)
        train_step(batch)
        debugger.stop()
        debugger.step()

`start`, `stop` and `step` work on the class as well. A second debugger of a process is the first one, as it always was.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ulpscope.capture.intercept.patching import Patches
from ulpscope.compat.msprobe.config import DebuggerConfig, read_config
from ulpscope.compat.msprobe.dump import custom_apis
from ulpscope.compat.msprobe.dump.dump_writer import Layout
from ulpscope.compat.msprobe.dump.exceptions import MsprobeException
from ulpscope.compat.msprobe.dump.tasks import Place, Task
from ulpscope.compat.msprobe.task_table import begin_task
from ulpscope.compat.seeding import seed_all
from ulpscope.errors import InputError
from ulpscope.report.escaping import visible

if TYPE_CHECKING:
    import torch

__all__ = ["PrecisionDebugger"]

LAYOUT_VARIABLE = "ULPSCOPE_MSPROBE_LAYOUT"


class PrecisionDebugger:
    """Dumps or checks the steps asked for.

    >>> debugger = PrecisionDebugger(config_path="./config.json", task="statistics", dump_path="./dump", level="L1")  # doctest: +SKIP

    Arguments win over the file. `layout` is "26.x" or "1.x": the dump tree of which line of the tool is written.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionDebugger:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __init__(
        self,
        config_path: str | os.PathLike[str] | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        model: torch.nn.Module | None = None,
        step: Sequence[int | str] | None = None,
        layout: Layout | None = None,
    ) -> None:
        if hasattr(self, "_config"):
            return
        if isinstance(model, int | str | list | tuple | range) and step is None:
            model, step = None, model  # 26.x takes the steps in this place
        try:
            config = read_config(config_path) if config_path is not None else DebuggerConfig()
            path = None if dump_path is None else os.fspath(dump_path)
            self._set_up(config.overridden(task=task, dump_path=path, level=level, step=step), model, layout)
        except BaseException:
            PrecisionDebugger._instance = None
            raise

    def _set_up(self, config: DebuggerConfig, model: Any, layout: Layout | None) -> None:
        if not config.dump_path:
            raise InputError("PrecisionDebugger wants a dump_path, in config.json or as an argument; write dump_path='./dump'")
        self._layout = _checked_layout(layout or os.environ.get(LAYOUT_VARIABLE, "26.x"))
        for remark in config.remarks:
            print(visible(f"msprobe: {remark}"), file=sys.stderr)
        self._model = model
        self._iteration = 0
        self._is_over = not config.is_enabled
        self._rank_id: int | None = None
        self._task: Task | None = None
        self._patches = Patches()
        self._has_batch = False
        if config.seed is not None or config.is_deterministic:
            seed_all(1234 if config.seed is None else config.seed, config.is_deterministic)
        if config.enable_dataloader:
            self._patches.batches(self._around_batch)
        self._config = config
        atexit.register(self.forget)

    # ---- what scripts call

    @classmethod
    def start(
        cls,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Any = None,
    ) -> None:
        """Begin, if the step under way is one of those asked for. Levels L0 and mix want the model here.

        `rank_id` names the folder of this process. Ranges of tokens are not there: start and stop around the ones that matter.
        """
        debugger = cls._existing()
        if token_range is not None or scheduled_tokens is not None:
            raise InputError("start() takes no range of tokens here; call start() and stop() around the tokens that matter")
        debugger._rank_id = rank_id if rank_id is not None else debugger._rank_id
        debugger._model = model if model is not None else debugger._model
        if debugger._is_over or not debugger._wants_step() or debugger._config.task == "grad_probe":
            return
        debugger._running_task().resume()

    @classmethod
    def stop(cls) -> None:
        """Pause; what was seen so far is on disk."""
        task = cls._existing()._task
        if task is not None:
            task.pause()

    @classmethod
    def step(cls) -> None:
        """Say that a step is over: the next one has a folder of its own, and calls are counted from 0 again."""
        debugger = cls._existing()
        debugger._iteration += 1
        if debugger._task is not None:
            debugger._task.next_step(debugger._iteration)
            if not debugger._wants_step():
                debugger._task.pause()
        last = max(debugger._config.step, default=None)
        if last is not None and debugger._iteration > last and debugger._config.task != "grad_probe":
            debugger._end()

    @classmethod
    def forward_backward_dump_end(cls) -> None:
        """Stop, under the name that an older version had."""
        cls.stop()

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Keep a value of the script (level "debug"): tensors, numbers, texts, and lists, tuples and dicts of them."""
        from ulpscope.compat.msprobe.dump.saving import SavingTask

        debugger = cls._existing()
        if debugger._config.level != "debug":
            raise InputError(f'save() works at level "debug", and the level is {debugger._config.level!r}; set level in config.json')
        if debugger._is_over or not debugger._wants_step():
            return
        task = debugger._running_task()
        assert isinstance(task, SavingTask)
        task.save(variable, name, save_backward)

    @classmethod
    def monitor(cls, model: torch.nn.Module) -> None:
        """Begin to collect gradients of this model (task grad_probe), at each optimizer step."""
        debugger = cls._existing()
        if debugger._config.task != "grad_probe":
            raise InputError(
                f"monitor() belongs to the task grad_probe, and the task is {debugger._config.task!r}; set task in config.json"
            )
        if debugger._task is not None:
            debugger._task.stop()
        debugger._model = model
        debugger._task = begin_task(debugger._config, model, debugger._place(), debugger._iteration)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Number the steps from here."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InputError(f"set_init_step wants a number from 0 up, not {step!r}")
        cls._existing()._iteration = step

    @classmethod
    def register_custom_api(cls, module: Any, api: str, api_prefix: str | None = None) -> None:
        """Dump the calls of one more function; call it before the first `start`."""
        cls._existing()
        custom_apis.register_custom_api(module, api, api_prefix)

    @classmethod
    def restore_custom_api(cls, module: Any, api: str) -> None:
        """Take back `register_custom_api`."""
        custom_apis.restore_custom_api(module, api)

    @classmethod
    def forget(cls) -> None:
        """Stop everything and put back what was changed; the old tool had no word for it."""
        debugger = cls._instance
        cls._instance = None
        custom_apis.forget_custom_apis()
        if debugger is not None and hasattr(debugger, "_config"):
            debugger._end()
            debugger._patches.undo()
            atexit.unregister(debugger.forget)

    # ---- shared with the modules beside it

    @classmethod
    def running(cls) -> Task | None:
        """Return the running task, for the functions that stand beside the debugger."""
        return cls._existing()._task

    @classmethod
    def _existing(cls) -> PrecisionDebugger:
        if cls._instance is None:
            raise InputError("no PrecisionDebugger was made yet; write debugger = PrecisionDebugger(config_path='./config.json') first")
        return cls._instance

    def _running_task(self) -> Task:
        if self._task is None:
            self._task = begin_task(self._config, self._model, self._place(), self._iteration)
        return self._task

    def _wants_step(self) -> bool:
        return not self._config.step or self._iteration in self._config.step

    def _place(self) -> Place:
        return Place(self._folder, self._layout)

    def _folder(self, step: int) -> Path:
        rank = f"rank{self._rank_id}" if self._rank_id is not None else _rank_folder(self._layout)
        return Path(self._config.dump_path) / f"step{step}" / rank

    def _around_batch(self, next_batch: Callable[[], Any]) -> Any:
        """End a step and begin the next at each batch of a DataLoader; after the last step asked for, end the training."""
        if self._has_batch:
            self.stop()
            self.step()
        batch = next_batch()
        self._has_batch = True
        if self._is_over:
            self._patches.undo()
            raise MsprobeException(f"msprobe: exit after iteration {list(self._config.step)}")
        self.start()
        return batch

    def _end(self) -> None:
        self._is_over = True
        task, self._task = self._task, None
        if task is not None:
            task.stop()


def _checked_layout(layout: str) -> Layout:
    if layout == "1.x":
        return "1.x"
    if layout == "26.x":
        return "26.x"
    raise InputError(f"layout is {layout!r}; it may be '1.x' or '26.x'")


def _rank_folder(layout: Layout) -> str:
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return f"rank{distributed.get_rank()}"
    return "rank" if layout == "1.x" else f"proc{os.getpid()}"
