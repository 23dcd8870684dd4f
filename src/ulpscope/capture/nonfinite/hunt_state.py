# SPDX-License-Identifier: Apache-2.0
"""Look at tensors outside of calls: the loss, gradients before an optimizer uses them, parameters and the optimizer's state afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from ulpscope.capture.nonfinite.extremes import is_on_a_device, is_plain_here, is_readable, local_values, sum_tells
from ulpscope.capture.nonfinite.hunt import Hunt
from ulpscope.capture.nonfinite.hunt_records import Place, SeenCall
from ulpscope.capture.record.state import OptimizerProbe
from ulpscope.capture.torch_internals import is_foreign
from ulpscope.capture.walk import Found, tensors_in
from ulpscope.model import Slot
from ulpscope.recording.stacks import StackReader

__all__ = ["StateHunt"]

_ROTATION = 8
_LOSS = Place("state.loss", 0, "", "state", ())

Locate = Callable[[Sequence[Slot]], tuple[Place, str] | None]


class _Session(Protocol):
    def look(self, call: SeenCall) -> None: ...


class StateHunt:
    """Looks at many tensors at once, by name."""

    def __init__(self, session: _Session, hunt: Hunt, optimizers: OptimizerProbe, stacks: StackReader) -> None:
        self._session: Callable[[], _Session | None] = weakref.ref(session)
        self._hunt = hunt
        self._optimizers = optimizers
        self._stacks = stacks
        self._parameters: weakref.WeakKeyDictionary[Any, list[tuple[Slot, Slot, Any]]] = weakref.WeakKeyDictionary()

    def wants(self, optimizer: Any) -> bool:
        return self._optimizers.wants(optimizer)

    def look_at_loss(self, args: tuple[Any, ...]) -> None:
        self._hunt.backward_begins()
        roots = [tensor for _, tensor in tensors_in(args[0], "output") if is_plain_here(tensor)] if args else []
        if roots:
            self._look(_LOSS, "forward", [(Slot("output", (number,)), tensor) for number, tensor in enumerate(roots)])

    def look_at_parameters(self, named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
        """Look at the parameters of a model before anything changes them."""
        found = [(Slot.parse(f"parameter.{name}"), p) for name, p in named if is_plain_here(p) and p.device == device]
        if found:
            self._look(Place("state.parameters", 0, "", "state", ()), "start", found)

    def look_at_gradients(self, optimizer: Any, locate: Locate | None) -> None:
        found = getattr(optimizer, "found_inf", None)  # set by GradScaler for optimizers that skip the step themselves
        if found is not None and self._hunt.is_tripped and bool(found.item()):
            self._hunt.skipped(None)
        gradients = [(slot, p.grad) for slot, _, p in self._named(optimizer) if p.grad is not None]
        self._look_at_optimizer(optimizer, gradients, locate)

    def look_at_update(self, optimizer: Any, step: int, locate: Locate | None) -> None:
        """Look at parameters and the optimizer's state. They are many and follow from gradients, so each step looks at a part of them, in
        turn.
        """
        found: list[Found] = []
        for number, (_, slot, parameter) in enumerate(self._named(optimizer)):
            is_turn = (number + step) % _ROTATION == 0
            if is_turn or is_foreign(parameter) or parameter.is_cpu:
                found.append((slot, parameter))
            if is_turn:
                state = optimizer.state.get(parameter, {}) if isinstance(optimizer.state, dict) else {}
                found += [(Slot("state", (*slot.path, key)), value) for key, value in state.items() if _is_moment(value)]
        self._look_at_optimizer(optimizer, found, locate)

    def _look_at_optimizer(self, optimizer: Any, found: list[Found], locate: Locate | None) -> None:
        """Look at many tensors of one optimizer at once, device by device."""
        if self._hunt.glances and all(sum_tells(tensor) for _, tensor in found) and self._hunt.are_finite([tensor for _, tensor in found]):
            return
        for group in [found] if _is_one_group(found) else _by_device(found):
            call = self._hunt.seen(Place(f"optimizer.{type(optimizer).__name__}", 0, "", "state", ()), "optimizer")
            call.results, call.more = group, lambda: [(slot, p.grad) for slot, _, p in self._named(optimizer) if p.grad is not None]
            call.describe = lambda: (self._optimizers.hyper_parameters(optimizer), self._stacks.read())
            call.locate = locate
            self._hand_over(call)

    def _look(self, place: Place, phase: Any, found: list[Found]) -> None:
        call = self._hunt.seen(place, phase)
        call.results = found
        self._hand_over(call)

    def _hand_over(self, call: SeenCall) -> None:
        session = self._session()
        if session is not None:
            session.look(call)

    def _named(self, optimizer: Any) -> list[tuple[Slot, Slot, Any]]:
        known = self._parameters.get(optimizer)
        if known is None or len(known) != sum(len(group["params"]) for group in optimizer.param_groups):
            names = self._optimizers.names_of(optimizer)
            known = [(Slot.parse(f"gradient.{name}"), Slot.parse(f"mutated.{name}"), parameter) for name, parameter in names]
            self._parameters[optimizer] = known
        return known


def _is_one_group(found: list[Found]) -> bool:
    return bool(found) and all(is_on_a_device(tensor) for _, tensor in found) and len({tensor.get_device() for _, tensor in found}) == 1


def _by_device(found: Iterable[Found]) -> list[list[Found]]:
    groups: dict[torch.device, list[Found]] = {}
    for slot, tensor in found:
        values = tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else local_values(tensor)
        if values is not None and is_readable(values):
            groups.setdefault(values.device, []).append((slot, values))
    return list(groups.values())


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_foreign(value) and value.dim() > 0
