# SPDX-License-Identifier: Apache-2.0
"""Record the backward side of a call: the gradients that it received, and those that it contributed to each of its inputs.

A call owns the autograd nodes whose sequence numbers lie in the range that it used up. Hooks sit on those graph nodes, never on leaves:
nothing leaks and nothing has to be removed. A hook keeps no reference to a node or to a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol

import msgspec
import torch

from ulpscope.capture.torch_internals import (
    ACCUMULATE_GRAD,
    CAST,
    blind,
    current_node,
    graph_task,
    is_foreign,
    next_sequence_number,
    sequence_number,
    without_class,
)
from ulpscope.capture.walk import Found, renamed
from ulpscope.model import Slot

__all__ = ["BackwardOfCall", "BackwardWriter", "Edges", "Plan", "edges_of", "plan_call", "watch_backward"]


class Edges:
    """The edges by which gradients leave a call's inputs; taken before the call, since in-place calls move them."""

    __slots__ = ("bases", "first", "found", "leaves", "nodes")

    def __init__(self, found: list[Found]) -> None:
        self.found = found
        self.nodes: dict[tuple[Any, int], Slot] = {}
        self.leaves: dict[int, Slot] = {}
        self.bases: set[int] = set()
        self.first = 0

    def add_leaf(self, tensor: torch.Tensor, slot: Slot) -> None:
        """Add a leaf that is no argument of the call."""
        self.leaves.setdefault(id(tensor), slot)


def edges_of(found: list[Found]) -> Edges:
    """Find the gradient edges of the differentiable tensors among `found`, and the sequence number at which the call begins."""
    edges = Edges(found)
    bases: list[Found] = []
    for slot, tensor in found:
        if not tensor.requires_grad:
            continue
        node = tensor.grad_fn
        if node is None:
            edges.leaves.setdefault(id(tensor), slot)
        else:
            edges.nodes.setdefault((node, tensor.output_nr), slot)
        base = tensor._base
        if base is not None and base.requires_grad:
            bases.append((slot, base))
    for slot, base in bases:
        edges.bases.add(id(base))
        if base.grad_fn is None:
            edges.leaves.setdefault(id(base), slot)
        else:
            edges.nodes.setdefault((base.grad_fn, base.output_nr), slot)
    edges.first = next_sequence_number()
    return edges


class BackwardWriter(Protocol):
    """The parts that the backward sides of all calls share.

    `read` describes a gradient for a record; `finish_pass` takes the descriptions of one pass of a call. `session` returns the session
    while it lives; the session keeps failures from reaching the engine. `begun` holds the calls whose pass has begun and not finished, in
    that order. Hold `lock` to look at one of them.
    """

    begun: dict[BackwardOfCall, None]
    lock: AbstractContextManager[Any]
    session: Callable[[], Any]

    def read(self, slot: Slot, tensor: torch.Tensor) -> Any: ...

    def finish_pass(self, call: Any, inputs: list[Any], outputs: list[Any]) -> None: ...


class _Pass(msgspec.Struct, gc=False):
    """One backward pass through one call: the gradients taken so far, the sums under way, and the number of parts still to come."""

    events_left: int
    parts_left: dict[Slot, int]
    inputs: list[Any]
    outputs: list[Any]
    sums: dict[Slot, torch.Tensor] | None = None


