# SPDX-License-Identifier: Apache-2.0
"""One capture under way: it owns every mode, patch and counter, and writes to a sink.

The user's call always runs, exactly once, outside of everything that can fail here. What fails here is written to the ledger, warned about
once, and training goes on.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ulpscope.capture.backward import BackwardOfCall, Edges, edges_of, watch_backward
from ulpscope.capture.calls import caller, is_own_business, makes_no_values
from ulpscope.capture.modes import ApiMode, OpMode, remove_mode
from ulpscope.capture.modules import ModuleStack
from ulpscope.capture.patching import Patches
from ulpscope.capture.selection import Selection
from ulpscope.capture.stacks import StackReader, is_recompute
from ulpscope.capture.state import OptimizerProbe, random_generators, surrounding_modes
from ulpscope.capture.tensors import Keep, TensorReader
from ulpscope.capture.torch_internals import (
    current_node,
    graph_task,
    inside_transform,
    next_sequence_number,
    sequence_number,
    without_function_modes,
)
from ulpscope.capture.walk import Found, encode_arguments, tensors_in
from ulpscope.errors import CaptureWarning
from ulpscope.model import Arguments, CallName, CallRecord, Frame, LedgerEntry, Level, Modes, Phase, Sink, Slot, TensorRecord

__all__ = ["CaptureLevel", "CaptureSession"]

CaptureLevel: TypeAlias = Literal["api", "module", "both", "op"]

_STACK_DEPTH = 12
_FUSED = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)
_SESSIONS: weakref.WeakSet[CaptureSession] = weakref.WeakSet()


@dataclass(slots=True)
class _OpenCall:
    """A call that has begun and not returned."""

    op: str
    level: Level
    call: CallName | None
    module: str
    parent: str
    arguments: Arguments
    modes: Modes
    stack: tuple[Frame, ...]
    recompute: bool
    found: list[Found]
    versions: list[int | None]
    inputs: list[TensorRecord]
    edges: Edges | None
    phase: Phase = "forward"


class CaptureSession:
    """Records what one process does between `start` and `stop`.

    With `find_steps` a step ends with each step of the first optimizer that steps; otherwise when `step` is called.
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
        on_step_end: Callable[[int], None] | None = None,
    ) -> None:
        self._sink = sink
        self._rank = rank
        self._level = level
        self._selection = selection or Selection()
        self._find_steps = find_steps
        self._on_step_end = on_step_end
        self._modules = ModuleStack(models or [])
        self._tensors = TensorReader(keep, sink.keep)
        self._stacks = StackReader(_STACK_DEPTH)
        self._optimizers = OptimizerProbe(self._modules, optimizers)
        self._lock = threading.RLock()
        self._patches = Patches()
        self._mode: ApiMode | OpMode | None = None
        self._handles: list[Any] = []
        self._begun: set[BackwardOfCall] = set()
        self._parents: threading.local = threading.local()
        self._clock: weakref.ref[Any] | None = None
        self._num_failures = 0
        self._is_active = False
        self._is_broken = False
        self._thread = 0
        self._step = -1
        self._begin(0)

    # ---- life

    def start(self) -> None:
        """Begin to record on this thread."""
        if self._is_active:
            return
        self._thread = threading.get_ident()
        self._is_active = True
        _SESSIONS.add(self)
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
        self._begun.clear()
        self._tensors.forget()
        _SESSIONS.discard(self)
        self._safely("close the run", self._close, complete)

    def step(self) -> None:
        """End the step under way and begin the next."""
        if not self._is_active:
            return
        number = self._step
        self._safely("close the step", self._end_step)
        self._begin(number + 1)

    @staticmethod
    def is_one_active() -> bool:
        """Whether this process is being recorded; what is patched twice cannot be put back in any order."""
        return len(_SESSIONS) > 0

    @property
    def is_recording(self) -> bool:
        """Whether calls of this thread are recorded right now."""
        return self._is_recording and (threading.get_ident() == self._thread or graph_task() != -1)

    @property
    def current_step(self) -> int:
        return self._step

    def _install(self) -> None:
        self._patches.module_calls(self._around_module)
        self._patches.functions(self._around_function)
        self._patches.backward_passes(self._around_backward)
        self._patches.collectives(self._around_collective)
        self._patches.scaler_steps(self._around_scaler)
        self._handles.append(register_optimizer_step_pre_hook(self._before_optimizer))
        self._handles.append(register_optimizer_step_post_hook(self._after_optimizer))
        if self._level in ("api", "both"):
            self._mode = ApiMode(self)
        elif self._level == "op":
            self._mode = OpMode(self)
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _begin(self, step: int) -> None:
        with self._lock:
            self._step = step
            self._order = 0
            self._is_written = False
            self._counts: dict[str, int] = defaultdict(int)
            self._indices: dict[tuple[str, str], list[int]] = defaultdict(list)
            self._recomputed: dict[tuple[str, str], int] = defaultdict(int)
            self._described: set[int] = set()
            self._makers: dict[int, tuple[str, tuple[Frame, ...]]] = {}
            self._tensors.forget()
            self._selection.begin_step()
            self._is_recording = not self._is_broken and self._selection.wants_step(step) and self._selection.wants_rank(self._rank)

    def _end_step(self) -> None:
        for backward in list(self._begun):
            backward.flush()
        with self._lock:
            if self._is_written:
                self._sink.end_step()
        if self._is_written and self._on_step_end is not None:
            self._on_step_end(self._step)

    def _close(self, complete: bool) -> None:
        if complete and not self._is_broken:
            self._end_step()
        self._sink.close(complete=complete)

    # ---- failing without harm

    def _safely(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """The result of our own work, or None and a line in the ledger."""
        try:
            with without_function_modes():
                return function(*args)
        except Exception as error:
            self._failed(what, error)
            return None

    def _guard(self, function: Callable[..., None]) -> Callable[..., None]:
        """A hook that does nothing once capture is over, and whose failure stays here."""
        session = weakref.ref(self)

        @functools.wraps(function)
        def hook(*args: Any) -> None:
            alive = session()
            if alive is not None and alive._is_active and alive._is_recording:
                alive._safely("record a backward call", function, *args)

        return hook

    def _failed(self, what: str, error: Exception) -> None:
        self._num_failures += 1
        is_disk = isinstance(error, OSError)
        if is_disk:
            self._is_broken, self._is_recording = True, False
        why = f"{type(error).__name__}: {error}"
        try:
            with self._lock:
                self._sink.note(LedgerEntry(what=what, why=why, step=self._step))
        except Exception:
            is_disk = True
        if self._num_failures > 1:
            return
        rest = (
            "recording has stopped; what was written stays readable"
            if is_disk
            else "the rest is recorded, and the ledger of the run has the details"
        )
        text = f"ulpscope could not {what} ({why}). Training goes on unchanged; {rest}."
        try:
            warnings.warn(text, CaptureWarning, stacklevel=2)
        except Warning:
            print(text, file=sys.stderr)

    # ---- calls

    def open_call(
        self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, level: Level = "api", depth: int = 2
    ) -> _OpenCall | None:
        """Take down what is known before a call; None where it is not recorded."""
        if not self.is_recording:
            return None
        frame = caller(depth)
        if level == "api" and is_own_business(frame):
            return None
        return self._safely(f"record the inputs of {op}", self._open, op, args, kwargs, level)  # type: ignore[no-any-return]

    def close_call(self, opened: _OpenCall, result: Any) -> None:
        """Take down what a call returned."""
        self._safely(f"record the outputs of {opened.op}", self._close_call, opened, result)

    def _open(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], level: Level) -> _OpenCall | None:
        in_backward = graph_task() != -1
        recompute = in_backward and is_recompute()
        if in_backward and not recompute and level != "op":
            return None
        self._begin_writing()
        arguments, found = encode_arguments(args, kwargs)
        module, stack, phase = self._place(level, in_backward and not recompute)
        call = self._name(op, module, recompute) if found else None
        if call is not None and not self._selection.wants_call(module, call):
            return None
        wants_forward = self._selection.wants_phase(phase)
        return _OpenCall(
            op=op,
            level=level,
            call=call,
            module=module,
            parent=self._parent(),
            arguments=arguments,
            modes=surrounding_modes(found, self._modules.running),
            stack=stack,
            recompute=recompute,
            found=found,
            versions=[_version(tensor) for _, tensor in found],
            inputs=self._records(found) if wants_forward else [],
            edges=edges_of(found) if torch.is_grad_enabled() and level != "op" and not inside_transform() else None,
            phase=phase,
        )

    def _place(self, level: Level, in_backward: bool) -> tuple[str, tuple[Frame, ...], Phase]:
        """Module, stack and phase of a call; an op of the backward pass stands where its forward op stood."""
        if level != "op":
            return self._modules.current, self._stacks.read(), "forward"
        if in_backward:
            node = current_node()
            module, stack = self._makers.get(sequence_number(node), ("", ())) if node is not None else ("", ())
            return module, stack, "backward"
        module, stack = self._modules.current, self._stacks.read()
        if torch.is_grad_enabled():
            self._makers[next_sequence_number() - 1] = (module, stack)
        return module, stack, "forward"

    def _close_call(self, opened: _OpenCall, result: Any) -> None:
        results = tensors_in(result, "output")
        if opened.call is None:
            if not results:
                return
            opened.call = self._name(opened.op, opened.module, opened.recompute)
            if not self._selection.wants_call(opened.module, opened.call):
                return
        mutated = self._mutated(opened, results)
        if makes_no_values(opened.op):
            for _, tensor in results:
                self._tensors.mark_undefined(tensor)
        if self._selection.wants_phase(opened.phase):
            slots = opened.inputs + self._records(results) + self._records(mutated)
            self._emit(opened, opened.phase, slots)
        if opened.edges is not None and self._selection.wants_phase("backward"):
            self._watch(opened, results + mutated)

    def _watch(self, opened: _OpenCall, results: list[Found]) -> None:
        assert opened.edges is not None
        # What outlives the call must hold neither its tensors nor its nodes.
        bare = _OpenCall(
            op=opened.op,
            level=opened.level,
            call=opened.call,
            module=opened.module,
            parent=opened.parent,
            arguments=Arguments(),
            modes=opened.modes,
            stack=opened.stack,
            recompute=opened.recompute,
            found=[],
            versions=[],
            inputs=[],
            edges=None,
        )

        def finish(inputs: dict[Slot, Any], outputs: dict[Slot, Any]) -> None:
            self._begin_writing()
            slots = [
                record
                for _, record in (*sorted(inputs.items(), key=_slot_order), *sorted(outputs.items(), key=_slot_order))
                if self._selection.wants_slot(record.slot)
            ]
            self._emit(bare, "backward", slots)

        watch_backward(BackwardOfCall(self._tensors_record, finish, self._guard, self._begun), opened.edges, results)

    def _mutated(self, opened: _OpenCall, results: list[Found]) -> list[Found]:
        """The arguments that the call wrote to and did not return, as results of their own."""
        returned = {id(tensor) for _, tensor in results}
        mutated: list[Found] = []
        for (slot, tensor), version in zip(opened.found, opened.versions, strict=True):
            if version is not None and _version(tensor) != version:
                self._tensors.forget_storage(tensor)
                if id(tensor) not in returned:
                    returned.add(id(tensor))
                    mutated.append((Slot("mutated", slot.path), tensor))
        return mutated

    def _records(self, found: list[Found]) -> list[TensorRecord]:
        return [self._tensors_record(slot, tensor) for slot, tensor in found if self._selection.wants_slot(slot)]

    def _tensors_record(self, slot: Slot, tensor: torch.Tensor) -> TensorRecord:
        with self._lock:
            return self._tensors.record(slot, tensor)

    def _name(self, op: str, module: str, recompute: bool) -> CallName:
        """A recomputed call has the name of the call that it repeats."""
        known = self._indices[module, op]
        if recompute:
            position = self._recomputed[module, op]
            self._recomputed[module, op] += 1
            if position < len(known):
                return CallName(op, known[position])
        index = self._counts[op]
        self._counts[op] += 1
        known.append(index)
        return CallName(op, index)

    def _parent(self) -> str:
        stack = getattr(self._parents, "stack", None)
        return stack[-1] if stack else ""

    def _emit(self, opened: _OpenCall, phase: Phase, slots: list[TensorRecord]) -> None:
        assert opened.call is not None
        with self._lock:
            record = CallRecord(
                rank=self._rank,
                step=self._step,
                order=self._order,
                call=opened.call,
                phase=phase,
                level=opened.level,
                module=opened.module,
                parent=opened.parent,
                arguments=opened.arguments,
                modes=opened.modes,
                slots=tuple(slots),
                stack=opened.stack,
                recompute=opened.recompute,
            )
            self._order += 1
            self._sink.write(record)

    def _emit_state(
        self, op: str, phase: Phase, found: list[Found], arguments: Arguments | None = None, records: list[TensorRecord] | None = None
    ) -> None:
        with self._lock:
            call = CallName(op, self._counts[op])
            self._counts[op] += 1
            slots = (records or []) + self._records(found)
            self._sink.write(
                CallRecord(
                    rank=self._rank,
                    step=self._step,
                    order=self._order,
                    call=call,
                    phase=phase,
                    level="state",
                    arguments=arguments,
                    slots=tuple(slots),
                    stack=self._stacks.read() if phase == "optimizer" else (),
                )
            )
            self._order += 1

    def _begin_writing(self) -> None:
        """Open the step in the store with the first thing there is to write."""
        if self._is_written:
            return
        with self._lock:
            if self._is_written:
                return
            self._sink.begin_step(self._step)
            self._is_written = True
            if self._selection.wants_phase("start"):
                self._emit_state("state.rng", "start", [], Arguments(kwargs=random_generators()))

    # ---- what the patches call

    def _around_module(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording:
            return original(module, *args, **kwargs)
        is_outermost = self._modules.is_empty()
        is_compiled = _is_compiled(module)
        is_opaque = is_compiled or (isinstance(self._mode, ApiMode) and bool(self._safely("look at a module", _has_fast_path, module)))
        self._modules.enter(module)
        opened = None
        pushed = False
        try:
            if is_outermost and graph_task() == -1:
                self._safely("record the state of the model", self._describe_model, module, args, kwargs)
            if is_opaque or self._level in ("module", "both"):
                opened = self.open_call(f"module.{type(module).__name__}", args, kwargs, level="module")
                if opened is not None:
                    self._safely("look at the parameters of a module", self._add_parameters, opened, module)
                    pushed = self._push_parent(str(opened.call))
            if is_compiled:
                self._safely("write a note", self._note_compiled, module)
            result = self._call_unseen(original, module, args, kwargs) if is_opaque else original(module, *args, **kwargs)
        finally:
            if pushed:
                self._parents.stack.pop()
            if opened is None:
                self._modules.leave(module)
        if opened is not None:
            self._modules.leave(module)
            self.close_call(opened, result)
        return result

    def _push_parent(self, name: str) -> bool:
        if not hasattr(self._parents, "stack"):
            self._parents.stack = []
        self._parents.stack.append(name)
        return True

    def _add_parameters(self, opened: _OpenCall, module: torch.nn.Module) -> None:
        if opened.edges is None:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                opened.edges.leaves.setdefault(id(parameter), Slot("parameter", (name,)))

    def _note_compiled(self, module: torch.nn.Module) -> None:
        path = self._modules.current or type(module).__name__
        self._sink.note(LedgerEntry(what=f"see the calls inside {path}", why="it is compiled by torch.compile", step=self._step))

    def _call_unseen(self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module without our mode, where the mode's presence alone would change what it computes."""
        self._is_recording = False
        removed = remove_mode(self._mode) if self._mode is not None else False
        try:
            return original(module, *args, **kwargs)
        finally:
            if removed and self._mode is not None:
                self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._is_recording = self._is_active and not self._is_broken

    def _describe_model(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._selection.wants_phase("start") or next(module.parameters(), None) is None:
            return
        self._begin_writing()
        if id(module) not in self._described:
            self._described.add(id(module))
            found: list[Found] = [(Slot.parse(f"parameter.{name}"), tensor) for name, tensor in self._modules.named_parameters(module)]
            found += [(Slot.parse(f"buffer.{name}"), tensor) for name, tensor in self._modules.named_buffers(module)]
            self._emit_state("state.parameters", "start", found)
        arguments, batch = encode_arguments(args, kwargs)
        self._emit_state("state.batch", "start", batch, arguments)

    def _around_function(self, apply: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._level not in ("api", "both") or cls.__module__.startswith("torch."):
            return apply(*args, **kwargs)
        opened = self.open_call(f"Function.{cls.__qualname__}", args, kwargs)
        if opened is None:
            return apply(*args, **kwargs)
        pushed = self._push_parent(str(opened.call)) if opened.call is not None else False
        try:
            result = apply(*args, **kwargs)
        finally:
            if pushed:
                self._parents.stack.pop()
        self.close_call(opened, result)
        return result

    def _around_collective(self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = self.open_call(f"distributed.{name}", args, kwargs) if self._level in ("api", "both") else None
        result = original(*args, **kwargs)
        if opened is not None:
            self._safely(f"record the outputs of {opened.op}", self._close_collective, opened, result)
        return result

    def _close_collective(self, opened: _OpenCall, result: Any) -> None:
        """Collectives write into their arguments without telling autograd; an asynchronous one has not written yet."""
        if opened.call is None:
            return
        written: list[Found] = []
        for slot, tensor in opened.found:
            self._tensors.forget_storage(tensor)
            written.append((Slot("mutated", slot.path), tensor))
        is_pending = hasattr(result, "wait")
        self._emit(opened, "forward", opened.inputs + ([] if is_pending else self._records(written)))

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_recording:
            return original(*args, **kwargs)
        try:
            if isinstance(self._mode, ApiMode) and not self._mode.is_on():
                with self._mode:
                    return original(*args, **kwargs)
            return original(*args, **kwargs)
        finally:
            if graph_task() == -1:
                self._safely("record the end of a backward pass", self._flush_backward)

    def _flush_backward(self) -> None:
        for backward in list(self._begun):
            backward.flush()

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._wants_optimizer(optimizer):
            self._safely("record the gradients of an optimizer", self._take_gradients, optimizer)

    def _wants_optimizer(self, optimizer: Any) -> bool:
        return self.is_recording and self._selection.wants_phase("optimizer") and self._optimizers.wants(optimizer)

    def _take_gradients(self, optimizer: Any) -> None:
        self._begin_writing()
        self._optimizers.gradients[id(optimizer)] = self._records(self._optimizers.gradients_of(optimizer))

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._wants_optimizer(optimizer):
            self._safely("record an optimizer", self._describe_optimizer, optimizer)
        self._tensors.forget()
        if self._find_steps and self._is_active and threading.get_ident() == self._thread:
            if self._clock is None:
                self._clock = weakref.ref(optimizer)
            if self._clock() is optimizer:
                self.step()

    def _describe_optimizer(self, optimizer: Any) -> None:
        self._tensors.forget()
        gradients = self._optimizers.gradients.pop(id(optimizer), [])
        found = self._optimizers.results_of(optimizer)
        arguments = Arguments(kwargs=self._optimizers.hyper_parameters(optimizer))
        self._emit_state(f"optimizer.{type(optimizer).__name__}", "optimizer", found, arguments, gradients)

    def _around_scaler(self, original: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        step = self._step
        result = original(scaler, optimizer, *args, **kwargs)
        if self._find_steps and self._is_active and self._step == step and (self._clock is None or self._clock() is optimizer):
            self._safely("write a note", self._sink.note, LedgerEntry(what="see an optimizer step", why="GradScaler skipped it", step=step))
            self.step()
        return result


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _slot_order(item: tuple[Slot, Any]) -> str:
    return str(item[0])


def _has_fast_path(module: torch.nn.Module) -> bool:
    """Whether a module would use a fused kernel that it gives up when any torch function mode is active."""
    if module.training or not isinstance(module, _FUSED):
        return False
    return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in module.parameters())


def _is_compiled(module: torch.nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _deactivate_in_child() -> None:
    """A forked worker has no business with its parent's run."""
    for session in list(_SESSIONS):
        session._is_active = session._is_recording = False


os.register_at_fork(after_in_child=_deactivate_in_child)
