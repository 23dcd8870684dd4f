# SPDX-License-Identifier: Apache-2.0
"""Run the task free_benchmark: each chosen call once more with disturbed inputs, and a line in free_benchmark.csv where its result jumps.

With handler_type "check" the program does not notice: random generators, losses and gradients are bitwise what they are without it. With
"fix" the second result replaces the first. A call that cannot be computed a second time is reported once for each operation and left alone.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from ulpscope.capture.intercept.naming import caller, is_own_business, makes_no_values, op_name
from ulpscope.capture.intercept.patching import Patches
from ulpscope.capture.intercept.torch_modes import ApiMode, remove_mode
from ulpscope.capture.torch_internals import graph_task, inside_transform, is_jit_tracing
from ulpscope.compat.msprobe.config import DebuggerConfig
from ulpscope.compat.msprobe.dump.choosing import Choice, check_scope
from ulpscope.compat.msprobe.dump.entry_names import Names
from ulpscope.compat.msprobe.dump.tasks import process_rank
from ulpscope.compat.msprobe.free_benchmark.perturbing import LIMITS, relative_error, restored, tensors_of
from ulpscope.compat.msprobe.free_benchmark.preheating import Preheating
from ulpscope.compat.msprobe.free_benchmark.second_runs import SecondGradients, SecondRun, floating_pairs
from ulpscope.model import CallName
from ulpscope.report.escaping import visible

__all__ = ["FreeBenchmarkTask"]

COLUMNS = ("rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index")
_LIMIT = 0.0002
_Function = Callable[..., Any]


class _DisturbingMode(ApiMode):
    """Hands every outermost call of torch to the task."""

    def __init__(self, task: FreeBenchmarkTask) -> None:
        super().__init__(task)  # type: ignore[arg-type]
        self._task = task

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._task.around_call(func, args, kwargs or {})


class FreeBenchmarkTask:
    """One running check; implements Task."""

    def __init__(self, config: DebuggerConfig, iteration: int) -> None:
        check_scope(config)
        self._options = config.options
        self._names = Names()
        self._choice = Choice(config.options, self._names, expands=False)
        self._rank = process_rank()
        self._is_wanted_here = not config.rank or self._rank in config.rank
        self._rows = _Rows(Path(config.dump_path) / "free_benchmark.csv")
        self._preheating = Preheating(config.options.preheat_step, config.options.max_sample) if config.options.if_preheat else None
        self._mode = _DisturbingMode(self)
        self._patches: Patches | None = None
        self._spoken: str | None = None
        self._told: set[str] = set()
        self._begin(iteration)

    # ---- the task

    def resume(self) -> None:
        if self._patches is None and self._is_wanted_here:
            self._patches = Patches()
            self._patches.operators(self._around_operator)
            self._mode.__enter__()

    def pause(self) -> None:
        if self._patches is not None:
            remove_mode(self._mode)
            self._patches.undo()
            self._patches = None

    def next_step(self, iteration: int) -> None:
        self._begin(iteration)

    def stop(self) -> None:
        self.pause()

    def _begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._counts: Counter[str] = Counter()
        self._choice.begin_step()
        if self._preheating is not None:
            self._preheating.begin_step(iteration)

    # ---- calls

    def _around_operator(self, name: str, original: _Function, args: tuple[Any, ...]) -> Any:
        self._spoken = f"Tensor.{name}"
        try:
            return original(*args)
        finally:
            self._spoken = None

    def around_call(self, func: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call, and once more if it was chosen."""
        op = op_name(func)
        spoken, self._spoken = self._spoken, None
        call = self._begun(spoken or op) if op is not None else None
        if call is None:
            return func(*args, **kwargs)
        if self._options.fuzz_stage == "backward":
            return self._around_backward(call, func, args, kwargs)
        is_fix = self._options.handler_type == "fix"
        again = self._try(call, lambda: SecondRun(call, func, args, kwargs, self._options.pert_mode, keeps_graph=is_fix))
        result = func(*args, **kwargs)
        if again is None or not again.is_possible:
            return result
        if is_fix:
            fixed = None if again.wrote_to_arguments() else self._try(call, lambda: restored(again.run(), result))
            return result if fixed is None else fixed
        self._try(call, lambda: self._judge(call, result, again.run(), again))
        return result

    def _begun(self, op: str) -> CallName | None:
        """Count a call, and return its name if it is to be disturbed."""
        is_apart = graph_task() != -1 or inside_transform() or is_jit_tracing() or torch.compiler.is_compiling()
        if is_apart or is_own_business(_outside(caller(1))):
            return None
        call = CallName(op, self._counts[op])
        self._counts[op] += 1
        is_chosen = self._choice.begins("", call) and not makes_no_values(op)
        return call if is_chosen else None

    def _around_backward(self, call: CallName, func: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for the gradients of the results; then compute those of the inputs twice."""
        again = None
        if torch.is_grad_enabled():
            again = self._try(call, lambda: SecondGradients(call, func, args, kwargs, self._options.pert_mode))
        result = func(*args, **kwargs)
        outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
        if again is not None and again.is_possible and outputs:

            def judge(received: Sequence[torch.Tensor | None]) -> None:
                self._try(call, lambda: self._judge(call, *again.run(received)))

            self._try(call, lambda: register_multi_grad_hook(outputs, judge))
        return result

    def _try(self, call: CallName, work: Callable[[], Any]) -> Any:
        """Run the task's own work: report an error once for each operation, and let the program go on."""
        try:
            return work()
        except Exception as error:
            if call.op not in self._told:
                self._told.add(call.op)
                reason = str(error).strip().partition("\n")[0][:200]
                print(visible(f"msprobe: free benchmark: {self._old_name(call)} is not disturbed: {reason}"), file=sys.stderr)
            return None

    # ---- results

    def _judge(self, call: CallName, first: Any, second: Any, again: SecondRun | None = None) -> None:
        pairs = list(floating_pairs(first, second))
        errors = [relative_error(one, other, is_gradient=again is None) for _, one, other in pairs]
        is_counting = self._preheating is not None and self._iteration == 0
        for (place, one, _), error in zip(pairs, errors, strict=True):
            if not error <= self._limit(call, one.dtype) and not is_counting:
                self._tell(call, one, error, place)
        if self._preheating is not None and pairs and self._preheating.call(call.op) and again is not None:
            is_honest = again.agrees_with_cpu(first)
            if is_honest is not None:
                self._preheating.take(call.op, str(pairs[0][1].dtype), max(errors), is_honest=is_honest)

    def _limit(self, call: CallName, dtype: torch.dtype) -> float:
        if self._options.pert_mode == "no_change":
            return 0.0
        limit = LIMITS.get(dtype, _LIMIT)
        return limit if self._preheating is None else self._preheating.limit(call.op, str(dtype), limit)

    def _tell(self, call: CallName, result: torch.Tensor, error: float, place: int | None) -> None:
        stage, mode = self._options.fuzz_stage, self._options.pert_mode
        index = "" if place is None else place
        self._rows.add([self._rank, mode, stage, self._iteration, self._old_name(call), error, result.dtype, result.shape, index])

    def _old_name(self, call: CallName) -> str:
        name = self._names.name("", call)
        return name.of(self._options.fuzz_stage) if name is not None else str(call)


def _outside(frame: FrameType | None) -> FrameType | None:
    """Find the innermost frame that is not of this file."""
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return frame


class _Rows:
    """Writes free_benchmark.csv: rows of all ranks, each appended at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._path = path
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(COLUMNS)

    def add(self, row: Sequence[Any]) -> None:
        text = io.StringIO()
        csv.writer(text).writerow(row)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, text.getvalue().encode())
        finally:
            os.close(descriptor)
