# SPDX-License-Identifier: Apache-2.0
"""One capture under way: it owns every mode, patch and counter, and writes to a sink.

The user's call always runs, exactly once, outside of everything that can fail here. What fails here is written to the ledger, warned about
once, and training goes on.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope.capture import active
from ulpscope.capture.calls import caller, is_own_business, never_writes, writes_silently
from ulpscope.capture.modes import ApiMode, FunctionMode, OpMode, WriteGuard, remove_mode
from ulpscope.capture.modules import ModuleStack
from ulpscope.capture.patching import Patches
from ulpscope.capture.recorder import CallRecorder, OpenCall
from ulpscope.capture.safety import Safety
from ulpscope.capture.selection import Selection
from ulpscope.capture.state import OptimizerProbe
from ulpscope.capture.tensors import Keep
from ulpscope.capture.torch_internals import graph_task, inside_transform, is_jit_tracing
from ulpscope.capture.walk import Found, encode_arguments
from ulpscope.model import Arguments, LedgerEntry, Level, Sink, Slot

__all__ = ["CaptureLevel", "CaptureSession"]

CaptureLevel: TypeAlias = Literal["api", "module", "both", "op"]

_FUSED = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


class CaptureSession:
    """Records what one process does between `start` and `stop`.

    With `find_steps` a step ends with each step of the first optimizer that steps; otherwise when `step` is called.
    With `operators` an operator keeps the name that Python has for it, `Tensor.__add__`, and its own count. `functions` are functions of
    Python that no mode sees, as owner, attribute and the name that their calls get; what they call is not recorded.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        rank: int = 0,
        models: list[torch.nn.Module] | None = None,
        optimizers: list[Any] | None = None,
        level: CaptureLevel = "api",
        keep: Keep = "statistics",
        selection: Selection | None = None,
        find_steps: bool = False,
        operators: bool = False,
        functions: Sequence[tuple[Any, str, str]] = (),
        on_step_end: Callable[[int], None] | None = None,
    ) -> None:
        self._sink = sink
        self._rank = rank
        self._level = level
        self._selection = selection or Selection()
        self._find_steps = find_steps
        self._names_operators = operators
        self._functions = functions
        self._units: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._spoken = threading.local()
        self._is_paused = False
        self._on_step_end = on_step_end
        self._modules = ModuleStack(models or [])
        self._recorder = CallRecorder(
            sink,
            rank=rank,
            keep=keep,
            selection=self._selection,
            modules=self._modules,
            guard=self._guard,
            boundary=CaptureSession._around_module.__code__,
            is_patient=level in ("api", "both"),
        )
        self._optimizers = OptimizerProbe(self._modules, optimizers)
        self._patches = Patches()
        self._safety = Safety(sink)
        self._mode: FunctionMode | OpMode | None = None
        self._write_guard: WriteGuard | None = None
        self._handles: list[Any] = []
        self._clock: weakref.ref[Any] | None = None
        self._is_active = False
        self._has_updated = False
        self._thread = 0
        self._begin(0)

    # ---- life

    def start(self) -> None:
        """Begin to record on this thread."""
        if self._is_active:
            return
        self._thread = threading.get_ident()
        self._is_active = True
        active.join(self)
        try:
            self._install()
        except BaseException:
            self.stop(complete=False)
            raise

    def stop(self, *, complete: bool = True) -> None:
        """Put back everything; the step under way is closed as complete unless the user's code failed in it."""
        if not self._is_active:
            return
        self._is_active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._patches.undo()
        if self._mode is not None:
            remove_mode(self._mode)
        self._recorder.forget()
        active.leave(self)
        self._safely("close the run", self._close, complete)

    def step(self) -> None:
        """End the step under way and begin the next."""
        if not self._is_active:
            return
        number = self._step
        self._safely("close the step", self._end_step)
        self._begin(number + 1)

    def pause(self) -> None:
        """Record nothing until `resume`; the step under way stays open and its calls keep their numbers."""
        self._read_before_change()
        self._is_paused = True
        self._is_recording = False
        self._set_mode(on=False)

    def resume(self) -> None:
        self._is_paused = False
        self._is_recording = self._is_active and self._wants_to_record(self._step)
        self._set_mode(on=self._is_recording or self._level == "op")

    def take_whole(self, module: torch.nn.Module, name: str) -> None:
        """Record each call of this module as one call of that name, and nothing inside it."""
        self._units[module] = name

    def take_apart(self) -> None:
        """Record what is inside every module again."""
        self._units.clear()

    def deactivate(self) -> None:
        self._is_active = self._is_recording = False

    @property
    def is_recording(self) -> bool:
        """Whether calls of this thread are recorded right now."""
        return self._is_recording and (threading.get_ident() == self._thread or graph_task() != -1) and not is_jit_tracing()

    def _install(self) -> None:
        self._patches.module_calls(self._around_module)
        self._patches.functions(self._around_function)
        self._patches.backward_passes(self._around_backward)
        self._patches.collectives(self._around_collective)
        self._patches.scaler_steps(self._around_scaler)
        if self._names_operators:
            self._patches.operators(self._around_operator)
        self._patches.single_functions(self._functions, self._around_single)
        self._handles.append(register_optimizer_step_pre_hook(self._before_optimizer))
        self._handles.append(register_optimizer_step_post_hook(self._after_optimizer))
        if self._level in ("api", "both"):
            self._mode = ApiMode(self)
        elif self._level == "op":
            self._mode = OpMode(self)
        else:
            self._write_guard = WriteGuard(self._announce)
        self._set_mode(on=self._is_recording or self._level == "op")

    def _set_mode(self, *, on: bool) -> None:
        """Let our mode see the calls of this thread, or none, which then cost nothing."""
        if self._mode is None or not self._is_active or threading.get_ident() != self._thread:
            return
        if not on:
            remove_mode(self._mode)
        elif not self._mode.is_on():
            self._mode.__enter__()

    def _set_function_mode(self, *, on: bool) -> None:
        """The same where it goes unnoticed: to move a mode of dispatch, those that the user entered later have to be left and entered."""
        if isinstance(self._mode, FunctionMode):
            self._set_mode(on=on)

    def _guard_writes(self) -> None:
        """Have whoever writes announced, so that tensors on a device can be read many at a time."""
        if self._mode is None and self._write_guard is not None and self._recorder.has_devices:
            self._mode = self._write_guard
            self._recorder.is_patient = True
            self._set_mode(on=True)

    def _begin(self, step: int) -> None:
        self._step = self._safety.step = step
        self._described: set[int] = set()
        self._recorder.begin_step(step)
        self._is_recording = self._wants_to_record(step)
        self._set_function_mode(on=self._is_recording)

    def _wants_to_record(self, step: int) -> bool:
        if self._is_paused or self._safety.is_broken:
            return False
        return self._selection.wants_step(step) and self._selection.wants_rank(self._rank)

    def _end_step(self) -> None:
        self._recorder.flush_backward()
        if self._recorder.has_written:
            self._recorder.end_step(None if self._on_step_end is None else functools.partial(self._on_step_end, self._step))

    def _close(self, complete: bool) -> None:
        try:
            if complete and not self._safety.is_broken:
                self._end_step()
            if not self._safety.is_broken:
                self._recorder.finish()
        finally:
            self._sink.close(complete=complete)

    # ---- failing without harm

    def _safely(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        result = self._safety.run(what, function, *args)
        if self._safety.is_broken:
            self._is_recording = False
        return result

    def _guard(self, function: Callable[..., None]) -> Callable[..., None]:
        """A hook that does nothing once capture is over, and whose failure stays here."""
        session = weakref.ref(self)

        def hook(*args: Any) -> None:
            alive = session()
            if alive is not None and alive._is_active and alive._is_recording:
                alive._safely("record a backward call", function, *args)

        return hook

    # ---- calls

    def open_call(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        level: Level = "api",
        depth: int = 2,
        written: frozenset[int | str] = frozenset(),
    ) -> OpenCall | None:
        """Take down what is known before a call; None where it is not recorded.

        `written` names arguments that the call is known to write to, where their version does not tell.
        """
        if not self.is_recording:
            return None
        if level == "api" and self._names_operators:
            op = self._spoken_name(op)
        if level == "api" and writes_silently(op):
            written |= {0}
            self._safely(f"forget what {op} overwrites", self._recorder.forget_all, args[:1])
        frame = caller(depth) if level == "api" else None
        if frame is not None and is_own_business(frame):
            self._announce(op, args, kwargs)
            return None
        opened: OpenCall | None = self._safely(f"record the inputs of {op}", self._recorder.open, op, args, kwargs, level, frame)
        if opened is not None:
            opened.written = written
        return opened

    def close_call(self, opened: OpenCall, result: Any) -> None:
        """Take down what a call returned."""
        self._safely(f"record the outputs of {opened.op}", self._recorder.close, opened, result)

    def _spoken_name(self, op: str) -> str:
        """What the user wrote, where the call is the one that an operator makes."""
        spoken = getattr(self._spoken, "name", None)
        self._spoken.name = None
        return spoken or op

    # ---- what the patches call

    def _around_operator(self, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self._spoken.name = f"Tensor.{name}"
        try:
            return original(*args)
        finally:
            self._spoken.name = None

    def _around_module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording:
            return original(module, *args, **kwargs)
        is_outermost = self._modules.is_empty()
        if is_outermost:
            self._set_function_mode(on=True)  # an optimizer may have failed, or another thread may have begun the step
        is_compiled = _is_compiled(module)
        unit = self._units.get(module)
        is_opaque = unit is not None or is_compiled or self._is_fused(module)
        self._modules.enter(module)
        opened = None
        pushed = False
        try:
            if is_outermost and graph_task() == -1 and not inside_transform():
                self._safely("record the state of the model", self._describe_model, module, args, kwargs)
                self._guard_writes()
            if is_opaque or self._level in ("module", "both"):
                opened = self.open_call(f"module.{unit or type(module).__name__}", args, kwargs, level="module")
                if opened is not None:
                    self._safely("look at the parameters of a module", self._add_parameters, opened, module)
                    pushed = self._push_parent(opened)
            if is_compiled:
                self._safely("write a note", self._note_compiled, module)
            result = self._call_unseen(original, (module, *args), kwargs) if is_opaque else original(module, *args, **kwargs)
        finally:
            if pushed:
                self._recorder.leave_parent()
            if opened is None:
                self._modules.leave(module)
        if opened is not None:
            self._modules.leave(module)
            self.close_call(opened, result)
        return result

    def _is_fused(self, module: torch.nn.Module) -> bool:
        return isinstance(self._mode, FunctionMode) and bool(self._safely("look at a module", _has_fast_path, module))

    def _push_parent(self, opened: OpenCall) -> bool:
        if opened.name is not None:
            self._recorder.enter_parent(opened.name)
        return opened.name is not None

    def _add_parameters(self, opened: OpenCall, module: torch.nn.Module) -> None:
        if opened.edges is None:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                opened.edges.leaves.setdefault(id(parameter), Slot("parameter", (name,)))

    def _note_compiled(self, module: torch.nn.Module) -> None:
        path = self._modules.current or type(module).__name__
        self._sink.note(LedgerEntry(what=f"see the calls inside {path}", why="it is compiled by torch.compile", step=self._step))

    def _call_unseen(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run something without our mode: its calls are not recorded, and some modules compute otherwise where any mode is active."""
        self._read_before_change()
        self._is_recording = False
        removed = remove_mode(self._mode) if self._mode is not None else False
        try:
            return original(*args, **kwargs)
        finally:
            self._is_recording = self._is_active and self._wants_to_record(self._step)
            if removed:
                self._set_mode(on=self._is_recording or self._level == "op")

    def _describe_model(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._selection.wants_phase("start") or next(module.parameters(), None) is None:
            return
        self._recorder.begin_writing()
        if id(module) not in self._described:
            self._described.add(id(module))
            found: list[Found] = [(Slot.parse(f"parameter.{name}"), tensor) for name, tensor in self._modules.named_parameters(module)]
            found += [(Slot.parse(f"buffer.{name}"), tensor) for name, tensor in self._modules.named_buffers(module)]
            self._recorder.write_state("state.parameters", "start", [(slot, tensor) for slot, tensor in found if not is_lazy(tensor)])
        arguments, batch = encode_arguments(args, kwargs)
        self._recorder.write_state("state.batch", "start", batch, arguments)

    def _around_function(self, apply: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._level not in ("api", "both") or cls.__module__.startswith("torch."):
            return apply(*args, **kwargs)
        opened = self.open_call(f"Function.{cls.__qualname__}", args, kwargs)
        if opened is None:
            return apply(*args, **kwargs)
        pushed = self._push_parent(opened)
        self._recorder.num_functions += 1
        try:
            result = apply(*args, **kwargs)
        finally:
            self._recorder.num_functions -= 1
            if pushed:
                self._recorder.leave_parent()
        self.close_call(opened, result)
        return result

    def _around_single(self, op: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = self.open_call(op, args, kwargs)
        if opened is None:
            return original(*args, **kwargs)
        result = self._call_unseen(original, args, kwargs)
        self.close_call(opened, result)
        return result

    def _around_collective(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = self.open_call(f"distributed.{name}", args, kwargs) if self._level in ("api", "both") else None
        result = original(*args, **kwargs)
        if opened is not None:
            self._safely(f"record the outputs of {opened.op}", self._recorder.close_collective, opened, result)
        return result

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording:
            return original(*args, **kwargs)
        try:
            if isinstance(self._mode, FunctionMode) and not self._mode.is_on():
                with self._mode:
                    return original(*args, **kwargs)
            return original(*args, **kwargs)
        finally:
            if graph_task() == -1:
                self._safely("record the end of a backward pass", self._recorder.flush_backward)

    def _announce(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._recorder.is_pending and (kwargs or not never_writes(op)):
            self._safely("read tensors before they change", self._recorder.before, op, args, kwargs)

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_updated = True
        self._read_before_change()
        if self._wants_optimizer(optimizer):
            self._safely("record the gradients of an optimizer", self._take_gradients, optimizer)
        if _calls_nothing_of_users(optimizer, args, kwargs):
            self._set_function_mode(on=False)  # it asks each parameter for a dozen facts, and a mode sees every question

    def _wants_optimizer(self, optimizer: Any) -> bool:
        return self.is_recording and self._selection.wants_phase("optimizer") and self._optimizers.wants(optimizer)

    def _take_gradients(self, optimizer: Any) -> None:
        self._recorder.begin_writing()
        self._optimizers.gradients[id(optimizer)] = self._recorder.take(self._optimizers.gradients_of(optimizer))
        self._recorder.read_all()

    def _read_before_change(self) -> None:
        """Something begins whose calls nobody announces: what was taken has to be read before."""
        if self._recorder.is_pending:
            self._safely("read tensors before they change", self._recorder.read_all)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_recording:
            self._set_function_mode(on=True)
        if self._wants_optimizer(optimizer):
            self._safely("record an optimizer", self._describe_optimizer, optimizer)
        self._recorder.tensors.forget()
        if self._find_steps and self._is_active and threading.get_ident() == self._thread:
            if self._clock is None:
                self._clock = weakref.ref(optimizer)
            if self._clock() is optimizer:
                self.step()

    def _describe_optimizer(self, optimizer: Any) -> None:
        self._recorder.tensors.forget()
        gradients = self._optimizers.gradients.pop(id(optimizer), [])
        found = self._optimizers.results_of(optimizer)
        arguments = Arguments(kwargs=self._optimizers.hyper_parameters(optimizer))
        self._recorder.write_state(f"optimizer.{type(optimizer).__name__}", "optimizer", found, arguments, gradients)

    def _around_scaler(self, original: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        step, self._has_updated = self._step, False
        result = original(scaler, optimizer, *args, **kwargs)
        if self._is_active and not self._has_updated:
            self._safely("write a note", self._sink.note, LedgerEntry(what="see an optimizer step", why="GradScaler skipped it", step=step))
            if self._find_steps and self._step == step and (self._clock is None or self._clock() is optimizer):
                self.step()
        return result


def _calls_nothing_of_users(optimizer: Any, args: Any, kwargs: Any) -> bool:
    """Whether a step of this optimizer is torch's own business from its beginning to its end: no closure, no hooks."""
    if not type(optimizer).__module__.startswith("torch.optim") or len(args) > 1 or kwargs.get("closure") is not None:
        return False
    return not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _has_fast_path(module: torch.nn.Module) -> bool:
    """Whether a module would use a fused kernel that it gives up when any torch function mode is active."""
    if module.training or not isinstance(module, _FUSED):
        return False
    return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in module.parameters())


def _is_compiled(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
