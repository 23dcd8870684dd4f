# SPDX-License-Identifier: Apache-2.0
"""What is not a call and still decides what calls compute: modes, random generators, optimizers."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from ulpscope.capture.torch_internals import blind, inside_transform
from ulpscope.capture.walk import Found, encode_arguments
from ulpscope.model import Modes, Slot

if TYPE_CHECKING:
    from ulpscope.capture.modules import ModuleStack

__all__ = ["ModeRow", "OptimizerProbe", "mode_row", "random_generators", "surrounding_modes"]

ModeRow = tuple[str | None, bool, bool, bool | None, bool]


def surrounding_modes(found: list[Found], module: torch.nn.Module | None) -> Modes:
    """The modes under which a call runs, on the device of its first tensor."""
    autocast, grad, inference, training, deterministic = mode_row(found, module)
    return Modes(autocast=autocast, grad=grad, inference=inference, training=training, deterministic=deterministic)


def mode_row(found: list[Found], module: torch.nn.Module | None) -> ModeRow:
    """The same as the store writes it."""
    device = _kind(found[0][1].device) if found else "cpu"
    autocast = None
    if device is not None and torch.is_autocast_enabled(device):
        autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return (
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        module.training if module is not None else None,
        torch.are_deterministic_algorithms_enabled(),
    )


@functools.lru_cache(maxsize=256)
def _kind(device: torch.device) -> str | None:
    """The kind of a device that knows autocast."""
    return device.type if torch.amp.is_autocast_available(device.type) else None


def random_generators() -> dict[str, Any]:
    """A short fingerprint of each random generator, without drawing from it."""
    states: dict[str, Any] = {"python": _digest(repr(random.getstate()).encode())}
    if inside_transform():  # there even the state of a generator has no memory
        return states
    with blind():
        states["torch"] = _digest(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = [_digest(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = _digest(name.encode() + keys.tobytes() + repr(rest).encode())
    return states


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class OptimizerProbe:
    """Names an optimizer's tensors after the parameters they belong to."""

    def __init__(self, modules: ModuleStack, only: list[Any] | None = None) -> None:
        self._modules = modules
        self._only = only
        self.gradients: dict[int, Any] = {}
        self._names: dict[int, str] = {}

    def wants(self, optimizer: Any) -> bool:
        return self._only is None or any(wanted is optimizer for wanted in self._only)

    def gradients_of(self, optimizer: Any) -> list[Found]:
        """The gradients that the step is about to use. Asked for before everything else of a step: names are looked up here."""
        return [(Slot.parse(f"gradient.{name}"), p.grad) for name, p in self.names_of(optimizer) if p.grad is not None]

    def names_of(self, optimizer: Any) -> list[tuple[str, Any]]:
        """Every parameter of an optimizer with its name in the model."""
        self._names = {id(parameter): name for root in self._modules.roots() for name, parameter in self._modules.named_parameters(root)}
        return self._named(optimizer)

    def results_of(self, optimizer: Any) -> list[Found]:
        """Parameters and optimizer state as the step left them."""
        found: list[Found] = []
        for name, parameter in self._named(optimizer):
            found.append((Slot.parse(f"mutated.{name}"), parameter))
            state = optimizer.state.get(parameter, {}) if isinstance(optimizer.state, dict) else {}
            found += [(Slot.parse(f"state.{name}.{key}"), value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        return found

    def hyper_parameters(self, optimizer: Any) -> dict[str, Any]:
        """All settings of all parameter groups; the parameters of a group by name."""
        groups = []
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            encoded, _ = encode_arguments((), settings)
            groups.append({**(encoded.kwargs or {}), "params": [self._names.get(id(p), "?") for p in group["params"]]})
        return {"groups": groups}

    def _named(self, optimizer: Any) -> list[tuple[str, Any]]:
        return [
            (self._names.get(id(parameter), f"group{number}.{position}"), parameter)
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
        ]
