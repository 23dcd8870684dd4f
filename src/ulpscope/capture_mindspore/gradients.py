# SPDX-License-Identifier: Apache-2.0
"""The backward half of calls: what enters by hooks on results, what a call contributes by a second run of its own.

A hook on a result changes nothing bitwise. A node put in front of an input would: it changes the order in which gradients are added. So
what a call contributes to its inputs is computed by itself once the backward pass is over, by `ms.vjp` of that one call, on copies of its
inputs and from the gradient that entered it. Until then its inputs are held, up to a limit of bytes. The second run has to return the same
bits as the first; where it does not, or must not be done, the slot says so and so does the ledger.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy.typing as npt

from ulpscope.capture_mindspore.arguments import Found, tensors_in
from ulpscope.capture_mindspore.framework import array_of, dtype_name, requires_grad, tensor_of
from ulpscope.capture_mindspore.reading import TensorReader, fingerprint_of
from ulpscope.model import CallName, Frame, Level, Modes, Slot, TensorRecord

__all__ = ["Again", "BackwardCall", "Gradients"]

Again = Callable[[Callable[[Any], Any]], Any]
"""Runs a call once more, each of its tensors replaced by what the function that is given says for it."""


@dataclass(slots=True, kw_only=True)
class BackwardCall:
    """A call that may be differentiated: how its records are named, what it takes, and what entered it so far.

    `targets` are its tensors, each with the slot that its gradient gets, its fingerprint when the call began, and whether it has one.
    `again` is None where the call cannot be run a second time, and `refusal` says why.
    """

    name: CallName
    level: Level
    module: str
    parent: str
    recorded_as: str
    modes: Modes
    stack: tuple[Frame, ...]
    targets: list[tuple[Slot, Any, str | None, bool]]
    again: Again | None
    refusal: str = ""
    outputs: dict[int, str | None] = field(default_factory=dict)
    entered: dict[int, TensorRecord] = field(default_factory=dict)
    gradients: dict[int, npt.NDArray[Any]] = field(default_factory=dict)

    def release(self) -> None:
        """Hold no tensor any longer."""
        self.targets, self.again = [], None
        self.gradients.clear()


class Gradients:
    """The calls of a step that wait for a backward pass. `complain(why, call)` writes down what could not be computed."""

    def __init__(self, reader: TensorReader, held_bytes: int, complain: Callable[[str, BackwardCall], None]) -> None:
        self._reader = reader
        self._most_bytes = held_bytes
        self._complain = complain
        self._num_bytes = 0
        self._held: set[int] = set()
        self._waiting: list[BackwardCall] = []
        self._reached: dict[int, BackwardCall] = {}
        self._guard: Callable[..., Any] = lambda what, function, *args: function(*args)

    def guard_with(self, guard: Callable[..., Any]) -> None:
        """Have hooks run inside `guard(what, function, *args)`."""
        self._guard = guard

    def watch(self, call: BackwardCall, results: list[Found], fingerprints: list[str | None]) -> None:
        """Hook the results of a call, and hold what it takes to run it again."""
        hooked = [(number, tensor) for number, (_, tensor) in enumerate(results) if requires_grad(tensor)]
        if not hooked:
            return
        for number, tensor in hooked:
            call.outputs[number] = fingerprints[number]
            tensor.register_hook(self._hook(call, number, results[number][0]))
        if call.again is not None and not self._hold(call):
            call.refusal = f"its inputs are not held: the limit of {self._most_bytes} bytes is reached"
            call.again = None
        if call.again is None:
            call.targets = [(slot, _Shape.of(tensor), text, wanted) for slot, tensor, text, wanted in call.targets]
        self._waiting.append(call)

    def _hold(self, call: BackwardCall) -> bool:
        new = {id(tensor): tensor for _, tensor, _, _ in call.targets if id(tensor) not in self._held}
        size = sum(tensor.nbytes for tensor in new.values())
        if self._num_bytes + size > self._most_bytes:
            return False
        self._num_bytes += size
        self._held.update(new)
        return True

    def _hook(self, call: BackwardCall, number: int, slot: Slot) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            if gradient is not None:
                self._guard(f"record the gradient that enters {call.name}", self._enter, call, number, slot, gradient)

        return hook

    def _enter(self, call: BackwardCall, number: int, slot: Slot, gradient: Any) -> None:
        call.entered[number] = self._reader.read(Slot("input", slot.path), gradient)
        if call.again is not None:
            array = array_of(gradient).copy()
            self._num_bytes += array.nbytes
            if self._num_bytes > self._most_bytes:
                call.refusal = f"the gradient that entered it is not held: the limit of {self._most_bytes} bytes is reached"
                call.again = None
            call.gradients[number] = array
        self._reached.pop(id(call), None)  # the last gradient to come says when the call's turn was
        self._reached[id(call)] = call

    def finish(self) -> Iterator[tuple[BackwardCall, list[TensorRecord]]]:
        """After a backward pass: each call that it reached, in the order in which it did, with the slots of its backward record."""
        state = ms.get_rng_state()
        try:
            for call in list(self._reached.values()):
                yield call, [*(call.entered[number] for number in sorted(call.entered)), *self._contributed(call)]
        finally:
            ms.set_rng_state(state)
            self.forget()

    def forget(self) -> None:
        """Hold nothing any longer."""
        for call in self._waiting:
            call.release()
        self._waiting.clear()
        self._reached.clear()
        self._held.clear()
        self._num_bytes = 0

    def _contributed(self, call: BackwardCall) -> list[TensorRecord]:
        wanted = [(slot, tensor) for slot, tensor, _, is_wanted in call.targets if is_wanted]
        if not wanted:
            return []
        try:
            found = None if call.again is None else _second_run(call)
        except Exception as error:
            call.refusal, found = f"the second run failed ({type(error).__name__}: {str(error).strip().splitlines()[0][:200]})", None
        if found is None:
            self._complain(call.refusal, call)
            note = f"not computed: {call.refusal}"
            return [TensorRecord(slot=slot, dtype=dtype_name(one), shape=tuple(one.shape), device="cpu", note=note) for slot, one in wanted]
        return [self._reader.read(slot, gradient) for (slot, _), gradient in zip(wanted, found, strict=True)]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What is left of a tensor that is not held."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> _Shape:
        return cls(dtype_name(tensor), tuple(tensor.shape))


def _second_run(call: BackwardCall) -> list[Any] | None:
    """What a call contributes to the inputs that have a gradient; None, with the refusal written into the call, where that is not exact."""
    fresh: list[Any] = []
    for _, tensor, text, _ in call.targets:
        array = array_of(tensor).copy()
        if text is None or fingerprint_of(array) != text:
            call.refusal = "an input was written to after the call began"
            return None
        fresh.append(tensor_of(array))
    wanted = [number for number, target in enumerate(call.targets) if target[3]]
    reached = sorted(call.gradients)

    def run(*inputs: Any) -> Any:
        given = list(fresh)
        for number, one in zip(wanted, inputs, strict=True):
            given[number] = one
        turns: defaultdict[int, deque[Any]] = defaultdict(deque)
        for (_, tensor, _, _), one in zip(call.targets, given, strict=True):
            turns[id(tensor)].append(one)
        assert call.again is not None
        result = call.again(lambda tensor: _next(turns, tensor))
        results = tensors_in(result, "output")
        chosen = tuple(results[number][1] for number in reached)
        return chosen if len(chosen) > 1 else chosen[0]

    outputs, backward = ms.vjp(run, *(fresh[number] for number in wanted))
    results = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if [fingerprint_of(array_of(one)) for one in results] != [call.outputs[number] for number in reached]:
        call.refusal = "a second run does not return the same bits"
        return None
    sens = tuple(tensor_of(call.gradients[number]) for number in reached)
    found = backward(sens if len(sens) > 1 else sens[0])
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _next(turns: dict[int, deque[Any]], tensor: Any) -> Any:
    """The stand-in for a tensor: the next of those for its slots, the last one again where it is asked for more often."""
    waiting = turns.get(id(tensor))
    if not waiting:
        return tensor
    return waiting.popleft() if len(waiting) > 1 else waiting[0]
