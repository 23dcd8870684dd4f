# SPDX-License-Identifier: Apache-2.0
"""Run one capture: own every mode, patch and counter, and write to a sink.

The user's call always runs, exactly once, outside of everything that can fail here. A failure here is written to the ledger and warned
about once, and training goes on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ulpscope._torch_private import has_step_hooks
from ulpscope.capture.intercept.collectives import overwritten_below, overwritten_values, readable_arguments, written_below, written_values
from ulpscope.capture.intercept.modules import ByModule, has_parameters, own_parameters
from ulpscope.capture.intercept.naming import caller, higher_order_name, is_own_business, never_writes, silently_written, writes_silently
from ulpscope.capture.intercept.openmp import lend_torch_threads
from ulpscope.capture.intercept.patching import MODULE_CALL
from ulpscope.capture.intercept.torch_modes import ApiMode, FunctionMode, OpMode, WriteGuard
from ulpscope.capture.lifecycle import Session, has_fast_path, is_compiled
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.flights import is_handle
from ulpscope.capture.record.recorder import CallRecorder, OpenCall
from ulpscope.capture.record.state import BufferHunt
from ulpscope.capture.record.tensor_reader import Keep
from ulpscope.capture.torch_internals import (
    asynchronous_memory,
    graph_task,
    inside_transform,
    is_coalescing,
    is_tracing_graph,
    work_of,
)
from ulpscope.capture.walk import Found, encode_arguments, slot_and_mark, tensors_in
from ulpscope.model import Arguments, FrameSink, LedgerEntry, Level, Sink, Slot
from ulpscope.numerics.summary.lent_threads import lend_threads
from ulpscope.recording.selection import Selection

__all__ = ["CaptureLevel", "CaptureSession"]

CaptureLevel: TypeAlias = Literal["api", "module", "both", "op"]


class CaptureSession(Session):
    """Records one process between `start` and `stop`.

    With `operators` an operator has a count of its own. `functions` are functions of Python that no mode sees, as owner, attribute and the
    name of their calls; calls inside them are not recorded.
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
        super().__init__(
            sink, rank=rank, models=models, optimizers=optimizers, selection=selection, find_steps=find_steps, operators=operators
        )
        self._level = level
        self._functions = functions
        self._units: ByModule[str] = ByModule()
        self._has_units = False
        self._on_step_end = on_step_end
        self._recorder = CallRecorder(
            sink,
            rank=rank,
            keep=keep,
            selection=self._selection,
            modules=self._modules,
            session=weakref.ref(self),
            boundary=MODULE_CALL,
            is_patient=level in ("api", "both"),
        )
        self._buffers = BufferHunt(self._modules, self._recorder.take)
        self._write_guard: WriteGuard | None = None
        self._knows_allocations = False
        self._described: set[int] = set()

    # ---- life

    def _install(self) -> None:
        super()._install()
        if COMPILED is not None and not COMPILED.HAS_NATIVE:
            self._patches.hook_registration(COMPILED.Registrar)
        self._patches.single_functions(self._functions, self._around_single)
        if self._level != "op":  # there the mode sees them
            self._patches.higher_order_operators(self._around_higher_order)
        if self._level == "module":
            self._write_guard = WriteGuard(self._announce, self._recorder.devices)
        lend_torch_threads()

    def _module_caller(self) -> Callable[..., Any]:
        return self._around_module if COMPILED is None else COMPILED.ModuleCaller(self).call

    def _new_mode(self) -> FunctionMode | OpMode | None:
        if self._level == "op":
            return OpMode(self)
        return ApiMode(self) if self._level in ("api", "both") else None

    def _see_nothing_more(self) -> None:
        super()._see_nothing_more()
        lend_threads(None)
        self._recorder.forget()

    def pause(self) -> None:
        self._read_before_change()
        super().pause()

    def take_whole(self, module: torch.nn.Module, name: str) -> None:
        """Record each call of this module as one call of that name, and nothing inside it."""
        self._units[module] = name
        self._has_units = True

    def take_apart(self) -> None:
        """Record the calls inside every module again."""
        self._units.clear()
        self._has_units = False

    def _guard_writes(self) -> None:
        """Have calls that write announced, so that tensors on a device can be read many at a time."""
        if self._mode is None and self._write_guard is not None and self._recorder.has_devices:
            self._mode = self._write_guard
            self._recorder.is_patient = True
            self._set_mode(on=True)

    def _open_step(self, step: int) -> None:
        self._described = set()
        self._buffers.forget()
        self._recorder.begin_step(step)

    def _end_step(self) -> None:
        self._recorder.flush_backward()
        if self._recorder.has_written:
            if self._selection.wants_phase("end"):
                self._safely("record the end of a step", self._describe_end)
            self._recorder.end_step(None if self._on_step_end is None else functools.partial(self._on_step_end, self._step))

    def _close(self, complete: bool) -> None:
        try:
            if complete and not self._safety.is_broken:
                self._end_step()
            if not self._safety.is_broken:
                if isinstance(self._sink, FrameSink):  # while the devices are still at work
                    self._sink.copy_closed_steps()
                self._recorder.finish()
        finally:
            self._sink.close(complete=complete)

    # ---- failing without harm

    def _safely(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        result = self._safety.run(what, function, *args)
        if self._safety.is_broken:
            self._is_recording = False
        return result

    def failed(self, what: str, error: Exception) -> None:
        """Write down what a hook could not do."""
        self._safety.failed(what, error)
        if self._safety.is_broken:
            self._is_recording = False

    # ---- memory

    def _see_pipelines(self) -> None:
        super()._see_pipelines()
        if self._level == "op" and not self._knows_allocations:  # only at that level are the calls between allocation and first write seen
            self._knows_allocations = self._is_active and self._patches.allocations(self._around_allocation)

    def _around_allocation(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        if self.is_recording:
            self._safely("look at new memory", self._recorder.renew, (*args, *kwargs.values()))
        return result

    # ---- calls

    def open_call(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        level: Level = "api",
        frame: FrameType | None = None,
        written: frozenset[int | str] = frozenset(),
    ) -> OpenCall | None:
        """Take down the facts before a call; None if the call is not recorded.

        `written` names arguments that the call is known to write to, if their version does not show it.
        """
        if not self.is_recording:
            return None
        if level == "api" and self._names_operators:
            op = self._spoken_name(op)
        if writes_silently(op):
            silent = silently_written(op, args, kwargs)
            if 0 in silent:
                self._safely(f"forget what {op} overwrites", self._recorder.forget_all, args[:1])
            written |= silent
        if frame is None and level == "api":
            frame = caller(2)
        if frame is not None and is_own_business(frame):
            self._announce(op, args, kwargs)
            return None
        opened: OpenCall | None = self._safely(f"record the inputs of {op}", self._recorder.open, op, args, kwargs, level, frame)
        if opened is not None:
            opened.written = written
        return opened

    def lend_memory(self, args: tuple[Any, ...]) -> None:
        """Note that the memory of a tensor is handed to code that may write to it unseen."""
        if self.is_recording:
            self._safely("forget what memory was never written to", self._recorder.lend, args)

    def close_call(self, opened: OpenCall, result: Any) -> None:
        """Take down the results of a call."""
        self._safely(f"record the outputs of {opened.op}", self._recorder.close, opened, result)

    def expect_below(self, opened: OpenCall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare for an operation below Python that communicates: leave out the values that it writes over."""
        self._safely(f"look at what {func} writes over", self._leave_out, opened, overwritten_below, func, args, kwargs)

    def launch_below(self, op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow an operation below Python that communicates and has returned, maybe before it is done."""
        if self._is_active:
            self._safely(f"follow {op}", self._follow_below, op, func, args, kwargs, result)

    def _follow_below(self, op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if ".wait_tensor." in op:
            self._recorder.land_in(args[0])
            return
        if "functional" in op:
            self._recorder.launch(op, [tensor for _, tensor in tensors_in(result, "output")])
            return
        works = [each for each in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(each, torch.ScriptObject)]
        if works:
            written = [tensor for _, tensor in tensors_in(written_below(func, args, kwargs), "output")]
            self._recorder.launch(op, written, work_of(works[-1])).asks = True

    def run_whole(
        self, op: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, level: Level = "api"
    ) -> Any:
        """Run a function that holds a part of the user's program, and record it as one call, with nothing inside it."""
        if not self.is_recording:
            return function(*args, **kwargs)
        opened: OpenCall | None = self._safely(f"record the inputs of {op}", self._recorder.open, op, args, kwargs, level)
        result = self._call_unseen(function, args, kwargs)
        self._safely(f"forget what {op} may have written to", self._recorder.forget_all, (*args, kwargs))
        if opened is not None:
            self.close_call(opened, result)
        return result

    # ---- what the patches call

    def _around_module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording or is_tracing_graph():  # a compiler that runs a part on stand-ins is disturbed by modes that come and go
            return original(module, *args, **kwargs)
        is_outermost = self._modules.is_empty()
        if is_outermost:
            self._see_pipelines()
            self._set_function_mode(on=True)  # an optimizer may have failed, or another thread may have begun the step
        compiled = is_compiled(module)
        unit = self._units.get(module) if self._has_units else None
        is_opaque = unit is not None or compiled or (not module.training and self._is_fused(module))
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
            if compiled:
                self._safely("write a note", self._note_compiled, module)
            result = self._call_unseen(original, (module, *args), kwargs) if is_opaque else original(module, *args, **kwargs)
        finally:
            if pushed:
                self._recorder.leave_parent()
            self._modules.leave(module)
        if opened is not None:
            self.close_call(opened, result)
        return result

    def _is_fused(self, module: torch.nn.Module) -> bool:
        return isinstance(self._mode, FunctionMode) and bool(self._safely("look at a module", has_fast_path, module))

    def _push_parent(self, opened: OpenCall) -> bool:
        if opened.name is not None:
            self._recorder.enter_parent(opened.name)
        return opened.name is not None

    def _add_parameters(self, opened: OpenCall, module: torch.nn.Module) -> None:
        if opened.edges is None:
            return
        for name, parameter in own_parameters(module):
            if parameter.requires_grad:
                opened.edges.add_leaf(parameter, slot_and_mark("parameter", (name,))[0])

    def _note_compiled(self, module: torch.nn.Module) -> None:
        path = self._modules.current or type(module).__name__
        compiler = "torch.jit" if isinstance(module, torch.jit.ScriptModule) else "torch.compile"
        self._sink.note(LedgerEntry(what=f"see the calls inside {path}", why=f"it is compiled by {compiler}", step=self._step))

    def _call_unseen(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._read_before_change()
        return super()._call_unseen(original, args, kwargs)

    def _describe_model(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._selection.wants_phase("start") or not has_parameters(module):
            return
        self._recorder.begin_writing()
        if id(module) not in self._described:
            self._described.add(id(module))
            found: list[Found] = [(Slot.parse(f"parameter.{name}"), tensor) for name, tensor in self._modules.named_parameters(module)]
            found += [(Slot.parse(f"buffer.{name}"), tensor) for name, tensor in self._modules.named_buffers(module)]
            self._recorder.write_state("state.parameters", "start", [(slot, tensor) for slot, tensor in found if not is_lazy(tensor)])
            self._buffers.remember(module)
        arguments, batch = encode_arguments(args, kwargs)
        self._recorder.write_state("state.batch", "start", batch, arguments)

    def _describe_end(self) -> None:
        self._recorder.tensors.forget()
        self._recorder.write_end(self._buffers.changed())

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
        self._safely("forget the buffers of a Function", self._recorder.forget_buffers, (args, kwargs))
        return result

    def _around_higher_order(self, original: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_inside = isinstance(self._mode, FunctionMode) and self._mode.is_at_work
        if is_inside or not self.is_recording or is_tracing_graph() or inside_transform():
            return original(operator, *args, **kwargs)
        return self.run_whole(higher_order_name(operator), functools.partial(original, operator), args, kwargs)

    def _around_single(self, op: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = self.open_call(op, args, kwargs)
        if opened is None:
            return original(*args, **kwargs)
        result = self._call_unseen(original, args, kwargs)
        self.close_call(opened, result)
        return result

    def _around_collective(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._see_pipelines()
        op, opened = f"distributed.{name}", None
        if self._level in ("api", "both"):
            opened = self.open_call(op, *readable_arguments(name, args, kwargs), frame=caller(3))
            if opened is not None:
                self._safely(f"look at what {op} writes over", self._leave_out, opened, overwritten_values, name, original, args, kwargs)
        else:
            self._announce(op, args, kwargs)
        result = original(*args, **kwargs)
        if self._is_active:
            self._safely(f"record the outputs of {op}", self._follow, name, original, args, kwargs, result, opened)
        return result

    def _leave_out(self, opened: OpenCall, overwritten: Callable[..., list[Any]], *call: Any) -> None:
        self._recorder.leave_out(opened, [tensor for _, tensor in tensors_in(overwritten(*call), "mutated")])

    def _follow(
        self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, opened: OpenCall | None
    ) -> None:
        """Record the results of a collective that has returned, or follow the memory that has to be waited for."""
        op, recorder = f"distributed.{name}", self._recorder
        if "." in name:  # its results are what it returns
            memory = [asynchronous_memory(tensor) for _, tensor in tensors_in(result, "output")]
            if any(memory):
                recorder.launch(op, [each[0] for each in memory if each is not None])
            if opened is not None:
                recorder.close(opened, result)
            return
        written = [tensor for _, tensor in tensors_in(written_values(name, original, args, kwargs), "mutated")]
        group = kwargs.get("group")
        handles = [each for each in (result if isinstance(result, list) else [result]) if is_handle(each)]
        is_collected = is_coalescing(group)
        if name == "batch_isend_irecv":  # each of its operations was seen by itself
            pass
        elif is_collected:
            recorder.launch(op, written, group=group or torch.distributed.group.WORLD, is_told=opened is not None)
        elif handles:
            recorder.launch(op, written, handles[0], is_told=opened is not None)
        else:
            recorder.land_on(written)
        for handle in handles:
            recorder.flights.shown(handle)
            self._patches.handles(type(handle), self._around_wait)
        if opened is not None:
            recorder.close_collective(opened, written if handles or is_collected else None)

    def _around_wait(self, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = original(*args)
        if self._is_active and len(self._recorder.flights):
            self._safely("read what a collective received", self._landed, name, args, result)
        return result

    def _landed(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Handle the return of a waiting function: the program has waited for memory or a handle, or asked whether it is done."""
        if name == "get_future":
            self._recorder.flights.follow(args[0], result)
            self._patches.handles(type(result), self._around_wait)
        elif name == "wait_tensor":
            self._recorder.land_in(args[0])
        elif name == "append":
            self._recorder.flights.handed(lambda group: not is_coalescing(group), args[1])
        elif name not in ("is_completed", "done") or result:
            self._recorder.land_with(args[0])

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
            self._set_function_mode(on=False)  # the optimizer asks each parameter for a dozen facts, and a mode sees every question

    def _wants_optimizer(self, optimizer: Any) -> bool:
        return self.is_recording and self._selection.wants_phase("optimizer") and self._optimizers.wants(optimizer)

    def _take_gradients(self, optimizer: Any) -> None:
        self._recorder.begin_writing()
        self._optimizers.gradients[id(optimizer)] = self._recorder.take(self._optimizers.gradients_of(optimizer))
        self._recorder.read_all()

    def _read_before_change(self) -> None:
        """Read waiting tensors before calls begin that nobody announces."""
        if self._recorder.is_pending:
            self._safely("read tensors before they change", self._recorder.read_all)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_recording:
            self._set_function_mode(on=True)
        if self._wants_optimizer(optimizer):
            self._safely("record an optimizer", self._describe_optimizer, optimizer)
        self._recorder.tensors.forget()
        self._tick(optimizer)

    def _describe_optimizer(self, optimizer: Any) -> None:
        self._recorder.tensors.forget()
        gradients = self._optimizers.gradients.pop(id(optimizer), [])
        found = self._optimizers.results_of(optimizer)
        arguments = Arguments(kwargs=self._optimizers.hyper_parameters(optimizer))
        self._recorder.write_state(f"optimizer.{type(optimizer).__name__}", "optimizer", found, arguments, gradients)


def _calls_nothing_of_users(optimizer: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a step of this optimizer is torch's own business from beginning to end: no closure, no hooks."""
    if not type(optimizer).__module__.startswith("torch.optim") or len(args) > 1 or kwargs.get("closure") is not None:
        return False
    return not has_step_hooks(optimizer)
