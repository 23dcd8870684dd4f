# SPDX-License-Identifier: Apache-2.0
"""From calls to records: what a call was given, what it returned, where it stands, and what its backward side did.

Nothing here is guarded: what fails is caught by the session, which owns the user's program.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch

from ulpscope.capture.backward import BackwardOfCall, edges_of, take_gradients, watch_backward
from ulpscope.capture.calls import makes_no_values, may_write, never_writes
from ulpscope.capture.devices import Devices
from ulpscope.capture.holding import Draft, Outbox
from ulpscope.capture.modules import ModuleStack
from ulpscope.capture.selection import Selection
from ulpscope.capture.stacks import StackReader, is_recompute
from ulpscope.capture.state import ModeRow, mode_row, random_generators
from ulpscope.capture.tensors import Keep, Taken, TensorReader
from ulpscope.capture.torch_internals import current_node, graph_task, inside_transform, next_sequence_number, sequence_number
from ulpscope.capture.walk import Encoded, Found, split_arguments, tensors_in
from ulpscope.model import Arguments, CallName, Frame, LedgerEntry, Level, Phase, Sink, Slot

__all__ = ["CallRecorder", "OpenCall"]

_STACK_DEPTH = 12
_UNNAMED = -1
_NOTHING: list[Any] = []
_NO_MODES: ModeRow = (None, True, False, None, False)


class OpenCall(msgspec.Struct, gc=False):
    """A call that has begun and not returned. Its index is `_UNNAMED` until it has a name: a call without tensors may not get one."""

    op: str
    level: Level
    phase: Phase
    module: str
    parent: str
    stack: tuple[Frame, ...]
    recompute: bool
    modes: ModeRow | None = None
    arguments: Encoded | None = None
    index: int = _UNNAMED
    found: list[Found] = []
    versions: list[int | None] = []
    inputs: list[Taken] = []
    edges: Any = None
    written: frozenset[int | str] = frozenset()

    @property
    def name(self) -> str | None:
        return f"{self.op}.{self.index}" if self.index != _UNNAMED else None

    def let_go(self) -> None:
        """Keep what identifies the call, and neither tensors nor graph nodes: the backward side outlives it."""
        self.found = self.inputs = self.versions = _NOTHING
        self.edges = self.arguments = None


class CallRecorder:
    """Names calls, reads their tensors and writes their records; one for each session.

    `guard` wraps a hook so that its failure never reaches the autograd engine. `boundary` is the code of the function that stands around
    every call of a module. With `is_patient`, tensors on a device are read some calls later, which takes that whoever may write to one is
    announced (`before`); without, at once.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        rank: int,
        keep: Keep,
        selection: Selection,
        modules: ModuleStack,
        guard: Callable[[Callable[..., None]], Callable[..., None]],
        boundary: CodeType | None = None,
        is_patient: bool = False,
        devices: Devices | None = None,
    ) -> None:
        self._sink_lock = contextlib.nullcontext() if getattr(sink, "is_thread_safe", False) else threading.RLock()
        store = self._store if keep == "tensors" else None
        self._devices = devices or Devices(
            statistics=keep != "fingerprint", complain=self._complain, store=store, keeps_views=getattr(sink, "keeps_views", False)
        )
        self.tensors = TensorReader(keep, self._store, self._devices, keeps_views=getattr(sink, "keeps_views", False))
        self._sink = sink
        self._keeps_tensors = keep == "tensors"
        self._outbox = Outbox(sink, rank, self._devices, self._sink_lock)
        self._selection = selection
        self._modules = modules
        self.is_patient = is_patient
        self._stacks = StackReader(_STACK_DEPTH, boundary=boundary, running=modules.all_running)
        self.lock: contextlib.AbstractContextManager[Any] = threading.RLock()
        self._local = threading.local()
        self.begun: dict[BackwardOfCall, None] = {}
        self.num_functions = 0
        """How many autograd.Functions of the user's are running."""
        self.on_gradients = guard(take_gradients)
        self.begin_step(0)

    def _complain(self, what: str, why: str) -> None:
        self._sink.note(LedgerEntry(what=what, why=why, step=self._step))

    def _store(self, dtype: str, shape: tuple[int, ...], buffer: Any) -> str | None:
        with self._sink_lock:
            return self._sink.keep(dtype, shape, buffer)

    def begin_step(self, step: int) -> None:
        with self.lock:
            self._step = step
            self._order = 0
            self.has_written = False
            self._counts: dict[str, int] = defaultdict(int)
            self._indices: dict[tuple[str, str], list[int]] = defaultdict(list)
            self._recomputed: dict[tuple[str, str], int] = defaultdict(int)
            self._makers: dict[int, tuple[str, tuple[Frame, ...]]] = {}
            self.tensors.forget()
            self._selection.begin_step()
            self._picks_calls = bool(self._selection.names or self._selection.without)
            self._picks_slots = bool(self._selection.slots)

    def begin_writing(self) -> None:
        """Open the step in the store with the first thing there is to write."""
        if self.has_written:
            return
        with self.lock:
            if self.has_written:
                return
            step = self._step
            self._outbox.run(lambda: self._sink.begin_step(step))
            self.has_written = True
        if self._selection.wants_phase("start"):
            self.write_state("state.rng", "start", [], Arguments(kwargs=random_generators()))

    def end_step(self, on_end: Callable[[], None] | None = None) -> None:
        """Close the step in the store, once everything of it is written, and then call `on_end`.

        It waits for no device, unless tensors are kept: those of the next step must not come into this one.
        """
        with self.lock:
            self._devices.send()
            self._outbox.settle(wait=self._keeps_tensors)
            self._outbox.run(self._sink.end_step)
            if on_end is not None:
                self._outbox.run(on_end)

    def finish(self) -> None:
        """Wait for every device, and write everything."""
        with self.lock:
            try:
                self._outbox.settle(wait=True)
            finally:
                self._devices.close()

    @property
    def has_devices(self) -> bool:
        """Whether tensors of an accelerator were seen."""
        return self._devices.has_any

    @property
    def is_pending(self) -> bool:
        """Whether a device has been given a tensor that it has not been told to read."""
        return self._devices.num_pending > 0

    def before(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Something is about to be called that may write to a tensor."""
        if self._devices.num_pending and may_write(op, args, kwargs):
            self.read_all()

    def read_all(self) -> None:
        """Let the devices read what they were given, before somebody writes to it, and write what has come meanwhile."""
        with self.lock:
            self._devices.flush()
            self._outbox.settle()

    def flush_backward(self) -> None:
        """Write what has come of backward passes that did not run every node."""
        for backward in list(self.begun):
            backward.flush()
        self.read_all()

    def forget(self) -> None:
        self.begun.clear()
        self.tensors.forget()

    def forget_all(self, arguments: tuple[Any, ...]) -> None:
        """Forget the values of every tensor in there."""
        for _, tensor in tensors_in(arguments, "input"):
            self.tensors.forget_storage(tensor)

    def open(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], level: Level, frame: FrameType | None = None) -> OpenCall | None:
        """Take down what is known before a call; None where it is not recorded. `frame` is where the call stands, if that is known."""
        opened = self._open(op, args, kwargs, level, frame)
        if self._devices.num_pending and level != "module" and may_write(op, args, kwargs):  # of a module each call inside is announced
            self.read_all()
        return opened

    def _open(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], level: Level, frame: FrameType | None) -> OpenCall | None:
        in_backward = graph_task() != -1
        recompute = in_backward and is_recompute()
        if in_backward and not recompute and level != "op":
            return None
        self.begin_writing()
        module, stack, phase = self._where(level, in_backward and not recompute, frame)
        opened = OpenCall(op, level, phase, module, self._parent(), stack, recompute)
        opened.arguments, found = split_arguments(args, kwargs)
        opened.found = found
        opened.modes = mode_row(found, self._modules.running)
        if found:
            opened.index = self._index(op, module, recompute)
            if self._picks_calls and not self._selection.wants_call(module, CallName(op, opened.index)):
                return None
        opened.versions = [None if tensor.is_inference() else tensor._version for _, tensor in found]
        if self._selection.wants_phase(phase):
            opened.inputs = self.take(found)
        if torch.is_grad_enabled() and level != "op" and not inside_transform():
            opened.edges = edges_of(found)
        return opened

    def close(self, opened: OpenCall, result: Any) -> None:
        """Take down what a call returned."""
        results = tensors_in(result, "output")
        if opened.index == _UNNAMED and not self._name_late(opened, results):
            return
        mutated = self._mutated(opened, results)
        is_undefined = makes_no_values(opened.op)
        if is_undefined:
            for _, tensor in results:
                self.tensors.mark_undefined(tensor)
        if self._selection.wants_phase(opened.phase):
            slots = opened.inputs + self.take(results, is_undefined=is_undefined)
            if mutated:
                slots += self.take(mutated)
            self._write(opened, opened.phase, slots, opened.arguments)
        edges = opened.edges
        opened.let_go()
        if edges is not None and self._selection.wants_phase("backward"):
            watch_backward(BackwardOfCall(self, opened), edges, results + mutated)
        if self.num_functions and self._devices.num_pending and not never_writes(opened.op):
            self.read_all()  # where the Function says that it wrote to a tensor, the version rises again after the write

    def close_collective(self, opened: OpenCall, result: Any) -> None:
        """Collectives write into their arguments without telling autograd; an asynchronous one has not written yet."""
        if opened.index == _UNNAMED:
            return
        for _, tensor in opened.found:
            self.tensors.forget_storage(tensor)
        is_pending = hasattr(result, "wait")
        written = [] if is_pending else self.take([(Slot("mutated", slot.path), tensor) for slot, tensor in opened.found])
        self._write(opened, "forward", opened.inputs + written, opened.arguments)

    def write_state(
        self, op: str, phase: Phase, found: list[Found], arguments: Arguments | None = None, taken: list[Taken] | None = None
    ) -> None:
        """Write what is not a call: parameters, a batch, random generators, an optimizer."""
        slots = (taken or []) + self.take(found)
        stack = self._stacks.read() if phase == "optimizer" else ()
        with self.lock:
            state = OpenCall(op, "state", phase, "", "", stack, False)
            state.index, state.modes = self._counts[op], _NO_MODES
            self._counts[op] += 1
            self._write(state, phase, slots, None if arguments is None else (arguments.args, arguments.kwargs))

    def take(self, found: list[Found], *, is_undefined: bool = False) -> list[Taken]:
        """Take down tensors; their values may come later."""
        if self._picks_slots:
            found = [(slot, tensor) for slot, tensor in found if self._selection.wants_slot(slot)]
        take = self.tensors.take
        with self.lock:
            taken = [take(slot, tensor, is_undefined=is_undefined) for slot, tensor in found]
            if not self.is_patient and self._devices.num_pending:
                self._devices.flush()
        return taken

    def enter_parent(self, name: str) -> None:
        """Calls from here on stand inside the call of that name."""
        self._parents().append(name)

    def leave_parent(self) -> None:
        self._parents().pop()

    def _parents(self) -> list[str]:
        try:
            return self._local.parents  # type: ignore[no-any-return]
        except AttributeError:
            self._local.parents = []
            return self._local.parents  # type: ignore[no-any-return]

    def _parent(self) -> str:
        parents = self._parents()
        return parents[-1] if parents else ""

    def _where(self, level: Level, in_backward: bool, frame: FrameType | None) -> tuple[str, tuple[Frame, ...], Phase]:
        """Module, stack and phase of a call; an operation of the backward pass stands where its forward operation stood."""
        if level == "op" and in_backward:
            node = current_node()
            module, stack = self._makers.get(sequence_number(node), ("", ())) if node is not None else ("", ())
            return module, stack, "backward"
        module, stack = self._modules.current, self._stacks.read(frame)
        if level == "op" and torch.is_grad_enabled():
            self._makers[next_sequence_number() - 1] = (module, stack)
        return module, stack, "forward"

    def _name_late(self, opened: OpenCall, results: list[Found]) -> bool:
        """Name a call that was given no tensor: worth a record only if it returned one."""
        if not results:
            return False
        opened.index = self._index(opened.op, opened.module, opened.recompute)
        return not self._picks_calls or self._selection.wants_call(opened.module, CallName(opened.op, opened.index))

    def _index(self, op: str, module: str, recompute: bool) -> int:
        """A recomputed call has the name of the call that it repeats."""
        known = self._indices[module, op]
        if recompute:
            position = self._recomputed[module, op]
            self._recomputed[module, op] += 1
            if position < len(known):
                return known[position]
        index = self._counts[op]
        self._counts[op] += 1
        known.append(index)
        return index

    def _mutated(self, opened: OpenCall, results: list[Found]) -> list[Found]:
        """The arguments that the call wrote to and did not return, as results of their own."""
        mutated: list[Found] = []
        returned: set[int] | None = None
        for (slot, tensor), version in zip(opened.found, opened.versions, strict=True):
            is_written = bool(opened.written) and slot.path[0] in opened.written
            if is_written or (version is not None and tensor._version != version):
                self.tensors.forget_storage(tensor)
                if returned is None:
                    returned = {id(result) for _, result in results}
                if id(tensor) not in returned:
                    returned.add(id(tensor))
                    mutated.append((Slot("mutated", slot.path), tensor))
        return mutated

    # ---- what the backward sides of calls need

    def read(self, slot: Slot, tensor: torch.Tensor) -> Taken:
        with self.lock:
            taken = self.tensors.take(slot, tensor)
            if not self.is_patient and self._devices.num_pending:
                self._devices.flush()
            return taken

    def finish_pass(self, call: OpenCall, inputs: list[Taken], outputs: list[Taken]) -> None:
        self.begin_writing()
        slots = (sorted(inputs, key=_text) if len(inputs) > 1 else inputs) + (sorted(outputs, key=_text) if len(outputs) > 1 else outputs)
        if self._picks_slots:
            slots = [taken for taken in slots if self._selection.wants_slot(taken.slot)]
        self._write(call, "backward", slots)

    def _write(self, call: OpenCall, phase: Phase, slots: list[Taken], arguments: Encoded | None = None) -> None:
        with self.lock:
            order = self._order
            self._order += 1
            self._outbox.write(
                Draft(
                    self._step,
                    order,
                    call.op,
                    call.index,
                    phase,
                    call.level,
                    call.module,
                    call.parent,
                    arguments,
                    call.modes,
                    slots,
                    call.stack,
                    call.recompute,
                )
            )


@lru_cache(maxsize=8192)
def _text_of(slot: Slot) -> str:
    return str(slot)


def _text(taken: Taken) -> str:
    return _text_of(taken.slot)
