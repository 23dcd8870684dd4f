# SPDX-License-Identifier: Apache-2.0
"""See modules instead of calls: their results, the gradients of these, and the module in which bad gradients were made.

The hunt does so on accelerators: seeing every call there would cost a tenth of a step by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ulpscope.capture.intercept.modules import ByModule
from ulpscope.capture.nonfinite.extremes import is_on_a_device, is_plain_here
from ulpscope.capture.nonfinite.hunt import Hunt
from ulpscope.capture.nonfinite.hunt_records import Place, SeenCall, reference_to
from ulpscope.capture.torch_internals import graph_task
from ulpscope.capture.walk import Found, tensors_in
from ulpscope.model import Slot
from ulpscope.recording.stacks import StackReader

__all__ = ["ModuleHunt"]

# Modules whose results are finite if their inputs are.
_BOUNDED_MODULES = frozenset(
    """
    Identity Dropout Dropout1d Dropout2d ReLU ReLU6 GELU SiLU Sigmoid Tanh LeakyReLU ELU SELU Softplus Hardtanh Hardswish Mish Flatten
    Unflatten LayerNorm RMSNorm GroupNorm MaxPool1d MaxPool2d MaxPool3d PixelShuffle
    """.split()
)
_FIRST_INPUT, _FIRST_OUTPUT = Slot("input", (0,)), Slot("output", (0,))


class _Session(Protocol):
    @property
    def is_recording(self) -> bool: ...

    def look(self, call: SeenCall) -> None: ...

    def run_safely(self, what: str, function: Callable[..., Any], *args: Any) -> Any: ...


class ModuleHunt:
    """Looks at the results of modules. `hooks_gradients` also looks at the gradients of the outputs of modules with submodules, before
    those of other ranks are added to them."""

    def __init__(self, session: _Session, hunt: Hunt, stacks: StackReader, *, hooks_gradients: bool) -> None:
        self._session: Callable[[], _Session | None] = weakref.ref(session)
        self._hunt = hunt
        self._stacks = stacks
        self._hooks_gradients = hooks_gradients
        self._places: ByModule[Place] = ByModule()
        self.last_result: Callable[[], Any] = lambda: None

    def place_of(self, module: torch.nn.Module) -> Place | None:
        return self._places.get(module)

    def name(self, module: torch.nn.Module, path: str) -> Place:
        """Name the place of a module; without an operation if its results need not be looked at."""
        name = type(module).__name__
        place = Place("" if name in _BOUNDED_MODULES else f"module.{name}", 0, path, "module", self._stacks.read())
        self._places[module] = place
        return place

    def look_at(self, module: torch.nn.Module, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.last_result = reference_to(result)
            results: Sequence[Found] = ((_FIRST_OUTPUT, result),) if is_on_a_device(result) or is_plain_here(result) else ()
        else:
            results = [(slot, tensor) for slot, tensor in tensors_in(result, "output") if is_plain_here(tensor)]
        if not results:
            return
        if graph_task() == -1:
            call = self._hunt.seen(place, "forward")
            call.number, call.args, call.kwargs, call.results, call.owner = self._hunt.name(place.op), args, kwargs, results, module
            self._look(call)
        if self._hooks_gradients and module._modules and torch.is_grad_enabled():
            for _, tensor in results:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._gradient_hook(place, tensor.output_nr))

    def _look(self, call: SeenCall) -> None:
        session = self._session()
        if session is not None:
            session.look(call)

    def _gradient_hook(self, place: Place, number: int) -> Callable[..., None]:
        session, modules = self._session, weakref.ref(self)

        def hook(gradients: tuple[Any, ...]) -> None:
            alive, mine = session(), modules()
            if alive is not None and mine is not None and alive.is_recording:
                alive.run_safely("look at a gradient", mine._look_at_gradient, place, gradients, number)

        return hook

    def _look_at_gradient(self, place: Place, gradients: tuple[Any, ...], number: int) -> None:
        gradient = gradients[number] if number < len(gradients) else None
        if gradient is not None and is_plain_here(gradient):
            call = self._hunt.seen(place, "backward")
            call.results = [(_FIRST_INPUT, gradient)]
            self._look(call)

    def locate(self, slots: Sequence[Slot]) -> tuple[Place, str] | None:
        """Return the module in whose backward gradients went bad: the last one, in the order of the forward pass, whose parameters show
        it.
        """
        names = [".".join(map(str, slot.path[:-1])) for slot in slots if slot.role == "gradient"]
        order = {place.module: (module, place) for module, place in self._places.items() if module._parameters}
        modules = list(order)
        bad = [number for number, path in enumerate(modules) if path in names]
        if not bad:
            return None
        module, place = order[modules[bad[-1]]]
        after = modules[bad[-1] + 1] if bad[-1] + 1 < len(modules) else ""
        if len(bad) == 1 and len(modules) > 1 and bad[-1] > 0:
            note = "no other module's gradients are bad: they were made with its own parameters' gradients"
        elif after:
            note = (
                f"the gradients of '{after}', which comes next, are finite: made in the backward of what lies between the two, or its own"
            )
        else:
            note = "it is the last module: made in the backward of the loss, or its own"
        return Place(f"module.{type(module).__name__}", 0, place.module, "module", place.stack), note
