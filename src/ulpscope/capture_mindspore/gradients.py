# SPDX-License-Identifier: Apache-2.0
"""The backward half of calls: the gradients that enter a call, and those that it contributes to its inputs, by hooks on nodes of the graph.

A call made the nodes between its results and its inputs. A hook before the node of a result sees what enters the call; hooks after the
nodes whose edges lead to its inputs see what the call contributes to each. Such hooks change nothing bitwise and launch no kernel. Two
other ways do: a node of our own before an input changes the order in which gradients are added, and a second run of the call (`ms.vjp`)
moves on the search by which MindSpore's CPU kernels find their block sizes, on which the last bits of the program's own calls depend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ulpscope.capture_mindspore.arguments import Found
from ulpscope.capture_mindspore.framework import Edge, array_of, dtype_name, edge_of, node_id, node_of, sequence_number
from ulpscope.capture_mindspore.reading import TensorReader
from ulpscope.model import CallName, Frame, Level, Modes, Slot, TensorRecord

__all__ = ["BackwardCall", "Gradients", "Target"]

Target: TypeAlias = tuple[Slot, Any, Edge | None]
"""The slot that a gradient gets, the tensor that it is for, and where that stood in the graph when the call began."""

_ADDABLE = frozenset({"float16", "float32", "float64"})


@dataclass(slots=True, kw_only=True)
class BackwardCall:
    """A call that may be differentiated, and the gradients that came so far. `parts` are those of inputs that have several."""

    name: CallName
    level: Level
    module: str
    parent: str
    recorded_as: str
    modes: Modes
    stack: tuple[Frame, ...]
    entered: dict[Slot, TensorRecord] = field(default_factory=dict)
    contributed: dict[Slot, TensorRecord] = field(default_factory=dict)
    parts: dict[Slot, list[npt.NDArray[Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Lead:
    """An edge that leads from a node to an input: its place among all edges of the node, and among those that lead anywhere."""

    node: Any
    place: int
    num_edges: int
    dense_place: int
    num_dense: int

    def is_told(self, gradients: Any) -> bool:
        """Whether it is clear which of a node's gradients is for this edge; a compiled region gives fewer than it has edges."""
        return len(gradients) in (self.num_edges, self.num_dense)

    def gradient(self, gradients: Any) -> Any:
        """What a hook after the node is given for it: some nodes give nothing for edges that lead nowhere, others None."""
        return gradients[self.place if len(gradients) == self.num_edges else self.dense_place]


