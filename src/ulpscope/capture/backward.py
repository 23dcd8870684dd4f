# SPDX-License-Identifier: Apache-2.0
"""The backward side of a call: what it received and what it contributed to each of its inputs.

A call owns the autograd nodes whose sequence numbers lie in the range that it used up. Hooks sit on those graph nodes, never on
leaves: nothing leaks and nothing has to be removed. A hook keeps no reference to a node or to a gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ulpscope.capture.torch_internals import ACCUMULATE_GRAD, blind, graph_task, next_sequence_number, sequence_number
from ulpscope.capture.walk import Found
from ulpscope.model import Slot

__all__ = ["BackwardOfCall", "Edges", "edges_of", "watch_backward"]


@dataclass(slots=True)
class Edges:
    """Where the gradients of a call's inputs leave it; taken before the call, since in-place calls move them."""

    nodes: dict[tuple[Any, int], Slot] = field(default_factory=dict)
    leaves: dict[int, Slot] = field(default_factory=dict)
    bases: set[int] = field(default_factory=set)
    first: int = 0


def edges_of(found: Iterable[Found]) -> Edges:
    """The gradient edges of the differentiable tensors among `found`, and the sequence number at which the call begins."""
    edges = Edges()
    bases: list[Found] = []
    for slot, tensor in found:
        if not tensor.requires_grad:
            continue
        node = tensor.grad_fn
        if node is None:
            edges.leaves.setdefault(id(tensor), slot)
        else:
            edges.nodes.setdefault((node, tensor.output_nr), slot)
        if tensor._base is not None and tensor._base.requires_grad:
            bases.append((slot, tensor._base))
    for slot, base in bases:
        edges.bases.add(id(base))
        if base.grad_fn is None:
            edges.leaves.setdefault(id(base), slot)
        else:
            edges.nodes.setdefault((base.grad_fn, base.output_nr), slot)
    edges.first = next_sequence_number()
    return edges


@dataclass(slots=True)
class _Pass:
    """One backward pass through one call."""

    events_left: int
    inputs: dict[Slot, Any] = field(default_factory=dict)
    outputs: dict[Slot, Any] = field(default_factory=dict)
    sums: dict[Slot, torch.Tensor] = field(default_factory=dict)
    parts_left: dict[Slot, int] = field(default_factory=dict)


