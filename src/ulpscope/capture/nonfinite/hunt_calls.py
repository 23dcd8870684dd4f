# SPDX-License-Identifier: Apache-2.0
"""See the calls of a program, one by one, and the autograd nodes that they leave behind.

Nearly every call is clean, and on the CPU a sum shows that: then only an entry in the ring is made. Only where the sum is not finite, or
values have begun in the step already, does a call become a `SeenCall` and is looked at closely.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from ulpscope.capture.intercept.modules import ModuleStack
from ulpscope.capture.intercept.naming import is_own_business, makes_no_values, op_name, writes_lists
from ulpscope.capture.intercept.torch_modes import ApiMode
from ulpscope.capture.nonfinite.extremes import is_plain_here, sum_tells
from ulpscope.capture.nonfinite.hunt import Hunt
from ulpscope.capture.nonfinite.hunt_records import Place, SeenCall, strengthened, version_of, weakened
from ulpscope.capture.torch_internals import (
    ACCUMULATE_GRAD,
    current_node,
    graph_task,
    inside_transform,
    is_foreign,
    is_traced,
    next_sequence_number,
    saved_tensors,
    sequence_number,
    without_function_modes,
)
from ulpscope.capture.walk import Found, tensors_in
from ulpscope.model import Phase, Slot
from ulpscope.numerics.nonfinite_rule import gives_data, is_move, makes_nothing_new
from ulpscope.recording.safety import Safety
from ulpscope.recording.stacks import StackReader

__all__ = ["CallHunt", "CallMode", "Traits", "traits_of_name"]

_MOST_DULL = 16
_MOST_PLACES = 20_000
_OUTPUTS = tuple(Slot("output", (number,)) for number in range(16))
# Nodes that hand on the gradients they are given, in another shape.
_VIEW_NODES = frozenset(
    f"{name}Backward{version}"
    for name in "View UnsafeView ReshapeAlias T Transpose Permute Unsqueeze Squeeze Alias Detach".split()
    for version in range(3)
)


class Traits(NamedTuple):
    """The traits that an operation's name gives to its calls."""

    op: str
    is_dull: bool
    is_move: bool
    is_skipped: bool
    is_silent: bool


@lru_cache(maxsize=8192)
def traits_of_name(op: str) -> Traits:
    return Traits(op, makes_nothing_new(op), is_move(op), makes_no_values(op) or gives_data(op), writes_lists(op))


@lru_cache(maxsize=8192)
def _traits_of(func: Any) -> Traits | None:
    op = op_name(func)
    return None if op is None else traits_of_name(op)


class Begun(NamedTuple):
    """A call that has begun and not returned; `first_node` is the sequence number at which its autograd nodes begin, -1 where they are not
    looked at.
    """

    traits: Traits
    number: int
    first_node: int
    in_backward: bool
    called_from: tuple[int, int]


_Aside = tuple[int, Place, Phase, tuple[Any, ...], dict[str, Any], list[Found], list[int], Any]
"""A call that was put aside: order, place, phase, arguments, results, their versions, and the gradients that came in."""


class _Given(NamedTuple):
    """The inputs of a call, held weakly: if its backward goes wrong while they are all still there, they are recorded."""

    order: int
    place: Place
    args: Any
    kwargs: Any

    def recalled(self, step: int) -> SeenCall | None:
        """Return the forward side of the call, None where an input is gone."""
        try:
            args, kwargs = strengthened(self.args), strengthened(self.kwargs)
        except LookupError:
            return None
        return SeenCall(self.order, step, self.place, "forward", args, kwargs)


class _Session(Protocol):
    @property
    def is_recording(self) -> bool: ...

    def name_spoken(self, op: str) -> str: ...

    def look(self, call: SeenCall) -> None: ...

    def raise_alarm(self) -> None: ...


class CallMode(ApiMode):
    """Sees the outermost Python-level calls of torch, with as little work for each as possible."""

    def __init__(self, calls: CallHunt) -> None:
        super().__init__(calls)  # type: ignore[arg-type]
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        traits = _traits_of(func)
        if traits is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        begun = self._calls.open(traits, sys._getframe(1))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if begun is not None:
            self._calls.close(begun, args, kwargs or {}, result)
        return result


