# SPDX-License-Identifier: Apache-2.0
"""From calls to records: what a call was given, what it returned, where it stands, and what its backward side did.

Nothing here is guarded: what fails is caught by the session, which owns the user's program.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ulpscope.capture.backward import BackwardOfCall, Edges, edges_of, watch_backward
from ulpscope.capture.calls import makes_no_values
from ulpscope.capture.modules import ModuleStack
from ulpscope.capture.selection import Selection
from ulpscope.capture.stacks import StackReader, is_recompute
from ulpscope.capture.state import random_generators, surrounding_modes
from ulpscope.capture.tensors import Keep, TensorReader
from ulpscope.capture.torch_internals import current_node, graph_task, inside_transform, next_sequence_number, sequence_number
from ulpscope.capture.walk import Found, encode_arguments, tensors_in
from ulpscope.model import Arguments, CallName, CallRecord, Frame, Level, Modes, Phase, Sink, Slot, TensorRecord

__all__ = ["CallRecorder", "OpenCall"]

_STACK_DEPTH = 12


@dataclass(slots=True)
class _Place:
    """What identifies a call and outlives it: neither tensors nor graph nodes."""

    call: CallName
    level: Level
    module: str
    parent: str
    modes: Modes
    stack: tuple[Frame, ...]
    recompute: bool


@dataclass(slots=True)
class OpenCall:
    """A call that has begun and not returned. `place` is None until it has a name: a call without tensors may not get one."""

    op: str
    level: Level
    phase: Phase
    place: _Place | None
    unnamed: Callable[[CallName], _Place]
    arguments: Arguments
    found: list[Found]
    versions: list[int | None]
    inputs: list[TensorRecord]
    edges: Edges | None
    written: frozenset[int | str] = frozenset()

    @property
    def name(self) -> str | None:
        return str(self.place.call) if self.place is not None else None


class CallRecorder:
    """Names calls, reads their tensors and writes their records; one for each session.

    `guard` wraps a hook so that its failure never reaches the autograd engine.
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
    ) -> None:
        self.tensors = TensorReader(keep, sink.keep)
        self._sink = sink
        self._rank = rank
        self._selection = selection
        self._modules = modules
        self._guard = guard
        self._stacks = StackReader(_STACK_DEPTH)
        self._lock = threading.RLock()
        self._begun: set[BackwardOfCall] = set()
        self._local = threading.local()
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        with self._lock:
            self._step = step
            self._order = 0
            self.has_written = False
            self._counts: dict[str, int] = defaultdict(int)
            self._indices: dict[tuple[str, str], list[int]] = defaultdict(list)
            self._recomputed: dict[tuple[str, str], int] = defaultdict(int)
            self._makers: dict[int, tuple[str, tuple[Frame, ...]]] = {}
            self.tensors.forget()
            self._selection.begin_step()

    def begin_writing(self) -> None:
        """Open the step in the store with the first thing there is to write."""
        with self._lock:
            if self.has_written:
                return
            self._sink.begin_step(self._step)
            self.has_written = True
        if self._selection.wants_phase("start"):
            self.write_state("state.rng", "start", [], Arguments(kwargs=random_generators()))

    def flush_backward(self) -> None:
        """Write what has come of backward passes that did not run every node."""
        for backward in list(self._begun):
            backward.flush()

    def forget(self) -> None:
        self._begun.clear()
        self.tensors.forget()

    def forget_all(self, arguments: tuple[Any, ...]) -> None:
        """Forget the values of every tensor in there."""
        for _, tensor in tensors_in(arguments, "input"):
            self.tensors.forget_storage(tensor)

    def open(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], level: Level) -> OpenCall | None:
        """Take down what is known before a call; None where it is not recorded."""
        in_backward = graph_task() != -1
        recompute = in_backward and is_recompute()
        if in_backward and not recompute and level != "op":
            return None
        self.begin_writing()
        arguments, found = encode_arguments(args, kwargs)
        module, stack, phase = self._where(level, in_backward and not recompute)
        modes, parent = surrounding_modes(found, self._modules.running), self._parent()

        def place(call: CallName) -> _Place:
            return _Place(call, level, module, parent, modes, stack, recompute)

        call = self._name(op, module, recompute) if found else None
        if call is not None and not self._selection.wants_call(module, call):
            return None
        is_differentiable = torch.is_grad_enabled() and level != "op" and not inside_transform()
        return OpenCall(
            op=op,
            level=level,
            phase=phase,
            place=place(call) if call is not None else None,
            unnamed=place,
            arguments=arguments,
            found=found,
            versions=[_version(tensor) for _, tensor in found],
            inputs=self.records(found) if self._selection.wants_phase(phase) else [],
            edges=edges_of(found) if is_differentiable else None,
        )

    def close(self, opened: OpenCall, result: Any) -> None:
        """Take down what a call returned."""
        results = tensors_in(result, "output")
        place = opened.place or self._late_place(opened, results)
        if place is None:
            return
        mutated = self._mutated(opened, results)
        is_undefined = makes_no_values(opened.op)
        if is_undefined:
            for _, tensor in results:
                self.tensors.mark_undefined(tensor)
        if self._selection.wants_phase(opened.phase):
            made = self.records(results, is_undefined=is_undefined)
            self._write(place, opened.phase, opened.inputs + made + self.records(mutated), opened.arguments)
        if opened.edges is not None and self._selection.wants_phase("backward"):
            self._watch(place, opened.edges, results + mutated)

    def close_collective(self, opened: OpenCall, result: Any) -> None:
        """Collectives write into their arguments without telling autograd; an asynchronous one has not written yet."""
        if opened.place is None:
            return
        for _, tensor in opened.found:
            self.tensors.forget_storage(tensor)
        is_pending = hasattr(result, "wait")
        written = [] if is_pending else self.records([(Slot("mutated", slot.path), tensor) for slot, tensor in opened.found])
        self._write(opened.place, "forward", opened.inputs + written, opened.arguments)

    def write_state(
        self, op: str, phase: Phase, found: list[Found], arguments: Arguments | None = None, records: list[TensorRecord] | None = None
    ) -> None:
        """Write what is not a call: parameters, a batch, random generators, an optimizer."""
        slots = (records or []) + self.records(found)
        stack = self._stacks.read() if phase == "optimizer" else ()
        with self._lock:
            place = _Place(CallName(op, self._counts[op]), "state", "", "", Modes(), stack, False)
            self._counts[op] += 1
            self._write(place, phase, slots, arguments)

    def records(self, found: list[Found], *, is_undefined: bool = False) -> list[TensorRecord]:
        return [self._read(slot, tensor, is_undefined) for slot, tensor in found if self._selection.wants_slot(slot)]

    def enter_parent(self, name: str) -> None:
        """Calls from here on stand inside the call of that name."""
        self._parents().append(name)

    def leave_parent(self) -> None:
        self._parents().pop()

    def _parents(self) -> list[str]:
        if not hasattr(self._local, "parents"):
            self._local.parents = []
        return self._local.parents  # type: ignore[no-any-return]

    def _parent(self) -> str:
        parents = self._parents()
        return parents[-1] if parents else ""

    def _where(self, level: Level, in_backward: bool) -> tuple[str, tuple[Frame, ...], Phase]:
        """Module, stack and phase of a call; an operation of the backward pass stands where its forward operation stood."""
        if level == "op" and in_backward:
            node = current_node()
            module, stack = self._makers.get(sequence_number(node), ("", ())) if node is not None else ("", ())
            return module, stack, "backward"
        module, stack = self._modules.current, self._stacks.read()
        if level == "op" and torch.is_grad_enabled():
            self._makers[next_sequence_number() - 1] = (module, stack)
        return module, stack, "forward"

    def _late_place(self, opened: OpenCall, results: list[Found]) -> _Place | None:
        """The place of a call that was given no tensor: worth a record only if it returned one."""
        if not results:
            return None
        draft = opened.unnamed(CallName(opened.op, 0))
        place = replace(draft, call=self._name(opened.op, draft.module, draft.recompute))
        return place if self._selection.wants_call(place.module, place.call) else None

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

    def _mutated(self, opened: OpenCall, results: list[Found]) -> list[Found]:
        """The arguments that the call wrote to and did not return, as results of their own."""
        returned = {id(tensor) for _, tensor in results}
        mutated: list[Found] = []
        for (slot, tensor), version in zip(opened.found, opened.versions, strict=True):
            is_written = slot.path[0] in opened.written
            if is_written or (version is not None and _version(tensor) != version):
                self.tensors.forget_storage(tensor)
                if id(tensor) not in returned:
                    returned.add(id(tensor))
                    mutated.append((Slot("mutated", slot.path), tensor))
        return mutated

    def _watch(self, place: _Place, edges: Edges, results: list[Found]) -> None:
        def finish(inputs: dict[Slot, TensorRecord], outputs: dict[Slot, TensorRecord]) -> None:
            self.begin_writing()
            slots = [inputs[slot] for slot in sorted(inputs, key=str)] + [outputs[slot] for slot in sorted(outputs, key=str)]
            self._write(place, "backward", [record for record in slots if self._selection.wants_slot(record.slot)])

        watch_backward(BackwardOfCall(self._read, finish, self._guard, self._begun), edges, results)

    def _read(self, slot: Slot, tensor: torch.Tensor, is_undefined: bool = False) -> TensorRecord:
        with self._lock:
            return self.tensors.record(slot, tensor, is_undefined=is_undefined)

    def _write(self, place: _Place, phase: Phase, slots: list[TensorRecord], arguments: Arguments | None = None) -> None:
        with self._lock:
            record = CallRecord(
                rank=self._rank,
                step=self._step,
                order=self._order,
                call=place.call,
                phase=phase,
                level=place.level,
                module=place.module,
                parent=place.parent,
                arguments=arguments,
                modes=place.modes,
                slots=tuple(slots),
                stack=place.stack,
                recompute=place.recompute,
            )
            self._order += 1
            self._sink.write(record)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
