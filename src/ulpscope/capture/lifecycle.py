# SPDX-License-Identifier: Apache-2.0
"""Run a session between `start` and `stop`: install, count steps, pause, fail without harm, and put everything back.

The session that builds on this decides what is recorded or looked at, and when.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope._torch_private import LACKING, is_compiled_in_place
from ulpscope._torch_versions import range_tried
from ulpscope.capture.intercept import patching
from ulpscope.capture.intercept.modules import ModuleStack, modules_in, own_parameters
from ulpscope.capture.intercept.patching import Patches
from ulpscope.capture.intercept.torch_modes import FunctionMode, OpMode, remove_mode
from ulpscope.capture.record.state import OptimizerProbe
from ulpscope.capture.torch_internals import (
    FUSED_MODULES,
    graph_task,
    is_jit_tracing,
    keep_from_compiler,
    not_compiled,
    without_function_modes,
)
from ulpscope.errors import UlpscopeError
from ulpscope.model import LedgerEntry, Sink
from ulpscope.recording import active
from ulpscope.recording.safety import Safety
from ulpscope.recording.selection import Selection

__all__ = ["Session", "has_fast_path", "is_compiled"]

_PACKAGES = ("ulpscope.capture.", "ulpscope.recording.")
_FOLDERS = tuple(str(Path(__file__).parents[1] / name) for name in ("capture", "recording"))


class Session:
    """A session in one process, between `start` and `stop`. With `find_steps` a step ends with each step of the first optimizer that steps;
    otherwise when `step` is called. With `operators` an operator keeps Python's name for it, `Tensor.__add__`.

    A session that builds on this says what a step begins and ends with (`_open_step`, `_end_step`, `_close`), what to do around calls of
    modules, functions, backward passes, collectives and optimizers, and which mode sees the calls (`_new_mode`).
    """

    def __init__(
        self,
        sink: Sink,
        *,
        rank: int = 0,
        models: list[torch.nn.Module] | None = None,
        optimizers: list[Any] | None = None,
        selection: Selection | None = None,
        find_steps: bool = False,
        operators: bool = False,
    ) -> None:
        self._sink = sink
        self._rank = rank
        self._selection = selection or Selection()
        self._find_steps = find_steps
        self._names_operators = operators
        self._spoken = threading.local()
        self._modules = ModuleStack(models or [])
        self._optimizers = OptimizerProbe(self._modules, optimizers)
        self._safety = Safety(sink, without_function_modes)
        self._patches = Patches()
        self._mode: FunctionMode | OpMode | None = None
        self._handles: list[Any] = []
        self._clock: weakref.ref[Any] | None = None
        self._is_active = self._is_recording = self._is_paused = False
        self._has_updated = self._knows_pipelines = False
        self._thread = 0
        self._step = 0

    # ---- what a session says about itself

    def _open_step(self, step: int) -> None: ...

    def _end_step(self) -> None: ...

    def _close(self, complete: bool) -> None: ...

    def _new_mode(self) -> FunctionMode | OpMode | None: ...

    def _around_module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _around_function(self, apply: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _around_collective(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _around_wait(self, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return original(*args)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_updated = True

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._tick(optimizer)

    # ---- life

    def start(self) -> None:
        """Begin on this thread."""
        if self._is_active:
            return
        self._thread = threading.get_ident()
        self._is_active = True
        self._begin(0)
        active.join(self)
        try:
            self._install()
        except (AttributeError, ImportError, TypeError) as error:  # something of torch's is not what it was in every version tried
            self.stop(complete=False)
            reason = " ".join(str(error).split())
            raise UlpscopeError(
                f"recording cannot begin with torch {torch.__version__}: {reason}; ulpscope is tried with {range_tried()}"
            ) from error
        except BaseException:
            self.stop(complete=False)
            raise

    def _install(self) -> None:
        _keep_ours_from_compiler()
        for name, lost in LACKING.items():
            self._sink.note(LedgerEntry(what=lost, why=f"torch {torch.__version__} has no '{name}'"))
        self._patches.module_calls(self._module_caller())
        self._patches.functions(self._around_function)
        self._patches.backward_passes(self._around_backward)
        self._patches.collectives(self._around_collective, self._around_wait)
        self._see_pipelines()
        self._patches.scaler_steps(self._around_scaler)
        if self._names_operators:
            self._patches.operators(self._around_operator)
        self._handles.append(register_optimizer_step_pre_hook(not_compiled(self._before_optimizer)))
        self._handles.append(register_optimizer_step_post_hook(not_compiled(self._after_optimizer)))
        self._mode = self._new_mode()
        self._set_mode(on=self._is_recording or isinstance(self._mode, OpMode))

    def _see_pipelines(self) -> None:
        """Record nothing of the run by which a pipeline finds out its shapes: it computes on memory that was never written."""
        if not self._knows_pipelines:
            self._knows_pipelines = self._is_active and self._patches.pipelines(self._call_unseen)

    def _module_caller(self) -> Callable[..., Any]:
        """Return the function that stands around every call of a module."""
        return self._around_module

    def _set_mode(self, *, on: bool) -> None:
        """Let our mode see the calls of this thread, or take it off so that they cost nothing."""
        if self._mode is None or not self._is_active or threading.get_ident() != self._thread:
            return
        if not on:
            remove_mode(self._mode)
        elif not self._mode.is_on() and not (isinstance(self._mode, FunctionMode) and self._mode.is_at_work):
            self._mode.__enter__()

    def _set_function_mode(self, *, on: bool) -> None:
        """Set a function mode on or off; leave a dispatch mode alone, since to move it the modes that the user entered later would have to
        be left and entered.
        """
        if isinstance(self._mode, FunctionMode):
            self._set_mode(on=on)

    def stop(self, *, complete: bool = True) -> None:
        """Put everything back; the step under way is closed as complete unless the user's code failed in it."""
        if not self._is_active:
            return
        self._is_active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._see_nothing_more()
        active.leave(self)
        self._safety.run("write a note", self._note_idle_patterns)
        self._safety.run("close the run", self._close, complete)

    def _see_nothing_more(self) -> None:
        """Take the patches and the mode off; calls seen so far can still be closed."""
        self._is_recording = False
        self._patches.undo()
        self._knows_pipelines = False
        if self._mode is not None:
            remove_mode(self._mode)
            self._mode = None

    def step(self) -> None:
        """End the step under way and begin the next."""
        if not self._is_active:
            return
        self._safety.run("close the step", self._end_step)
        self._begin(self._step + 1)

    def _begin(self, step: int) -> None:
        self._step = self._safety.step = step
        self._is_recording = self._wants_to_record()
        self._open_step(step)
        self._set_function_mode(on=self._is_recording)

    def _wants_to_record(self) -> bool:
        if self._is_paused or self._safety.is_broken:
            return False
        return self._selection.wants_step(self._step) and self._selection.wants_rank(self._rank)

    def pause(self) -> None:
        """See nothing until `resume`; the step under way stays open and its calls keep their numbers."""
        self._is_paused = True
        self._is_recording = False
        self._set_mode(on=False)

    def resume(self) -> None:
        self._is_paused = False
        self._is_recording = self._is_active and self._wants_to_record()
        self._set_mode(on=self._is_recording or isinstance(self._mode, OpMode))

    def deactivate(self) -> None:
        self._is_active = self._is_recording = False

    @property
    def is_recording(self) -> bool:
        """Tell whether calls of this thread are seen right now."""
        return self._is_recording and (threading.get_ident() == self._thread or graph_task() != -1) and not is_jit_tracing()

    # ---- steps that are found

    def _tick(self, optimizer: Any) -> None:
        """Take an optimizer's step as the tick of the clock: the first optimizer that ever steps is the clock."""
        if self._find_steps and self._is_active and threading.get_ident() == self._thread:
            if self._clock is None:
                self._clock = weakref.ref(optimizer)
            if self._clock() is optimizer:
                self.step()

    def _around_scaler(self, original: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        step, self._has_updated = self._step, False
        result = original(scaler, optimizer, *args, **kwargs)
        if self._is_active and not self._has_updated:
            self._safety.run("write a note", self._note_skipped, scaler)
            if self._find_steps and self._step == step and (self._clock is None or self._clock() is optimizer):
                self.step()
        return result

    def _note_idle_patterns(self) -> None:
        """Note patterns that chose nothing: a selection with a spelling mistake records nothing, and looks like a recording."""
        for pattern in self._selection.idle_patterns:
            self._sink.note(LedgerEntry(what=f"find what {pattern!r} selects", why="it matched nothing that the program did"))

    def _note_skipped(self, scaler: Any) -> None:
        self._sink.note(LedgerEntry(what="see an optimizer step", why="GradScaler skipped it", step=self._step))

    # ---- calls

    def _around_operator(self, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._spoken.name = f"Tensor.{name}"
        try:
            return original(*args)
        finally:
            self._spoken.name = None

    def _spoken_name(self, op: str) -> str:
        """Return the operator that the user wrote, if this call is the one that an operator makes."""
        spoken = getattr(self._spoken, "name", None)
        self._spoken.name = None
        return spoken or op

    def _call_unseen(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function without our mode: its calls are not seen, and some modules compute otherwise where any mode is active."""
        was_recording, self._is_recording = self._is_recording, False
        removed = remove_mode(self._mode) if self._mode is not None else False
        try:
            return original(*args, **kwargs)
        finally:
            self._is_recording = was_recording and self._is_active and self._wants_to_record()
            if removed:
                self._set_mode(on=True)


@functools.cache
def _keep_ours_from_compiler() -> None:
    """Tell torch.compile, which looks at every running frame while it is on, that frames of this package are not the user's."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(_PACKAGES)]
    ours = [module for module in loaded if isinstance(module, ModuleType)]
    for value in [value for module in ours if module is not patching for value in list(vars(module).values())]:
        for function in vars(value).values() if isinstance(value, type) else (value,):
            code = getattr(getattr(function, "__func__", getattr(function, "fget", function)), "__code__", None)
            if isinstance(code, CodeType) and code.co_filename.startswith(_FOLDERS):
                keep_from_compiler(code)


def has_fast_path(module: torch.nn.Module) -> bool:
    """Tell whether a module would use a fused kernel that it gives up when any torch function mode is active."""
    if module.training or not isinstance(module, FUSED_MODULES):
        return False
    return not torch.is_grad_enabled() or not any(
        parameter.requires_grad for _, each in modules_in(module) for _, parameter in own_parameters(each)
    )


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether a module runs code that torch compiled or scripted: our modes and patches see none of its calls."""
    return "_orig_mod" in module._modules or is_compiled_in_place(module) or isinstance(module, torch.jit.ScriptModule)