class CallHunt:
    """Looks at the results of calls, and at the gradients that their autograd nodes pass on."""

    def __init__(
        self,
        session: _Session,
        hunt: Hunt,
        modules: ModuleStack,
        safety: Safety,
        stacks: StackReader,
        *,
        all_calls: bool,
        operators: bool,
    ) -> None:
        self._session: Callable[[], _Session | None] = weakref.ref(session)
        self._hunt = hunt
        self._modules = modules
        self._safety = safety
        self._stacks = stacks
        self._all_calls = all_calls
        self._operators = operators
        self._dull: list[_Aside] = []
        self._places: dict[tuple[str, int, str], tuple[tuple[int, int], Place]] = {}

    def begin_step(self) -> None:
        self._dull.clear()

    # ---- forward

    def open(self, traits: Traits, frame: FrameType) -> Begun | None:
        """Take down the facts before a call; None if its result need not be looked at."""
        session = self._session()
        if session is None or not session.is_recording:
            return None
        if traits.is_silent:
            self._hunt.forget_finite()
        if is_own_business(frame):
            return None
        if self._operators:
            traits = traits_of_name(session.name_spoken(traits.op))
        in_backward = graph_task() != -1
        number = 0 if in_backward else self._hunt.name(traits.op)
        if traits.is_skipped or (in_backward and traits.is_move):
            return None
        hooks = (self._all_calls or not traits.is_move) and torch.is_grad_enabled()
        called_from = (id(frame.f_code), frame.f_lasti)
        return Begun(traits, number, next_sequence_number() if hooks else -1, in_backward, called_from)

    def close(self, begun: Begun, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look at the result of a call."""
        try:
            with without_function_modes():
                if inside_transform():
                    return
                if type(result) is torch.Tensor and self._hunt.glances and not begun.in_backward and sum_tells(result):
                    place = self._place(begun)
                    if self._is_clean(begun, place, args, kwargs, result):
                        node = result.grad_fn
                        if node is not None and begun.first_node >= 0 and not _hands_on(node, args, kwargs, result):
                            self._hook_nodes(place, [node], begun, args, kwargs)
                        return
                self._look_closely(begun, args, kwargs, result)
        except Exception as error:
            self._safety.failed(f"look at the outputs of {begun.traits.op}", error)
        if self._hunt.alarm is not None or self._hunt.is_done:
            session = self._session()
            if session is not None:
                session.raise_alarm()

    def _place(self, begun: Begun) -> Place:
        """Return the place of a call: that of the step before if the call comes from the same line; `_look_closely` looks the place up
        anew.
        """
        key = (begun.traits.op, begun.number, self._modules.current)
        known = self._places.get(key)
        if known is not None and known[0] == begun.called_from:
            return known[1]
        place = Place(*key, "api", self._stacks.read())
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        self._places[key] = (begun.called_from, place)
        return place

    def _is_clean(self, begun: Begun, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> bool:
        """Tell whether the one result of a call is done: its sum is finite, or it makes nothing new and waits for the next call to tell."""
        hunt = self._hunt
        if begun.traits.is_dull and not self._all_calls:
            self._put_aside(place, "forward", args, kwargs, [(_OUTPUTS[0], result)])
            return True
        if not hunt.glance(place, "forward", ((_OUTPUTS[0], result),)):
            return False
        if self._dull:
            self._dull.clear()
        return True

    def _look_closely(self, begun: Begun, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results = _results(args, result)
        if not results:
            return
        place = Place(begun.traits.op, begun.number, self._modules.current, "api", self._stacks.read())
        is_dull = begun.traits.is_dull and not self._all_calls
        is_looked_at = not begun.in_backward and (not is_dull or self._hunt.is_tripped)
        if is_looked_at:
            before = self._taken_up()
            call = self._hunt.seen(place, "forward")
            call.args, call.kwargs, call.results, call.before = args, kwargs, results, before
            self._look(call)
        elif is_dull:
            self._put_aside(place, "forward", args, kwargs, results)
        if begun.first_node >= 0:
            self._hook_nodes(place, [tensor.grad_fn for _, tensor in results if tensor.grad_fn is not None], begun, args, kwargs)

    def _put_aside(
        self, place: Place, phase: Phase, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Found], entering: Any = ()
    ) -> None:
        """Put a call aside: it is looked at only if the next call that is looked at is not clean."""
        if len(self._dull) >= _MOST_DULL:
            del self._dull[0]
        versions = [version_of(tensor) for _, tensor in results]
        self._dull.append((self._hunt.next_order(), place, phase, args, kwargs, results, versions, entering))

    def _taken_up(self) -> list[SeenCall]:
        """Take up the calls that were put aside, to look at them after all."""
        step, calls = self._hunt.step_number, []
        for order, place, phase, args, kwargs, results, versions, entering in self._dull:
            call = SeenCall(order, step, place, phase, args, kwargs, results, entering)
            if phase == "forward":
                call.versions = {id(tensor): version for (_, tensor), version in zip(results, versions, strict=True)}
            calls.append(call)
        self._dull = []
        return calls

    def _look(self, call: SeenCall) -> None:
        session = self._session()
        if session is not None:
            session.look(call)

    # ---- backward

    def _hook_nodes(self, place: Place, nodes: Sequence[Any], begun: Begun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook each autograd node of a call to look at its gradients; those of a dull call are looked at only if the next is not clean."""
        owned = _nodes_between(nodes, begun.first_node, next_sequence_number())
        if owned:
            given = _Given(self._hunt.next_order(), place, weakened(args), weakened(kwargs) if kwargs else {})
            hook = self._hook(place, begun.traits.is_dull and not self._all_calls, given)
            for node in owned:
                node.register_hook(hook)

    def _hook(self, place: Place, is_dull: bool, given: _Given) -> Callable[..., None]:
        session, calls = self._session, weakref.ref(self)

        def hook(passed_on: tuple[Any, ...], received: tuple[Any, ...]) -> None:
            alive, mine = session(), calls()
            if alive is None or mine is None or not alive.is_recording:
                return
            try:
                with without_function_modes():
                    mine._look_at_node(place, is_dull, given, passed_on, received)
            except Exception as error:
                mine._safety.failed("look at a backward call", error)
            if mine._hunt.alarm is not None:
                alive.raise_alarm()

        return hook

    def _look_at_node(self, place: Place, is_dull: bool, given: _Given, passed_on: tuple[Any, ...], received: tuple[Any, ...]) -> None:
        known = {_address(gradient) for gradient in received if gradient is not None}
        results = [
            (_output(number), gradient)
            for number, gradient in enumerate(passed_on)
            if gradient is not None and (_address(gradient) or -1) not in known
        ]
        if not results:  # only gradients that came in, handed on or in another shape
            return
        hunt = self._hunt
        if not is_dull and hunt.glances and all(map(_can_glance, results)) and hunt.glance(place, "backward", results):
            hunt.remember_finite(gradient for _, gradient in results)
            if self._dull:
                self._dull.clear()
            return
        results = [(slot, gradient) for slot, gradient in results if is_plain_here(gradient)]
        if is_dull or any(not gradient.is_cpu for _, gradient in results):
            results = _without_leaves(results)
        if not results:
            return
        if is_dull and not hunt.is_tripped:
            self._put_aside(place, "backward", (), {}, results, _numbered("input", received))
            return
        before = self._taken_up()
        call = hunt.seen(place, "backward")
        call.results, call.entering, call.before = results, _numbered("input", received), before
        call.more, call.name_results = _saved_by_this_node, self._name_gradients
        call.forward = given.recalled
        self._look(call)

    def _name_gradients(self, results: Sequence[Found]) -> list[Found]:
        """Name the results that the running node passes on to parameters."""
        node = current_node()
        if node is None:
            return list(results)
        leaves = [getattr(following, "variable", None) for following, _ in node.next_functions]
        names = {id(p): name for root in self._modules.roots() for name, p in self._modules.named_parameters(root)}
        named = []
        for slot, tensor in results:
            leaf = leaves[int(slot.path[0])]
            named.append((slot if leaf is None else Slot.parse(f"gradient.{names.get(id(leaf), slot.path[0])}"), tensor))
        return named


def _nodes_between(nodes: Sequence[Any], first: int, last: int) -> list[Any]:
    """Return the autograd nodes behind these that were made between two moments, except those that only change the shape."""
    if last - first == 1 and len(nodes) == 1:  # nearly every call makes one
        return [node for node in nodes if sequence_number(node) == first and type(node).__name__ not in _VIEW_NODES]
    owned = []
    waiting = list(dict.fromkeys(nodes))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        number = sequence_number(node)
        if not first <= number < last or number == ACCUMULATE_GRAD:
            continue
        if type(node).__name__ not in _VIEW_NODES:
            owned.append(node)
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting += following
    return owned


def _hands_on(node: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> bool:
    """Tell whether a node passes its gradient on to each input unchanged: an addition of equals."""
    if type(node).__name__ != "AddBackward0" or kwargs or len(args) != 2:
        return False
    tensors = [value for value in args if isinstance(value, torch.Tensor) and not is_foreign(value)]
    return len(tensors) == 2 and all(value.shape == result.shape and value.dtype is result.dtype for value in tensors)


def _can_glance(found: Found) -> bool:
    return sum_tells(found[1]) and not is_traced(found[1])


def _results(args: tuple[Any, ...], result: Any) -> list[Found]:
    if isinstance(result, torch.Tensor):
        return [(_OUTPUTS[0], result)] if is_plain_here(result) else []
    if result is None:  # x[...] = y, and the like
        result = args[0] if args else None
    return [(slot, tensor) for slot, tensor in tensors_in(result, "output") if is_plain_here(tensor)]


def _output(number: int) -> Slot:
    return _OUTPUTS[number] if number < len(_OUTPUTS) else Slot("output", (number,))


def _numbered(role: Any, gradients: tuple[Any, ...]) -> list[Found]:
    return [(Slot(role, (number,)), value) for number, value in enumerate(gradients) if value is not None and is_plain_here(value)]


def _without_leaves(results: list[Found]) -> list[Found]:
    """Leave out gradients that go to parameters: autograd copies one that somebody holds. They are looked at before an optimizer uses
    them.
    """
    node = current_node()
    if node is None:
        return results
    leaves = [following is not None and sequence_number(following) == ACCUMULATE_GRAD for following, _ in node.next_functions]
    return [(slot, gradient) for slot, gradient in results if not leaves[int(slot.path[0])]]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return 0


def _saved_by_this_node() -> list[Found]:
    """Return the tensors that the running node saved in its forward call."""
    node = current_node()
    return [(Slot("buffer", ("saved", name)), tensor) for name, tensor in saved_tensors(node)] if node is not None else []