class BackwardOfCall(msgspec.Struct, gc=False, eq=False):
    """Collects the gradients of one call, pass by pass, and hands over each finished pass. Every slot comes in one part, unless `num_parts`
    has another number.

    A step has thousands of these, and of the hooks that lead to them. None is part of a circle, so Python's garbage collector does not
    count them.
    """

    writer: Any  # a BackwardWriter
    call: Any
    num_events: int = 0
    num_parts: dict[Slot, int] = {}
    passes: dict[int, _Pass] = {}

    def flush(self) -> None:
        """Hand over the gradients that have come, at the end of a backward pass that did not run every node."""
        with self.writer.lock:
            self.writer.begun.pop(self, None)
            while self.passes:
                _, unfinished = self.passes.popitem()
                self._hand_over(unfinished)

    def expect_outputs(self, node: Any, slots: _Entering, shape: tuple[int, ...] | None = None) -> None:
        """Take the gradients of the call's outputs where they enter `node`; with `shape`, in that shape, if they have as many elements."""
        self.num_events += 1
        node.register_prehook(_Hook(self, (), slots, shape))

    def expect_inputs(self, node: Any, slots: _Leaving, entering: _Entering | None = None) -> None:
        """Take the gradients that `node` passes on to inputs of the call; with `entering` those of the call's outputs too, by the same
        hook.
        """
        self.num_events += 1
        for _, slot, _ in slots:
            self.num_parts[slot] = self.num_parts.get(slot, 0) + 1
        node.register_hook(_Hook(self, slots, entering))

    def _pass(self) -> _Pass:
        task = graph_task()
        current = self.passes.get(task)
        if current is None:
            self.writer.begun[self] = None
            current = self.passes[task] = _Pass(self.num_events, self.num_parts.copy(), [], [])
        return current

    def _enter(self, current: _Pass, slots: _Entering, shape: tuple[int, ...] | None, gradients: _Gradients) -> None:
        taken = {earlier.slot for earlier in current.inputs}
        for number, slot in slots.items():
            gradient = gradients[number] if number < len(gradients) else None
            if gradient is None or slot in taken:
                continue
            gradient = without_class(gradient)
            if shape is not None and not is_foreign(gradient):
                if gradient.numel() != prod(shape):
                    continue
                with blind():
                    gradient = gradient.detach().reshape(shape)
            current.inputs.append(self.writer.read(slot, gradient))

    def _leave(self, current: _Pass, slots: _Leaving, gradients: _Gradients) -> None:
        for number, slot, view in slots:
            given = gradients[number] if number < len(gradients) else None
            gradient = given if view is None or given is None else _as_view(given, view)
            left = current.parts_left[slot] = current.parts_left[slot] - 1
            if left == 0 and (current.sums is None or slot not in current.sums):
                if gradient is not None and given is not None:
                    taken = self.writer.read(slot, gradient)
                    if view is not None:
                        taken.requires_grad = given.requires_grad
                    current.outputs.append(taken)
            else:
                self._add_part(current, slot, gradient, left)

    def _add_part(self, current: _Pass, slot: Slot, gradient: torch.Tensor | None, left: int) -> None:
        """Add one of several parts; only sums are copied, every other gradient is read at once and let go."""
        sums = current.sums if current.sums is not None else {}
        current.sums = sums
        earlier = sums.pop(slot, None)
        if gradient is not None:
            gradient = without_class(gradient)
        if gradient is not None and (earlier is None or not is_foreign(earlier)) and is_foreign(gradient):
            earlier = gradient  # the values of a foreign gradient are not read, so the sum's are not either
        elif gradient is not None and (earlier is None or not is_foreign(earlier)):
            with blind():
                earlier = gradient.detach().clone() if earlier is None else earlier + gradient.detach()
        if earlier is None:
            return
        if left:
            sums[slot] = earlier
        else:
            current.outputs.append(self.writer.read(slot, earlier))

    def _event(self, current: _Pass) -> None:
        current.events_left -= 1
        if current.events_left == 0:
            self.passes = {task: other for task, other in self.passes.items() if other is not current} if len(self.passes) > 1 else {}
            if not self.passes:
                self.writer.begun.pop(self, None)
            self._hand_over(current)

    def _hand_over(self, current: _Pass) -> None:
        if current.sums:
            for slot, total in current.sums.items():
                current.outputs.append(self.writer.read(slot, total))
            current.sums.clear()
        if current.inputs or current.outputs:
            self.writer.finish_pass(self.call, current.inputs, current.outputs)


class _Hook(msgspec.Struct, gc=False, eq=False):
    """The hook of a node: called before the node runs with the gradients that enter, or afterwards with those that leave and those that
    entered.
    """

    backward: BackwardOfCall
    leaving: _Leaving
    entering: _Entering | None
    shape: tuple[int, ...] | None = None
    not_in: int = -1  # the pass in which it was added: there another hook took the gradient

    def __call__(self, gradients: _Gradients, entered: _Gradients | None = None) -> None:
        session = self.backward.writer.session()
        if session is not None and session._is_active and session._is_recording:
            session._safely("record a backward call", _take_gradients, self, gradients, entered)


