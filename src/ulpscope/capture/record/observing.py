# SPDX-License-Identifier: Apache-2.0
"""Turn a call into its record: the steps that every call goes through. `recorder` does the rarer ones.

Nothing here is guarded: the session, which owns the user's program, catches failures. Two classes with the same interface, `PythonObserver`
and the compiled `Observer` (`_compiled.pyx`), give the same records; `Observer` is the one that this machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from ulpscope.capture.device.queue import Devices
from ulpscope.capture.intercept.modules import ModuleStack
from ulpscope.capture.intercept.naming import communicates, leaves_unwritten, makes_no_values, may_write, never_writes
from ulpscope.capture.native.compiled import COMPILED
from ulpscope.capture.record.backward import BackwardOfCall, edges_of, watch_backward
from ulpscope.capture.record.holding import Draft, Outbox
from ulpscope.capture.record.stacks import is_recompute
from ulpscope.capture.record.state import ModeRow, mode_row
from ulpscope.capture.record.taking import Taken
from ulpscope.capture.record.tensor_reader import TensorReader
from ulpscope.capture.torch_internals import graph_task, inside_transform
from ulpscope.capture.walk import Encoded, Found, slot_text, split_arguments, tensors_in
from ulpscope.model import Frame, Level, Phase, Slot
from ulpscope.recording.selection import Selection

__all__ = ["UNNAMED", "Observer", "OpenCall", "PythonObserver", "RareCalls"]

UNNAMED = -1
_NOTHING: list[Any] = []


class OpenCall(msgspec.Struct, gc=False):
    """A call that has begun and not returned. Its index is `UNNAMED` until it has a name: a call without tensors may not get one."""

    op: str
    level: Level
    phase: Phase
    module: str
    parent: str
    stack: tuple[Frame, ...]
    recompute: bool
    modes: ModeRow | None = None
    arguments: Encoded | None = None
    index: int = UNNAMED
    found: list[Found] = []
    versions: list[int | None] = []
    inputs: list[Taken] = []
    edges: Any = None
    written: frozenset[int | str] = frozenset()
    given: Any = None  # the arguments themselves, kept while unwritten memory is known

    @property
    def name(self) -> str | None:
        return f"{self.op}.{self.index}" if self.index != UNNAMED else None

    def let_go(self) -> None:
        """Keep the identity of the call, and neither tensors nor graph nodes: the backward side outlives it."""
        self.found = self.inputs = self.versions = _NOTHING
        self.edges = self.arguments = self.given = None


class RareCalls(Protocol):
    """The rarer steps of a record, and the state that all steps share: `CallRecorder` has all of this."""

    session: Callable[[], Any]
    tensors: TensorReader
    lock: AbstractContextManager[Any]
    begun: dict[BackwardOfCall, None]
    is_patient: bool
    has_written: bool
    num_functions: int
    takes_rows: bool
    _devices: Devices
    _selection: Selection
    _modules: ModuleStack
    _outbox: Outbox
    _order: int
    _step: int
    _picks_calls: bool
    _picks_slots: bool
    _wants_forward: bool
    _wants_backward: bool

    def begin_writing(self) -> None: ...

    def read_all(self) -> None: ...

    def _parent(self) -> str: ...

    def _where(self, level: Level, in_backward: bool, frame: FrameType | None) -> tuple[str, tuple[Frame, ...], Phase]: ...

    def _name_late(self, opened: OpenCall, results: list[Found]) -> bool: ...

    def _communicated(self, opened: OpenCall, results: list[Found]) -> None: ...

    def _index(self, op: str, module: str, recompute: bool) -> int: ...

    def _wants_call(self, module: str, op: str, index: int) -> bool: ...


class PythonObserver(RareCalls):
    """Takes down the facts of a call and writes its record."""

    def _wants(self, phase: Phase) -> bool:
        return self._wants_forward if phase == "forward" else self._wants_backward

    def open(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], level: Level, frame: FrameType | None = None) -> OpenCall | None:
        """Take down the facts before a call; None if the call is not recorded. `frame` is the frame of the caller, if known."""
        opened = self._open(op, args, kwargs, level, frame)
        if self._devices.num_pending and level != "module" and may_write(op, args, kwargs):  # calls inside a module are announced
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
            if self._picks_calls and not self._wants_call(module, op, opened.index):
                return None
        if self.tensors.unwritten:
            opened.given = args, kwargs
        opened.versions = [None if tensor.is_inference() else tensor._version for _, tensor in found]
        if self._wants(phase):
            opened.inputs = self.take(found)
        if torch.is_grad_enabled() and level != "op" and not inside_transform():
            opened.edges = edges_of(found)
        return opened

    def close(self, opened: OpenCall, result: Any) -> None:
        """Take down the results of a call."""
        results = tensors_in(result, "output")
        if opened.index == UNNAMED and not self._name_late(opened, results):
            return
        mutated = self._mutated(opened, results)
        is_undefined = makes_no_values(opened.op)
        if communicates(opened.op):
            self._communicated(opened, results)
        if self.tensors.unwritten or leaves_unwritten(opened.op):
            self.tensors.follow(opened, results)
        if self._wants(opened.phase):
            slots = opened.inputs + self.take(results, is_undefined=is_undefined)
            if mutated:
                slots += self.take(mutated)
            self._write(opened, opened.phase, slots, opened.arguments)
        edges = opened.edges
        opened.let_go()
        if edges is not None and self._wants_backward:
            watch_backward(BackwardOfCall(self, opened), edges, results + mutated)
        if self.num_functions and self._devices.num_pending and not never_writes(opened.op):
            self.read_all()  # where the Function says that it wrote to a tensor, the version rises again after the write

    def take(self, found: list[Found], *, is_undefined: bool = False) -> list[Taken]:
        """Take down tensors; their values may come later."""
        if self._picks_slots:
            found = [(slot, tensor) for slot, tensor in found if self._selection.wants_slot(slot)]
        take = self.tensors.take
        with self.lock:
            if self.tensors.unwritten:
                self.tensors.prepare(found)
            taken = [take(slot, tensor, is_undefined=is_undefined) for slot, tensor in found]
            if not self.is_patient and self._devices.num_pending:
                self._devices.flush()
        return taken

    def _mutated(self, opened: OpenCall, results: list[Found]) -> list[Found]:
        """Return the arguments that the call wrote to and did not return, as results of their own."""
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


def _text(taken: Taken) -> str:
    return slot_text(taken.slot)


if TYPE_CHECKING or COMPILED is None:
    Observer = PythonObserver
else:
    OpenCall, Observer = COMPILED.OpenCall, COMPILED.Observer
