# SPDX-License-Identifier: Apache-2.0
"""Read the state that decides what calls compute: modes, random generators, optimizers."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from ulpscope._torch_private import spare_device
from ulpscope.capture.torch_internals import blind, device_of, inside_transform, is_foreign
from ulpscope.capture.walk import Found, encode_arguments
from ulpscope.model import Modes, Slot

if TYPE_CHECKING:
    from ulpscope.capture.intercept.modules import ModuleStack

__all__ = ["BufferHunt", "ModeRow", "OptimizerProbe", "mode_row", "random_generators", "surrounding_modes"]

ModeRow = tuple[str | None, bool, bool, bool | None, bool]


def surrounding_modes(found: list[Found], module: torch.nn.Module | None) -> Modes:
    """Return the modes under which a call runs, on the device of its first tensor."""
    autocast, grad, inference, training, deterministic = mode_row(found, module)
    return Modes(autocast=autocast, grad=grad, inference=inference, training=training, deterministic=deterministic)


def mode_row(found: list[Found], module: torch.nn.Module | None) -> ModeRow:
    """Return the same as a row, as the store writes it."""
    device = _kind(device_of(found[0][1])) if found else "cpu"
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
def _kind(device: torch.device | None) -> str | None:
    """Return the kind of a device that knows autocast; None for any other."""
    return device.type if device is not None and torch.amp.is_autocast_available(device.type) else None


def random_generators() -> dict[str, Any]:
    """Take a short fingerprint of each random generator, without drawing from it."""
    states: dict[str, Any] = {"python": _digest(repr(random.getstate()).encode())}
    if inside_transform():  # inside a transform even the state of a generator has no memory
        return states
    with blind():
        states["torch"] = _digest(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = [_digest(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()]
        for name, module in _other_accelerators():
            states[name] = [_digest(state.cpu().numpy().tobytes()) for state in module.get_rng_state_all()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = _digest(name.encode() + keys.tobytes() + repr(rest).encode())
    return states


def _other_accelerators() -> list[tuple[str, Any]]:
    """Return the backends besides CUDA that are in use and expose the state of their generators."""
    found = []
    for name in dict.fromkeys((spare_device(), "xpu")):
        module = getattr(torch, name, None)
        if hasattr(module, "get_rng_state_all") and getattr(module, "is_initialized", bool)():
            found.append((name, module))
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


_RUNNING = ("running_mean", "running_var")
"""Buffers that torch writes to without a new version."""
_SMALL = 1 << 18


class BufferHunt:
    """Tells which buffers of the models of a step have changed at its end.

    A large buffer is looked at only if its version changed. A small one is read again, which finds silent writes, unless its device would
    give the values only later.
    """

    def __init__(self, modules: ModuleStack, take: Callable[[list[Found]], Sequence[Any]]) -> None:
        self._modules = modules
        self._take = take
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._before: dict[Slot, tuple[tuple[int, int], Any]] = {}

    def forget(self) -> None:
        self._models.clear()
        self._before.clear()

    def remember(self, model: torch.nn.Module) -> None:
        """Take down the buffers of a model right after they were recorded: nothing is read twice."""
        self._models.append(weakref.ref(model))
        for slot, buffer in self._all(model):
            self._before[slot] = _moment(buffer), self._values(slot, buffer) if _is_small(buffer) else None

    def changed(self) -> list[Found]:
        models = [model for reference in self._models if (model := reference()) is not None]
        found = {slot: buffer for model in models for slot, buffer in self._all(model)}
        return [(slot, buffer) for slot, buffer in found.items() if self._is_changed(slot, buffer)]

    def _is_changed(self, slot: Slot, buffer: torch.Tensor) -> bool:
        moment, before = self._before.get(slot, (None, None))
        is_written = moment != _moment(buffer)
        if before is None or before.waits or not _is_small(buffer):
            return is_written or slot.path[-1] in _RUNNING
        now = self._values(slot, buffer)
        return is_written if now is None or now.waits or now.fingerprint is None else bool(now.fingerprint != before.fingerprint)

    def _values(self, slot: Slot, buffer: torch.Tensor) -> Any:
        """Return the values of a buffer; None if its slot is not to be recorded."""
        taken = self._take([(slot, buffer)])
        return taken[0].values if taken else None

    def _all(self, model: torch.nn.Module) -> list[Found]:
        named = self._modules.named_buffers(model)
        return [(Slot.parse(f"buffer.{name}"), buffer) for name, buffer in named if not is_lazy(buffer)]


def _is_small(tensor: torch.Tensor) -> bool:
    return not is_foreign(tensor) and tensor.layout is torch.strided and not tensor.is_nested and tensor.nbytes <= _SMALL


def _moment(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a pair that changes as soon as the tensor is another one, or was written to."""
    return id(tensor), -1 if tensor.is_inference() else tensor._version


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
        """Return the gradients that the step is about to use. Ask for them before everything else of a step: names are looked up here."""
        return [(Slot.parse(f"gradient.{name}"), p.grad) for name, p in self.names_of(optimizer) if p.grad is not None]

    def names_of(self, optimizer: Any) -> list[tuple[str, Any]]:
        """Return every parameter of an optimizer with its name in the model."""
        self._names = {id(parameter): name for root in self._modules.roots() for name, parameter in self._modules.named_parameters(root)}
        return self._named(optimizer)

    def results_of(self, optimizer: Any) -> list[Found]:
        """Return parameters and optimizer state as the step left them."""
        found: list[Found] = []
        for name, parameter in self._named(optimizer):
            found.append((Slot.parse(f"mutated.{name}"), parameter))
            state = optimizer.state.get(parameter, {}) if isinstance(optimizer.state, dict) else {}
            found += [(Slot.parse(f"state.{name}.{key}"), value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        return found

    def hyper_parameters(self, optimizer: Any) -> dict[str, Any]:
        """Return all settings of all parameter groups; the parameters of a group by name."""
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