def _take_gradients(hook: _Hook, gradients: _Gradients, entered: _Gradients | None) -> None:
    """Take the gradients that a node hands to a hook."""
    backward = hook.backward
    if hook.not_in != -1 and hook.not_in == graph_task():
        return
    with backward.writer.lock:
        current = backward._pass()
        if hook.entering is not None:
            backward._enter(current, hook.entering, hook.shape, gradients if entered is None else entered)
        if hook.leaving:
            backward._leave(current, hook.leaving, gradients)
            if torch.is_grad_enabled() and any(_is_looked_through(view) for _, _, view in hook.leaving):
                _look_no_more(hook)
        backward._event(current)


def _is_looked_through(view: _View) -> bool:
    return view is not None and view is not torch.float32


def _look_no_more(hook: _Hook) -> None:
    """Stop looking through views at this node: the pass makes a graph of its own, and a pass through that graph may reach the nodes behind
    without this one. From the next pass on each of them has a hook.
    """
    node = current_node()
    if node is None:
        return
    kept = []
    for number, slot, view in hook.leaving:
        if _is_looked_through(view):
            node.next_functions[number][0].register_hook(_Hook(hook.backward, ((0, slot, None),), None, not_in=graph_task()))
            hook.backward.num_events += 1
        else:
            kept.append((number, slot, view))
    hook.leaving = tuple(kept)


def _as_view(gradient: torch.Tensor, view: _View) -> torch.Tensor:
    """Change a gradient as the node behind would, which does nothing else: transpose it, reshape it, or cast it back to float32."""
    gradient = without_class(gradient)
    if is_foreign(gradient):
        return gradient
    with blind():
        gradient = gradient.detach()
        if view is torch.float32:
            return gradient.to(torch.float32)
        return gradient.t() if view is True else gradient.reshape(view)


_Entering = dict[int, Slot]
_View = Any
"""How a gradient changes on its way: True for transposed, a shape, torch.float32 for a cast; None for unchanged."""
_Leaving = tuple[tuple[int, Slot, _View], ...]
_Gradients = tuple["torch.Tensor | None", ...]
_leavings: dict[tuple[Any, ...], _Leaving] = {}
_MOST_LEAVINGS = 4096
_RESHAPING = frozenset(("ViewBackward0", "UnsafeViewBackward0"))
_TRANSPOSING = "TBackward0"


class Plan(msgspec.Struct, gc=False):
    """The nodes at which a call's gradients are taken: at each, those that enter it and those that it passes on to inputs.

    If the one result is a view, `behind` holds the node behind that view, the slot of the gradient that enters there, and the shape of the
    result.
    """

    nodes: list[tuple[Any, _Entering | None, _Leaving]]
    behind: tuple[Any, Slot, tuple[int, ...]] | None


def watch_backward(backward: BackwardOfCall, edges: Edges, results: list[Found]) -> None:
    """Hook the nodes that a finished call owns."""
    call = backward.call
    # The user can get hold of what lies inside a module, and hook it; not of what lies inside a call of torch.
    looks_through = call.level == "api" and not call.op.startswith("Function.")
    plan = plan_call(edges, results, looks_through=looks_through)
    for node, entering, leaving in plan.nodes:
        if leaving:
            backward.expect_inputs(node, leaving, entering)
        elif entering:
            backward.expect_outputs(node, entering)
    if plan.behind is not None:
        node, slot, shape = plan.behind
        backward.expect_outputs(node, {0: slot}, shape=shape)


def plan_call(edges: Edges, results: list[Found], *, looks_through: bool) -> Plan:
    """Find the nodes of a call that has just returned. With `looks_through`, leave out nodes that only view a gradient in another way.

    There are three planners with one result: this, `_plan_call` in `_compiled.pyx` and `Planner` in `_native.cpp`. They walk the graph in
    the same order.
    """
    first, last = edges.first, next_sequence_number()
    if first == last:
        return Plan([], None)
    owned: dict[Any, _Entering] = {}
    for slot, tensor in results:
        node = tensor.grad_fn
        if node is not None and first <= node._sequence_nr() < last:
            owned.setdefault(node, {}).setdefault(tensor.output_nr, renamed("input", slot))
        if edges.bases:
            base = tensor._base
            if base is not None and id(base) in edges.bases:
                node = base.grad_fn
                if node is not None and first <= node._sequence_nr() < last:
                    owned.setdefault(node, {}).setdefault(base.output_nr, Slot("input", (*slot.path, "base")))
    if not owned:
        return Plan([], None)
    found = _walked(edges, last, owned, looks_through=looks_through and not edges.bases)
    if found is None:
        found = _walked(edges, last, owned, looks_through=False)
    assert found is not None
    return Plan([(node, owned.get(node), leaving) for node, leaving in found], _behind_a_view(owned, results, first, last))