class BackwardOfCall:
    """Collects the gradients of one call, pass by pass, and hands over each finished pass.

    `read` turns a gradient into a record; `finish` takes the records of one pass; `guard` wraps a hook so that
    its failure never reaches the engine; `begun` holds the calls of which a pass has begun and not finished.
    """

    def __init__(
        self,
        read: Callable[[Slot, torch.Tensor], Any],
        finish: Callable[[dict[Slot, Any], dict[Slot, Any]], None],
        guard: Callable[[Callable[..., None]], Callable[..., None]],
        begun: set[BackwardOfCall],
    ) -> None:
        self._begun = begun
        self._read = read
        self._finish = finish
        self._guard = guard
        self._num_events = 0
        self._num_parts: dict[Slot, int] = {}
        self._passes: dict[int, _Pass] = {}
        self._lock = threading.Lock()

    def flush(self) -> None:
        """Hand over what has come, at the end of a backward pass that did not run every node."""
        self._begun.discard(self)
        while self._passes:
            _, unfinished = self._passes.popitem()
            self._hand_over(unfinished)

    def expect_outputs(self, node: Any, slots: dict[int, Slot], fallback_numel: int | None = None, shape: tuple[int, ...] = ()) -> None:
        """Take the gradients of the call's outputs where they enter `node`."""
        self._num_events += 1

        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            current = self._pass()
            for number, slot in slots.items():
                gradient = gradients[number] if number < len(gradients) else None
                if gradient is None or slot in current.inputs:
                    continue
                if fallback_numel is not None:
                    if gradient.numel() != fallback_numel:
                        continue
                    with blind():
                        gradient = gradient.detach().reshape(shape)
                current.inputs[slot] = self._read(slot, gradient)
            self._event(current)

        node.register_prehook(self._guard(hook))

    def expect_inputs(self, node: Any, slots: list[tuple[int, Slot]]) -> None:
        """Take the gradients that `node` passes on to inputs of the call."""
        self._num_events += 1
        for _, slot in slots:
            self._num_parts[slot] = self._num_parts.get(slot, 0) + 1

        def hook(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
            current = self._pass()
            for number, slot in slots:
                self._add(current, slot, gradients[number] if number < len(gradients) else None)
            self._event(current)

        node.register_hook(self._guard(hook))

    def _pass(self) -> _Pass:
        with self._lock:
            task = graph_task()
            if task not in self._passes:
                self._begun.add(self)
                self._passes[task] = _Pass(self._num_events, parts_left=dict(self._num_parts))
            return self._passes[task]

    def _add(self, current: _Pass, slot: Slot, gradient: torch.Tensor | None) -> None:
        """Add one part; only sums of several parts are copied, all else is read at once and let go."""
        current.parts_left[slot] -= 1
        earlier = current.sums.pop(slot, None)
        if gradient is not None and earlier is not None:
            with blind():
                earlier = earlier + gradient.detach()
        elif gradient is not None and current.parts_left[slot]:
            with blind():
                earlier = gradient.detach().clone()
        elif gradient is not None:
            current.outputs[slot] = self._read(slot, gradient)
        if earlier is not None:
            if current.parts_left[slot]:
                current.sums[slot] = earlier
            else:
                current.outputs[slot] = self._read(slot, earlier)

    def _event(self, current: _Pass) -> None:
        current.events_left -= 1
        if current.events_left == 0:
            with self._lock:
                self._passes = {task: other for task, other in self._passes.items() if other is not current}
                if not self._passes:
                    self._begun.discard(self)
            self._hand_over(current)

    def _hand_over(self, current: _Pass) -> None:
        for slot, total in current.sums.items():
            current.outputs[slot] = self._read(slot, total)
        current.sums.clear()
        if current.inputs or current.outputs:
            self._finish(current.inputs, current.outputs)


def watch_backward(backward: BackwardOfCall, edges: Edges, results: list[Found]) -> bool:
    """Hook the nodes that a finished call owns; False where it has none."""
    entries: dict[Any, dict[int, Slot]] = {}
    for slot, tensor in results:
        if tensor.grad_fn is not None:
            entries.setdefault(tensor.grad_fn, {}).setdefault(tensor.output_nr, Slot("input", slot.path))
        base = tensor._base
        if base is not None and id(base) in edges.bases and base.grad_fn is not None:
            entries.setdefault(base.grad_fn, {}).setdefault(base.output_nr, Slot("input", (*slot.path, "base")))
    last = next_sequence_number()
    owned = {node: slots for node, slots in entries.items() if edges.first <= sequence_number(node) < last}
    for node, slots in owned.items():
        backward.expect_outputs(node, slots)
    for node, contributions in _contributions(list(owned), edges, last):
        backward.expect_inputs(node, contributions)
    _watch_behind_a_view(backward, owned, results, edges.first, last)
    return bool(owned)


def _contributions(starts: list[Any], edges: Edges, last: int) -> Iterable[tuple[Any, list[tuple[int, Slot]]]]:
    """Walk the owned nodes and yield each that passes gradients on to inputs of the call."""
    waiting, seen = list(starts), set(starts)
    while waiting:
        node = waiting.pop()
        leaving: list[tuple[int, Slot]] = []
        for number, (following, output) in enumerate(node.next_functions):
            if following is None:
                continue
            position = sequence_number(following)
            is_leaf = position == ACCUMULATE_GRAD
            slot = edges.leaves.get(id(getattr(following, "variable", None))) if is_leaf else edges.nodes.get((following, output))
            if slot is not None:
                leaving.append((number, Slot("gradient" if slot.role == "parameter" else "output", slot.path)))
            elif edges.first <= position < last and following not in seen:
                seen.add(following)
                waiting.append(following)
        if leaving:
            yield node, leaving


def _watch_behind_a_view(backward: BackwardOfCall, owned: dict[Any, dict[int, Slot]], results: list[Found], first: int, last: int) -> None:
    """Where the one result is a view of an inner result (linear on a 3-D input), writing into it in place bypasses the view's node.

    The gradient then enters at the node behind, in the inner result's shape.
    """
    if len(results) != 1 or len(owned) != 1:
        return
    ((node, slots),) = owned.items()
    if results[0][1]._base is None or len(node.next_functions) != 1:
        return
    behind, _ = node.next_functions[0]
    if behind is not None and first <= sequence_number(behind) < last:
        tensor = results[0][1]
        backward.expect_outputs(behind, {0: next(iter(slots.values()))}, fallback_numel=tensor.numel(), shape=tuple(tensor.shape))
