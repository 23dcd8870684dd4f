# SPDX-License-Identifier: Apache-2.0
"""One capture of a MindSpore program under way: it owns every patch and counter, and writes to a sink.

The user's call always runs, exactly once, outside of everything that can fail here. What fails here is written to the ledger, warned about
once, and training goes on.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mindspore as ms
from mindspore import nn

from ulpscope.capture_mindspore.arguments import Found, encode_arguments, tensors_in
from ulpscope.capture_mindspore.cells import CellStack, parameter_name, table_name, torch_class
from ulpscope.capture_mindspore.framework import (
    edge_of,
    is_grad_enabled,
    is_in_backward,
    is_in_graph_mode,
    is_recording_gradients,
    own_parameters,
    wait_for,
)
from ulpscope.capture_mindspore.gradients import BackwardCall, Gradients, Target
from ulpscope.capture_mindspore.patching import Patches
from ulpscope.capture_mindspore.reading import Keep, TensorReader
from ulpscope.model import Arguments, CallName, CallRecord, Frame, LedgerEntry, Level, Modes, Phase, Sink, Slot, TensorRecord
from ulpscope.model.operations.mindspore_names import canonical_call, name_rows
from ulpscope.recording import active
from ulpscope.recording.safety import Safety
from ulpscope.recording.selection import Selection
from ulpscope.recording.stacks import StackReader

__all__ = ["CaptureLevel", "MindSporeSession"]

CaptureLevel: TypeAlias = Literal["api", "module", "both"]

_STACK_DEPTH = 12
_MINDSPORE_FILES = (str(Path(ms.__file__).parent) + "/",)
_WRITING = ("__setitem__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A call that has begun: what it was given is read already, and where its inputs stand in the graph.

    `after` is the number of the latest node when it began.
    """

    name: CallName
    level: Level
    module: str
    parent: str
    recorded_as: str
    arguments: Arguments
    inputs: tuple[TensorRecord, ...]
    targets: tuple[Target, ...]
    modes: Modes
    stack: tuple[Frame, ...]
    after: int


