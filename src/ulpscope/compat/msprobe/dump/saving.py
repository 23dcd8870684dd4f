# SPDX-License-Identifier: Apache-2.0
"""Run level debug: save the values that a script hands to `debugger.save`, and their gradients.

step0/rank0/debug.json                   {name}.{count}.debug, and {name}_grad.{count}.debug once the step is over
            dump_tensor_data/            {name}.{count}.debug[.{index}].pt, where the task is "tensor"
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ulpscope.compat.json_files import GrowingJson
from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.compat.msprobe.dump.dump_writer import Described, DumpOptions, json_header
from ulpscope.compat.msprobe.dump.tasks import Place, process_rank
from ulpscope.compat.pt_files import save_pt
from ulpscope.compat.tensor_files import TensorFiles
from ulpscope.errors import InputError
from ulpscope.model import Slot
from ulpscope.report.escaping import visible

if TYPE_CHECKING:
    import torch

__all__ = ["SavingTask"]

_DEEPEST = 50


class SavingTask:
    """The saves of one process; implements Task. It ignores start and stop."""

    def __init__(self, config: DebuggerConfig, place: Place, iteration: int) -> None:
        if config.task not in ("statistics", "tensor"):
            raise InputError(f'level "debug" goes with the task statistics or tensor, not {config.task!r}')
        self._options = DumpOptions(config.task, "debug", place.layout, values="all" if config.task == "tensor" else "none")
        self._ranks = config.rank
        self._place = place
        self._iteration = iteration
        self._files: _SavedStep | None = None

    def resume(self) -> None:
        """Do nothing: saving needs no start."""

    def pause(self) -> None:
        """Do nothing: saving needs no stop."""

    def next_step(self, iteration: int) -> None:
        self.stop()
        self._iteration = iteration

    def stop(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def save(self, variable: Any, name: str, save_backward: bool = True) -> None:
        """Save a value under its name and count."""
        if self._ranks and process_rank() not in self._ranks:
            return
        problem = _problem(variable, name, save_backward)
        if problem:
            print(visible(f"msprobe: save() skipped: {problem}"), file=sys.stderr)
            return
        if self._files is None:
            self._files = _SavedStep(self._place, self._iteration, self._options)
        self._files.add(variable, name, save_backward)


class _SavedStep:
    def __init__(self, place: Place, iteration: int, options: DumpOptions) -> None:
        from ulpscope.capture.record.tensor_reader import TensorReader

        self._layout = place.layout
        folder = place.of_step(iteration)
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._tensors = TensorFiles(folder / "dump_tensor_data", save_pt) if options.values == "all" else None
        store: Callable[..., str | None] = self._tensors.keep if self._tensors is not None else lambda *_: None
        self._reader = TensorReader("tensors" if self._tensors is not None else "statistics", store)
        self._file = GrowingJson(folder / "debug.json", *json_header(folder, options))
        self._counts: Counter[str] = Counter()
        self._gradients: dict[str, Any] = {}
        self._handles: list[Any] = []

    def add(self, variable: Any, name: str, save_backward: bool) -> None:
        count = self._counts[name]
        self._counts[name] += 1
        key = f"{name}.{count}.debug"
        self._file.add(key, self._value(variable, key))
        if save_backward:
            gradient_key = f"{name}_grad.{count}.debug"
            holder = self._gradients[gradient_key] = [None]
            self._await(variable, gradient_key, holder, 0)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for key, (value,) in self._gradients.items():
            self._file.add(key, value)
        self._file.close()
        if self._tensors is not None:
            self._tensors.close()

    def _value(self, value: Any, key: str) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value, key)
        if isinstance(value, dict):
            return {str(name): self._value(part, f"{key}.{name}") for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(part, f"{key}.{at}") for at, part in enumerate(value)]
        return None if value is None else {"type": type(value).__name__, "value": value}

    def _tensor(self, tensor: torch.Tensor, key: str) -> dict[str, Any]:
        from ulpscope.capture.torch_internals import blind

        with blind():
            self._reader.forget()  # the script may have written to it through an alias
            record = self._reader.record(Slot("input", (0,)), tensor)
        return Described(self._tensors, {}, key, self._layout).tensor(record, "")

    def _await(self, value: Any, key: str, holder: Any, place: Any) -> None:
        """Have the gradients of a value stored in `holder` as they come, nested as the value is."""
        import torch

        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                hook = value.register_hook(lambda gradient: self._take(gradient, key, holder, place))  # type: ignore[no-untyped-call]
                self._handles.append(hook)
        elif isinstance(value, dict | list | tuple):
            parts = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            inner: Any = {str(name): None for name, _ in parts} if isinstance(value, dict) else [None] * len(parts)
            holder[place] = inner
            for name, part in parts:
                self._await(part, f"{key}.{name}", inner, str(name) if isinstance(value, dict) else name)

    def _take(self, gradient: torch.Tensor, key: str, holder: Any, place: Any) -> None:
        try:
            holder[place] = self._tensor(gradient, key)
        except Exception as error:  # a failing save must not end a backward pass
            print(visible(f"msprobe: could not save the gradient {key}: {error}"), file=sys.stderr)


def _problem(variable: Any, name: Any, save_backward: Any) -> str:
    if not isinstance(name, str) or not _fits_a_file_name(name):
        return f"a name is a text that can stand in a file name, not {name!r}"
    if not isinstance(save_backward, bool):
        return f"save_backward is True or False, not {save_backward!r}"
    wrong = _unsaveable(variable)
    return f"it takes tensors, numbers, texts, and lists, tuples and dicts of them, not {wrong}" if wrong else ""


def _unsaveable(value: Any, depth: int = 0) -> str:
    """Name a part of the value that cannot be saved; empty where everything can."""
    import torch

    if isinstance(value, dict | list | tuple):
        keys = [key for key in value if not _fits_a_file_name(str(key))] if isinstance(value, dict) else []
        if keys or depth > _DEEPEST:
            return f"the key {keys[0]!r}" if keys else f"values nested more than {_DEEPEST} deep"
        parts = value.values() if isinstance(value, dict) else value
        return next(filter(None, (_unsaveable(part, depth + 1) for part in parts)), "")
    is_plain = isinstance(value, torch.Tensor | int | float | str) or (value is None and depth > 0)
    return "" if is_plain else f"a {type(value).__name__}"


def _fits_a_file_name(text: str) -> bool:
    return 0 < len(text) <= 100 and text.isprintable() and not set(text) & {"/", "\\"} and not text.startswith(".")
