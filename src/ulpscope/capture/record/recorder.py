# SPDX-License-Identifier: Apache-2.0
"""Turn calls into records: arguments, results, place in the program, and the backward side.

Nothing here is guarded: the session, which owns the user's program, catches failures.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from ulpscope.capture.device.queue import Devices
from ulpscope.capture.device.values import Values
from ulpscope.capture.intercept.modules import ModuleStack
from ulpscope.capture.intercept.naming import may_write
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.flights import Flight, Flights
from ulpscope.capture.record.holding import Outbox
from ulpscope.capture.record.observing import UNNAMED, Observer, OpenCall
from ulpscope.capture.record.stacks import TORCH_FILES
from ulpscope.capture.record.state import ModeRow, random_generators
from ulpscope.capture.record.taking import Taken
from ulpscope.capture.record.tensor_reader import Keep, TensorReader
from ulpscope.capture.torch_internals import (
    asynchronous_memory,
    current_node,
    is_coalescing,
    is_stream_capturing,
    is_work_registered,
    next_sequence_number,
    sequence_number,
)
from ulpscope.capture.walk import Found, tensors_in
from ulpscope.model import Arguments, CallName, Frame, FrameSink, LedgerEntry, Level, Phase, Sink, Slot, abilities_of
from ulpscope.model.operations.unwritten import OVERWRITTEN
from ulpscope.recording.selection import Selection
from ulpscope.recording.stacks import StackReader

__all__ = ["CallRecorder", "OpenCall"]

_STACK_DEPTH = 12
_NO_MODES: ModeRow = (None, True, False, None, False)


class CallRecorder(Observer):
    """Names calls, reads their tensors and writes their records; one for each session.

    `session` returns the session while it lives: hooks ask it whether they are still wanted, and report failures to it. `boundary` is the
    code of the function that stands around every call of a module. With `is_patient`, tensors on a device are read some calls later, which
    requires that every call that may write to one is announced (`before`); without, at once.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        rank: int,
        keep: Keep,
        selection: Selection,
        modules: ModuleStack,
        session: Callable[[], Any],
        boundary: CodeType | None = None,
        is_patient: bool = False,
        devices: Devices | None = None,
    ) -> None:
        super().__init__()
        self.session = session
        abilities = abilities_of(sink)
        self._sink_lock = contextlib.nullcontext() if abilities.is_thread_safe else threading.RLock()
        store = self._store if keep == "tensors" else None
        self._devices = devices or Devices(
            statistics=keep != "fingerprint", complain=self._complain, store=store, keeps_views=abilities.keeps_views
        )
        self.tensors = TensorReader(keep, self._store, self._devices, keeps_views=abilities.keeps_views)
        self._sink = sink
        self._keeps_tensors = keep == "tensors"
        self._shows_overwritten = abilities.shows_overwritten
        self.takes_rows = isinstance(sink, FrameSink)
        self._outbox = Outbox(sink, rank, self._devices, self._sink_lock)
        self._selection = selection
        self._modules = modules
        self.is_patient = is_patient
        self._stacks = StackReader(_STACK_DEPTH, foreign=TORCH_FILES, boundary=boundary, running=modules.all_running)
        self.lock: contextlib.AbstractContextManager[Any] = threading.RLock() if COMPILED is None else COMPILED.Lock()
        self._local = threading.local()
        self.begun = {}
        self.num_functions = 0
        """The number of autograd.Functions of the user's that are running."""
        self._wants_forward = selection.wants_phase("forward")
        self._wants_backward = selection.wants_phase("backward")
        self._generators: dict[str, Any] = {}
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
            self._indices: dict[tuple[str, str], int | list[int]] = {}
            self._recomputed: dict[tuple[str, str], int] = defaultdict(int)
            self._makers: dict[int, tuple[str, tuple[Frame, ...]]] = {}
            self.tensors.forget()
            self.tensors.flights.end(self.tensors.flights.find(_is_done))
            self._selection.begin_step()
            self._picks_calls = bool(self._selection.names or self._selection.without)
            self._picks_slots = bool(self._selection.slots)

    def begin_writing(self) -> None:
        """Open the step in the store, when there is something to write for the first time."""
        if self.has_written:
            return
        with self.lock:
            if self.has_written:
                return
            step = self._step
            self._outbox.run(lambda: self._sink.begin_step(step))
            self.has_written = True
        self._generators = random_generators()
        if self._selection.wants_phase("start"):
            self.write_state("state.rng", "start", [], Arguments(kwargs=self._generators))

    def write_end(self, found: list[Found]) -> None:
        """Write what changed since the start of the step: these buffers, and the random generators."""
        generators = random_generators()
        if found or generators != self._generators:
            self.write_state("state.end", "end", found, Arguments(kwargs=generators))

    def end_step(self, on_end: Callable[[], None] | None = None) -> None:
        """Close the step in the store, once all its records are written, and then call `on_end`.

        It waits for no device, unless tensors are kept: those of the next step must not come into this one.
        """
        with self.lock:
            self._give_up_flights()
            self._devices.send()
            self._outbox.settle(wait=self._keeps_tensors)
            self._outbox.run(self._sink.end_step)
            if on_end is not None:
                self._outbox.run(on_end)

    def finish(self) -> None:
        """Wait for every device, and write everything."""
        with self.lock:
            try:
                self._give_up_flights()
                self._outbox.settle(wait=True)
            finally:
                self._devices.close()

    @property
    def devices(self) -> Devices:
        return self._devices

    @property
    def has_devices(self) -> bool:
        """Tell whether tensors of an accelerator were seen."""
        return self._devices.has_any

    @property
    def is_pending(self) -> bool:
        """Tell whether a device has been given a tensor that it has not been told to read."""
        return self._devices.num_pending > 0

    def before(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let devices read their tensors before a call that may write to one."""
        if self._devices.num_pending and may_write(op, args, kwargs):
            self.read_all()

    def read_all(self) -> None:
        """Let the devices read the tensors they were given, before somebody writes to them, and write the records that are complete
        meanwhile.
        """
        with self.lock:
            self._devices.flush()
            self._outbox.settle()

    def flush_backward(self) -> None:
        """Write the gradients that have come in backward passes that did not run every node."""
        for backward in list(self.begun):
            backward.flush()
        self.read_all()

    def forget(self) -> None:
        self.begun.clear()
        self.tensors.forget()

    def forget_all(self, arguments: tuple[Any, ...]) -> None:
        """Forget the values of every tensor in these arguments."""
        for _, tensor in tensors_in(arguments, "input"):
            self.tensors.forget_storage(tensor)

    def forget_buffers(self, arguments: tuple[Any, ...]) -> None:
        """Forget the values of the tensors without gradients in these arguments: a Function may write to them unseen, as batch norms do."""
        for _, tensor in tensors_in(arguments, "input"):
            if not tensor.requires_grad:
                self.tensors.forget_storage(tensor)

    def lend(self, arguments: tuple[Any, ...]) -> None:
        """Note that memory is handed out: its unwritten elements may be written to unseen."""
        self.tensors.lend([tensor for _, tensor in tensors_in(arguments, "input")])

    def close_collective(self, opened: OpenCall, written: list[torch.Tensor] | None) -> None:
        """Record a collective with the tensors that it writes to without telling autograd: `written` if it is under way, else all
        arguments.
        """
        if opened.index == UNNAMED:
            return
        found = opened.found
        self.tensors.lend([tensor for _, tensor in found])
        if written is None:
            for _, tensor in found:
                self.tensors.forget_storage(tensor)
        else:
            identities = {id(tensor) for tensor in written}
            found = [(slot, tensor) for slot, tensor in found if id(tensor) in identities]
        mutated = self.take([(Slot("mutated", slot.path), tensor) for slot, tensor in found])
        self._write(opened, "forward", opened.inputs + mutated, opened.arguments)

    def renew(self, arguments: tuple[Any, ...]) -> None:
        """Note that the tensors in these arguments were given new memory, which is not written yet."""
        for _, tensor in tensors_in(arguments, "input"):
            self.tensors.renew(tensor)

    def leave_out(self, opened: OpenCall, overwritten: list[torch.Tensor]) -> None:
        """Drop the values of inputs that a call writes over without reading them.

        A sink with `shows_overwritten` gets them all the same, as older tools showed them.
        """
        if self._shows_overwritten:
            return
        identities = {id(tensor) for tensor in overwritten}
        slots = {slot for slot, tensor in opened.found if id(tensor) in identities}
        for taken in opened.inputs if slots else ():
            if taken.slot in slots:
                taken.values = Values(note=OVERWRITTEN)

    def launch(self, op: str, tensors: list[torch.Tensor], handle: Any = None, *, group: Any = None, is_told: bool = False) -> Flight:
        """Follow a collective that has returned before it was done: it writes to these tensors until somebody has waited for it."""
        with self.lock:
            self.tensors.lend(tensors)
            for tensor in tensors:
                self.tensors.forget_storage(tensor)
            return self.tensors.flights.begin(op, tensors, handle, group=group, is_told=is_told)

    def land_with(self, handle: Any) -> None:
        """Read the results of a handle that the program has waited for."""
        self._land(self.tensors.flights.end_with(handle))

    def land_in(self, tensor: torch.Tensor) -> None:
        """Read the results of a functional collective in memory that the program has waited for."""
        self._land(self.tensors.flights.end_in(tensor))

    def land_on(self, tensors: list[torch.Tensor]) -> None:
        """Forget the old values of tensors that a finished collective has written to, and read those that waited for it."""
        for tensor in tensors:
            self._land(self.tensors.flights.end(self.tensors.flights.over(tensor)))
            self.tensors.forget_storage(tensor)

    def _land(self, flights: list[Flight]) -> None:
        if flights:
            with self.lock:
                self.tensors.land(flights)
                self._outbox.release()

    @property
    def flights(self) -> Flights:
        """Return the collectives under way."""
        return self.tensors.flights

    def _communicated(self, opened: OpenCall, results: list[Found]) -> None:
        """Follow a functional collective that was called by its operation."""
        if ".wait_tensor" in opened.op:
            for _, tensor in opened.found:
                self.land_in(tensor)
        else:
            self.launch(opened.op, [tensor for _, tensor in results if asynchronous_memory(tensor) is None])

    def _give_up_flights(self) -> None:
        """Stop waiting for collectives: what their memory holds when the step ends depends on chance."""
        flights = self.tensors.flights
        if not len(flights):
            return
        self._land(flights.end(flights.find(_is_over_unseen)))
        for op in sorted(flights.give_up()):
            self._complain(f"read what {op} received", "nobody had waited for it when the step ended")
        flights.end(flights.find(_is_done))

    def write_state(
        self, op: str, phase: Phase, found: list[Found], arguments: Arguments | None = None, taken: list[Taken] | None = None
    ) -> None:
        """Write state that is no call: parameters, a batch, random generators, an optimizer."""
        slots = (taken or []) + self.take(found)
        stack = self._stacks.read() if phase == "optimizer" else ()
        with self.lock:
            state = OpenCall(op, "state", phase, "", "", stack, False)
            state.index, state.modes = self._counts[op], _NO_MODES
            self._counts[op] += 1
            self._write(state, phase, slots, None if arguments is None else (arguments.args, arguments.kwargs))

    def enter_parent(self, name: str) -> None:
        """Let calls from here on stand inside the call of that name."""
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
        """Return module, stack and phase of a call; an operation of the backward pass stands where its forward operation stood."""
        if level == "op" and in_backward:
            node = current_node()
            module, stack = self._makers.get(sequence_number(node), ("", ())) if node is not None else ("", ())
            return module, stack, "backward"
        module, stack = self._modules.current, self._stacks.read(frame)
        if level == "op" and torch.is_grad_enabled():
            self._makers[next_sequence_number() - 1] = (module, stack)
        return module, stack, "forward"

    def _name_late(self, opened: OpenCall, results: list[Found]) -> bool:
        """Name a call without tensor arguments; tell whether it is recorded, which needs a tensor among its results."""
        if not results:
            return False
        opened.index = self._index(opened.op, opened.module, opened.recompute)
        return not self._picks_calls or self._wants_call(opened.module, opened.op, opened.index)

    def _wants_call(self, module: str, op: str, index: int) -> bool:
        return self._selection.wants_call(module, CallName(op, index))

    def _index(self, op: str, module: str, recompute: bool) -> int:
        """Return the index of a call; a recomputed call has the index of the call that it repeats."""
        key = (module, op)
        known = self._indices.get(key)
        if recompute:
            position = self._recomputed[key]
            self._recomputed[key] += 1
            indices = known if isinstance(known, list) else [] if known is None else [known]
            if position < len(indices):
                return indices[position]
        index = self._counts[op]
        self._counts[op] += 1
        if isinstance(known, list):
            known.append(index)
        else:  # most names come once in a module: thousands of lists of one number would be a burden
            self._indices[key] = index if known is None else [known, index]
        return index


def _is_over_unseen(flight: Flight) -> bool:
    """Tell whether a collective is done that somebody waited for unseen, if at all."""
    if flight.group is not None:
        return not is_coalescing(flight.group)
    return flight.asks and _is_done(flight)


def _is_done(flight: Flight) -> bool:
    """Tell whether a collective is over, as far as that can be asked without waiting."""
    if flight.handle is None:
        return flight.group is None and not is_work_registered()
    ask = getattr(flight.handle, "is_completed", None) or getattr(flight.handle, "done", None)
    is_on_host = all(tensor.is_cpu for *_, tensor in flight.memory)
    return ask is None or ((is_on_host or not is_stream_capturing()) and bool(ask()))