def _walked(edges: Edges, last: int, owned: dict[Any, _Entering], *, looks_through: bool) -> list[tuple[Any, _Leaving]] | None:
    """Return the nodes of a call with the gradients that each passes on to inputs; None if a node cannot be looked through because two
    others lead to it.

    Autocast keeps the cast of a leaf and hands it to every later call, so that the cast's own gradient is the sum over several calls. There
    the gradient is taken where it enters the cast.
    """
    waiting, seen, through = list(owned), set(owned), set()
    found: list[tuple[Any, _Leaving]] = []
    while waiting:
        node = waiting.pop()
        leaving: list[tuple[int, Slot, _View]] = []
        for number, edge in enumerate(node.next_functions):
            following, view = edge[0], None
            if following is None:
                continue
            if following in through:
                return None
            slot = _slot_behind(edges, edge)
            if slot is None and following not in seen:
                slot = _slot_behind_cast(edges, following)
                view = None if slot is None else torch.float32
                if slot is None and edges.first <= following._sequence_nr() < last:
                    if looks_through:
                        slot, view = _look_through(edges, following)
                    if slot is None:
                        seen.add(following)
                        waiting.append(following)
                    else:
                        through.add(following)
            if slot is not None:
                leaving.append((number, renamed("gradient" if slot.role == "parameter" else "output", slot), view))
        found.append((node, _shared(leaving) if leaving else ()))
    return found


def _slot_behind(edges: Edges, edge: tuple[Any, int]) -> Slot | None:
    """Return the slot of the input that an edge of the graph leads to."""
    slot = edges.nodes.get(edge)
    if slot is None and edge[0]._sequence_nr() == ACCUMULATE_GRAD:
        slot = edges.leaves.get(id(getattr(edge[0], "variable", None)))
    return slot


def _slot_behind_cast(edges: Edges, node: Any) -> Slot | None:
    """Return the slot of the float32 leaf that a node casts to another dtype; None for any other node."""
    if node.name() != CAST:
        return None
    leaf = node.next_functions[0][0]
    is_cast = leaf is not None and leaf._sequence_nr() == ACCUMULATE_GRAD and leaf.variable.dtype is torch.float32
    return edges.leaves.get(id(leaf.variable)) if is_cast else None


def _look_through(edges: Edges, node: Any) -> tuple[Slot | None, _View]:
    """Return the slot behind a node that only views a gradient in another way, and how; None where it does more, or leads elsewhere."""
    name = node.name()
    if name != _TRANSPOSING and name not in _RESHAPING:
        return None, None
    following = node.next_functions
    if len(following) != 1 or following[0][0] is None:
        return None, None
    slot = _slot_behind(edges, following[0])
    if slot is None or name == _TRANSPOSING:
        return slot, True if slot is not None else None
    shape = next((tuple(tensor.shape) for known, tensor in edges.found if known is slot), None)
    return (None, None) if shape is None else (slot, shape)


def _shared(found: list[tuple[int, Slot, _View]]) -> _Leaving:
    """Share one tuple among all calls that are like this one; slots are told apart by identity, since the result keeps them."""
    key = tuple([part for number, slot, view in found for part in (number, id(slot), view)])
    known = _leavings.get(key)
    if known is None:
        known = tuple(found)
        if len(_leavings) < _MOST_LEAVINGS:
            _leavings[key] = known
    return known


def _behind_a_view(
    owned: dict[Any, dict[int, Slot]], results: list[Found], first: int, last: int
) -> tuple[Any, Slot, tuple[int, ...]] | None:
    """Find the node behind a view that is the one result (linear on a 3-D input): writing into such a result in place bypasses the view's
    node.

    The gradient then enters at the node behind, in the inner result's shape.
    """
    if len(results) != 1 or len(owned) != 1:
        return None
    tensor = results[0][1]
    if tensor._base is None:
        return None
    ((node, slots),) = owned.items()
    if len(node.next_functions) != 1:
        return None
    behind, _ = node.next_functions[0]
    if behind is None or not first <= sequence_number(behind) < last:
        return None
    return behind, next(iter(slots.values())), tuple(tensor.shape)