class Gradients:
    """The calls that a backward pass has reached. `guard(what, function, *args)` runs what a hook does; `complain(why, call)` tells what
    could not be done.
    """

    def __init__(self, reader: TensorReader, guard: Callable[..., Any], complain: Callable[[str, BackwardCall], None]) -> None:
        self._reader = reader
        self._guard = guard
        self._complain = complain
        self._reached: dict[int, BackwardCall] = {}
        self._latest = -1

    @property
    def latest(self) -> int:
        """The number of the latest node that a result of a call had: what a call makes has a higher one."""
        return self._latest

    def watch(self, call: BackwardCall, targets: Iterable[Target], results: list[Found], after: int) -> None:
        """Hook the nodes of a call that has returned; `after` is what `latest` was when it began."""
        wanted: dict[Edge, list[Slot]] = {}
        for slot, tensor, edge in targets:
            edge = edge or edge_of(tensor)  # a parameter gets its node when it is first used
            if edge is not None:
                wanted.setdefault(edge, []).append(slot)
        nodes: dict[int, Any] = {}
        for slot, tensor in results:
            node = node_of(tensor)
            if node is None:
                continue
            nodes[node_id(node)] = node
            edge = edge_of(tensor)
            passed_on = wanted.pop(edge, []) if edge is not None else []  # a result that is the input itself
            node.register_prehook(self._entering(call, tensor._output_index, Slot("input", slot.path), passed_on))
            if not node.is_leaf():
                self._latest = max(self._latest, sequence_number(node))
        hits = list(_hits(nodes, wanted, after))
        for edge, slots in wanted.items():
            self._hook(call, slots, [lead for found, lead in hits if found == edge])

    def _hook(self, call: BackwardCall, slots: list[Slot], leads: list[_Lead]) -> None:
        """Hook the edges that lead to one input; where it was given twice, each slot gets its own edge if there is one for each."""
        if len(slots) == len(leads):
            for slot, lead in zip(slots, leads, strict=True):
                lead.node.register_hook(self._leaving(call, lead, slot, 1))
            return
        for lead in leads:
            lead.node.register_hook(self._leaving(call, lead, slots[0], len(leads)))
        if len(slots) > 1 and leads:
            self._complain(f"{', '.join(map(str, slots))} are one tensor: their gradients stand together under the first", call)

    def _entering(self, call: BackwardCall, place: int, slot: Slot, passed_on: list[Slot]) -> Callable[[Any], None]:
        return lambda gradients: self._guard(
            f"record a gradient that enters {call.name}", self._enter, call, slot, passed_on, gradients, place
        )

    def _leaving(self, call: BackwardCall, edge: _Lead, slot: Slot, num_parts: int) -> Callable[[Any, Any], None]:
        return lambda gradients, entered: self._guard(
            f"record a gradient that {call.name} contributes", self._leave, call, slot, num_parts, gradients, edge
        )

    def _enter(self, call: BackwardCall, slot: Slot, passed_on: list[Slot], gradients: Any, place: int) -> None:
        gradient = gradients[place]
        if gradient is None:
            return
        call.entered[slot] = self._reader.read(slot, gradient)
        for other in passed_on:
            call.contributed[other] = self._reader.read(other, gradient)
        self._reach(call)

    def _leave(self, call: BackwardCall, slot: Slot, num_parts: int, gradients: Any, edge: _Lead) -> None:
        if not edge.is_told(gradients):
            self._complain(f"its node gives {len(gradients)} gradients for {edge.num_edges} edges, so that of {slot} is not known", call)
            return
        gradient = edge.gradient(gradients)
        if gradient is None:
            return
        self._reach(call)
        if num_parts == 1:
            call.contributed[slot] = self._reader.read(slot, gradient)
            return
        parts = call.parts.setdefault(slot, [])
        parts.append(array_of(gradient).copy())
        if dtype_name(gradient) not in _ADDABLE:
            why = f"{num_parts} nodes of the call lead to it, and what they give is not added in {dtype_name(gradient)}"
            dtype, shape = dtype_name(gradient), tuple(gradient.shape)
            call.contributed[slot] = TensorRecord(slot=slot, dtype=dtype, shape=shape, device="cpu", note=f"not computed: {why}")
            self._complain(why, call)
        else:
            total = sum(part.astype(np.float64) for part in parts)
            call.contributed[slot] = self._reader.read_array(slot, np.asarray(total).astype(parts[0].dtype))

    def _reach(self, call: BackwardCall) -> None:
        """The last gradient to come says when the call's turn was."""
        self._reached.pop(id(call), None)
        self._reached[id(call)] = call

    def finish(self) -> Iterator[tuple[BackwardCall, list[TensorRecord]]]:
        """After a backward pass: each call that it reached, in the order in which it did, with the slots of its backward record."""
        reached, self._reached = list(self._reached.values()), {}
        for call in reached:
            yield call, [*call.entered.values(), *sorted(call.contributed.values(), key=lambda one: _order(one.slot))]
            call.entered.clear()
            call.contributed.clear()
            call.parts.clear()

    def forget(self) -> None:
        """Know of no call any longer: a backward pass has failed, or a step is over."""
        self._reached.clear()


def _hits(nodes: dict[int, Any], wanted: dict[Edge, list[Slot]], after: int) -> Iterator[tuple[Edge, _Lead]]:
    """Every edge of the nodes that a call made which leads to one of its inputs."""
    seen = set(nodes)
    ahead = [node for node in nodes.values() if not node.is_leaf() and sequence_number(node) > after]
    while ahead:
        node = ahead.pop()
        edges, dense_place = node.next_functions, -1
        num_dense = sum(following is not None for following, _ in edges)
        for place, (following, output) in enumerate(edges):
            if following is None:
                continue
            dense_place += 1
            edge = (node_id(following), output)
            if edge in wanted:
                yield edge, _Lead(node, place, len(edges), dense_place, num_dense)
            elif edge[0] not in seen and not following.is_leaf() and sequence_number(following) > after:
                seen.add(edge[0])
                ahead.append(following)


def _order(slot: Slot) -> tuple[Any, ...]:
    """Inputs before parameters, positions before keywords."""
    return slot.role != "output", *((isinstance(part, str), str(part).zfill(6)) for part in slot.path)