class MindSporeSession:
    """Records what one process does between `start` and `stop`, in PyNative mode."""

    def __init__(
        self,
        sink: Sink,
        *,
        rank: int = 0,
        models: list[Any] | None = None,
        level: CaptureLevel = "api",
        keep: Keep = "statistics",
        selection: Selection | None = None,
        on_step_end: Callable[[int], None] | None = None,
    ) -> None:
        self._sink = sink
        self._rank = rank
        self._models = list(models or [])
        self._level = level
        self._selection = selection or Selection()
        self._on_step_end = on_step_end
        self._safety = Safety(sink)
        self._patches = Patches()
        self._cells = CellStack(self._models)
        self._reader = TensorReader(keep, sink.keep)
        self._gradients = Gradients(self._reader, self._guarded, self._complain)
        self._stacks = StackReader(_STACK_DEPTH, foreign=_MINDSPORE_FILES)
        self._is_active = self._is_recording = self._is_paused = False
        self._is_inside = False
        self._thread = 0
        self._step = 0

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
        except BaseException:
            self.stop(complete=False)
            raise

    def _install(self) -> None:
        self._patches.cells(self._around_cell)
        self._patches.backward_passes(self._around_backward)
        self._patches.compiled_calls(self._around_compiled)
        if self._level != "module":
            self._patches.functions(self._around_function)
            self._patches.methods(self._around_function)

    def stop(self, *, complete: bool = True) -> None:
        """Put back everything; the step under way is closed as complete unless the user's code failed in it."""
        if not self._is_active:
            return
        self._is_active = self._is_recording = False
        self._patches.undo()
        active.leave(self)
        self._gradients.forget()
        self._safety.run("write a note", self._note_idle_patterns)
        self._safety.run("close the run", self._close, complete)

    def step(self) -> None:
        """End the step under way and begin the next."""
        if not self._is_active:
            return
        self._safety.run("close the step", self._end_step)
        self._begin(self._step + 1)

    def pause(self) -> None:
        """See nothing until `resume`; the step under way stays open and its calls keep their numbers."""
        self._is_paused, self._is_recording = True, False

    def resume(self) -> None:
        self._is_paused = False
        self._is_recording = self._is_active and self._wants_to_record()

    def deactivate(self) -> None:
        self._is_active = self._is_recording = False

    def _begin(self, step: int) -> None:
        self._step = self._safety.step = step
        self._order = 0
        self._has_begun = False
        self._counts: dict[str, int] = defaultdict(int)
        self._parents: list[str] = []
        self._described: set[int] = set()
        self._gradients.forget()
        self._cells.forget_running()
        self._selection.begin_step()
        self._is_recording = self._wants_to_record()

    def _wants_to_record(self) -> bool:
        if self._is_paused or self._safety.is_broken:
            return False
        return self._selection.wants_step(self._step) and self._selection.wants_rank(self._rank)

    def _begin_writing(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._sink.begin_step(self._step)

    def _end_step(self) -> None:
        if self._has_begun:
            self._sink.end_step()
            if self._on_step_end is not None:
                self._on_step_end(self._step)

    def _close(self, complete: bool) -> None:
        self._sink.close(complete=complete)

    def _note_idle_patterns(self) -> None:
        for pattern in self._selection.idle_patterns:
            self._sink.note(LedgerEntry(what=f"find what {pattern!r} selects", why="it matched nothing that the program did"))

    @property
    def is_recording(self) -> bool:
        """Whether calls of this thread are seen right now."""
        return self._is_recording and not self._is_inside and threading.get_ident() == self._thread and not is_in_backward()

    def _guarded(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Do our own work: nothing of it is seen, and no failure reaches the program."""
        if not self._is_recording:
            return None
        was_inside, self._is_inside = self._is_inside, True
        try:
            return self._safety.run(what, function, *args)
        finally:
            self._is_inside = was_inside

    def _unseen(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run something of the program's without seeing the calls in it."""
        was_inside, self._is_inside = self._is_inside, True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = was_inside

    # ---- what the patches call

    def _around_function(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording:
            return original(*args, **kwargs)
        opened = self._guarded(f"record the inputs of {name}", self._open_function, name, original, args, kwargs)
        result = self._unseen(original, args, kwargs)
        if opened is not None:
            wait_for(tensor for _, tensor in tensors_in(result, "output"))
            written = args[0] if result is None and name.rpartition(".")[2] in _WRITING else result
            self._guarded(f"record the outputs of {name}", self._close_call, opened, written)
        return result

    def _around_cell(self, original: Callable[..., Any], cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_in_graph_mode():
            why = "the program runs in graph mode; ms.set_context(mode=ms.PYNATIVE_MODE) shows them"
            return self._run_compiled(f"graph.{type(cell).__name__}", why, args, original, (cell, *args), kwargs)
        if not self.is_recording:
            return original(cell, *args, **kwargs)
        if isinstance(cell, nn.Optimizer):
            return self._unseen(original, (cell, *args), kwargs)
        is_outermost = self._cells.is_empty()
        self._cells.enter(cell)
        parents = len(self._parents)
        try:
            self._guarded("record the state of the model", self._describe_model, cell, args, kwargs, is_outermost)
            outer = self._open_module(cell, args, kwargs) if self._level != "api" else None
            inner = self._guarded("record the inputs of a cell", self._open_cell, cell, args, kwargs) if self._level != "module" else None
            run = self._unseen if inner is not None else _call
            result = run(original, (cell, *args), kwargs)
            if inner is not None:
                wait_for(tensor for _, tensor in tensors_in(result, "output"))
                self._guarded(f"record the outputs of {inner.name}", self._close_call, inner, result)
        finally:
            del self._parents[parents:]
            self._cells.leave()
        if outer is not None:
            self._guarded(f"record the outputs of {outer.name}", self._close_call, outer, result)
        return result

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException:
            self._gradients.forget()
            raise
        if self.is_recording and not is_recording_gradients():
            self._guarded("record a backward pass", self._write_backward)
        return result

    def _around_compiled(self, original: Callable[..., Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args if executor.obj is None else args[1:]
        name = f"jit.{getattr(executor.fn, '__name__', 'region')}"
        return self._run_compiled(name, "it is compiled by ms.jit", given, original, (executor, *args), kwargs)

    def _run_compiled(
        self, name: str, why: str, given: tuple[Any, ...], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run what MindSpore compiles as one call, with everything out of the way of its compiler, which reads code."""
        opened: OpenCall | None = None
        if self.is_recording:
            opened = self._guarded(f"record the inputs of {name}", self._open_compiled, name, why, given, kwargs)
        with self._patches.out_of_the_way():
            result = self._unseen(original, args, kwargs)
        if opened is not None:
            wait_for(tensor for _, tensor in tensors_in(result, "output"))
            self._guarded(f"record the outputs of {name}", self._close_call, opened, result)
        return result

    # ---- calls

    def _open_function(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        given = _given(original, args, kwargs)
        primitive = original.args[0] if isinstance(original, functools.partial) else None
        called = canonical_call(name_rows().get(name, ()), *given, primitive)
        op, canonical, named = (name, *given) if called is None else called
        return self._open(op, canonical, named, recorded_as="" if op == name else name)

    def _open_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        """A cell of MindSpore's that is one call of torch; None for any other."""
        name = table_name(cell)
        called = canonical_call(name_rows().get(name, ()), args, kwargs, cell)
        if called is None:
            return None
        op, canonical, named = called
        return self._open(op, canonical, named, recorded_as=name)

    def _open_module(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        op = f"module.{torch_class(cell)}"
        opened: OpenCall | None = self._guarded(f"record the inputs of {op}", self._open_any_cell, op, cell, args, kwargs)
        if opened is not None:
            self._parents.append(str(opened.name))
        return opened

    def _open_any_cell(self, op: str, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        own = [(Slot("gradient", (parameter_name(cell, name),)), parameter) for name, parameter in own_parameters(cell)]
        return self._open(op, args, kwargs, level="module", recorded_as=table_name(cell), own=own)

    def _open_compiled(self, name: str, why: str, given: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        self._sink.note(LedgerEntry(what=f"see the calls inside {name}", why=why, step=self._step))
        return self._open(name, given, kwargs)

    def _open(
        self,
        op: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        level: Level = "api",
        recorded_as: str = "",
        own: Sequence[Found] = (),
    ) -> OpenCall | None:
        name, module = CallName(op, self._counts[op]), self._cells.current
        self._counts[op] += 1
        if not self._selection.wants_call(module, name):
            return None
        arguments, found = encode_arguments(args, kwargs)
        given = [*((Slot("output", slot.path), tensor) for slot, tensor in found), *own]
        self._begin_writing()
        inputs = tuple(self._reader.read(slot, tensor) for slot, tensor in found if self._selection.wants_slot(slot))
        return OpenCall(
            name=name,
            level=level,
            module=module,
            parent=self._parents[-1] if self._parents else "",
            recorded_as=recorded_as,
            arguments=arguments,
            inputs=inputs,
            targets=tuple((slot, tensor, edge_of(tensor)) for slot, tensor in given),
            modes=Modes(grad=is_grad_enabled(), training=self._cells.is_training),
            stack=self._stacks.read(),
            after=self._gradients.latest,
        )

    def _close_call(self, opened: OpenCall, result: Any) -> None:
        results = tensors_in(result, "output")
        if not results:
            self._counts[opened.name.op] -= opened.level == "api"  # it told a fact, and nothing was called inside it
            return
        outputs = [self._reader.read(slot, tensor) for slot, tensor in results]
        if self._selection.wants_phase("forward"):
            slots = (*opened.inputs, *(one for one in outputs if self._selection.wants_slot(one.slot)))
            self._write(opened.name, "forward", slots, opened.level, opened)
        if self._selection.wants_phase("backward") and is_recording_gradients():
            call = BackwardCall(
                name=opened.name,
                level=opened.level,
                module=opened.module,
                parent=opened.parent,
                recorded_as=opened.recorded_as,
                modes=opened.modes,
                stack=opened.stack,
            )
            self._gradients.watch(call, opened.targets, results, opened.after)

    def _write_backward(self) -> None:
        for call, slots in self._gradients.finish():
            wanted = tuple(one for one in slots if self._selection.wants_slot(one.slot))
            self._write(call.name, "backward", wanted, call.level, call)

    def _complain(self, why: str, call: BackwardCall) -> None:
        what = "compute the gradients that a call contributes"
        self._sink.note(LedgerEntry(what=what, why=why, step=self._step, call=str(call.name)))

    def _write(self, name: CallName, phase: Phase, slots: tuple[TensorRecord, ...], level: Level, told: OpenCall | BackwardCall) -> None:
        self._begin_writing()
        self._sink.write(
            CallRecord(
                rank=self._rank,
                step=self._step,
                order=self._order,
                call=name,
                phase=phase,
                level=level,
                module=told.module,
                parent=told.parent,
                arguments=told.arguments if isinstance(told, OpenCall) else None,
                modes=told.modes,
                slots=slots,
                stack=told.stack,
                recorded_as=told.recorded_as,
            )
        )
        self._order += 1

    # ---- state

    def _describe_model(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_outermost: bool) -> None:
        is_model = any(model is cell for model in self._models) if self._models else is_outermost
        if not is_model or not self._selection.wants_phase("start"):
            return
        found: list[Found] = [(Slot.parse(f"parameter.{name}"), tensor) for name, tensor in self._cells.parameters(cell)]
        if not found:
            return
        if id(cell) not in self._described:
            self._described.add(id(cell))
            found += [(Slot.parse(f"buffer.{name}"), tensor) for name, tensor in self._cells.buffers(cell)]
            self._write_state("state.parameters", found, None)
        arguments, batch = encode_arguments(args, kwargs)
        self._write_state("state.batch", batch, arguments)

    def _write_state(self, op: str, found: list[Found], arguments: Arguments | None) -> None:
        self._begin_writing()
        index, self._counts[op] = self._counts[op], self._counts[op] + 1
        slots = tuple(self._reader.read(slot, tensor) for slot, tensor in found if self._selection.wants_slot(slot))
        self._sink.write(
            CallRecord(
                rank=self._rank,
                step=self._step,
                order=self._order,
                call=CallName(op, index),
                phase="start",
                level="state",
                arguments=arguments,
                modes=Modes(grad=is_grad_enabled()),
                slots=slots,
            )
        )
        self._order += 1


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _given(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the program gave: who stands around a function is also handed the defaults of what was not given."""
    code = getattr(original, "__code__", None)
    if code is None:
        return args, kwargs
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(names[::-1], (original.__defaults__ or ())[::-1], strict=False))
    given = list(args[: len(names)])
    left = {**(original.__kwdefaults__ or {})}
    last = len(given)
    while last and names[last - 1] in defaults and _is_same(given[last - 1], defaults[names[last - 1]]):
        last -= 1
    named = {name: value for name, value in kwargs.items() if name not in left or not _is_same(value, left[name])}
    positional = given[:last]
    for at in range(last):
        if names[at] in defaults and _is_same(given[at], defaults[names[at]]):  # by keyword from here on: one in between was not given
            later = {names[k]: given[k] for k in range(at, last) if names[k] not in defaults or not _is_same(given[k], defaults[names[k]])}
            return tuple(positional[:at]), {**later, **named}
    return (*positional, *args[len(names) :]), named


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and isinstance(value, (int, float, str, tuple)) and bool(value == default))
