# SPDX-License-Identifier: Apache-2.0
"""Compute a call of the program once more, beside it: no mode sees it, it draws the same random numbers, and it leaves no trace.

A second run gets copies of its own, so that it never writes to the program's tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ulpscope.capture.torch_internals import without_function_modes
from ulpscope.capture.walk import encode_arguments
from ulpscope.compat.msprobe.free_benchmark.perturbing import disturbed, mapped, relative_error, tensors_of
from ulpscope.compat.msprobe.free_benchmark.preheating import HONEST
from ulpscope.model import CallName
from ulpscope.model.operations.randomness import draws

__all__ = ["SecondGradients", "SecondRun", "floating_pairs"]

_HONEST = 2**-14
_Function = Callable[..., Any]


class SecondRun:
    """The second run of one call. It is made before the first, since that may write to its arguments.

    With `keeps_graph` gradients flow through the second result, so that it can replace the first.
    """

    def __init__(self, call: CallName, func: _Function, args: Any, kwargs: Any, mode: str, *, keeps_graph: bool) -> None:
        self._func = func
        self._mode = mode
        self._keeps_graph = keeps_graph
        self._given = (args, kwargs)
        self._versions = _versions(self._given)
        self._generators = _Generators(self._given, can_be_repeated=_draws(call, args, kwargs))
        with _apart(keeps_graph=keeps_graph):
            self._inputs = disturbed(self._given, mode)

    @property
    def is_possible(self) -> bool:
        """Tell whether there is something to disturb."""
        return self._inputs is not None

    def run(self) -> Any:
        args, kwargs = self._inputs
        with self._generators.repeated(), _apart(keeps_graph=self._keeps_graph, has_autocast=self._mode != "improve_precision"):
            return self._func(*args, **kwargs)

    def wrote_to_arguments(self) -> bool:
        return self._versions != _versions(self._given)

    def agrees_with_cpu(self, first: Any) -> bool | None:
        """Tell whether the first result agrees with the CPU's in a higher precision; None where the inputs are gone."""
        if self.wrote_to_arguments():
            return None
        with self._generators.repeated(), _apart(keeps_graph=False, has_autocast=False):
            there = mapped(self._given, lambda tensor: tensor.cpu())
            args, kwargs = disturbed(there, "improve_precision") or there
            pairs = list(floating_pairs(first, self._func(*args, **kwargs)))
            return all(relative_error(one, other) <= HONEST.get(str(one.dtype), _HONEST) for _, one, other in pairs)


class SecondGradients:
    """The gradients of one call, computed outside the program's graph: once as they are, once with disturbed inputs."""

    def __init__(self, call: CallName, func: _Function, args: Any, kwargs: Any, mode: str) -> None:
        self._func = func
        self._mode = mode
        self._generators = _Generators((args, kwargs), can_be_repeated=_draws(call, args, kwargs))
        self._wanted = [tensor.requires_grad for tensor in tensors_of((args, kwargs))]
        with _apart(keeps_graph=False):
            self._given = mapped((args, kwargs), lambda tensor: tensor.detach())
        self._versions = _versions(self._given)

    @property
    def is_possible(self) -> bool:
        return any(self._wanted)

    def run(self, received: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return both lists of gradients; empty where the inputs were written to since, or nothing in them can be disturbed."""
        if self._versions != _versions(self._given):
            return [], []
        with _apart(keeps_graph=False):
            copies, changed = disturbed(self._given, "no_change"), disturbed(self._given, self._mode)
        if changed is None:
            return [], []
        return self._of(copies, received, "no_change"), self._of(changed, received, self._mode)

    def _of(self, inputs: Any, received: Sequence[torch.Tensor | None], mode: str) -> list[torch.Tensor]:
        leaves = [tensor.requires_grad_() for tensor, is_wanted in zip(tensors_of(inputs), self._wanted, strict=True) if is_wanted]
        with self._generators.repeated(), _apart(keeps_graph=True, has_autocast=mode != "improve_precision"):
            args, kwargs = mapped(inputs, lambda tensor: tensor.view_as(tensor))  # the call may write to a view, but not to a leaf
            outputs = [tensor for tensor in tensors_of(self._func(*args, **kwargs)) if tensor.requires_grad]
            known = [(own, given) for own, given in zip(outputs, received, strict=True) if given is not None]
            given = [gradient.to(own.device, own.dtype) for own, gradient in known]
            found = torch.autograd.grad([own for own, _ in known], leaves, given, allow_unused=True)
        return [torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in zip(found, leaves, strict=True)]


def floating_pairs(first: Any, second: Any) -> Iterator[tuple[int | None, torch.Tensor, torch.Tensor]]:
    """Yield the floating results that both runs have, with their place in a list or tuple."""
    many = isinstance(first, list | tuple) and isinstance(second, list | tuple)
    pairs = enumerate(zip(first, second, strict=False)) if many else [(None, (first, second))]
    for place, (one, other) in pairs:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.is_floating_point() and one.numel():
            yield place, one, other


def _draws(call: CallName, args: Any, kwargs: Any) -> bool:
    return draws(call.op, encode_arguments(args, kwargs)[0])


class _Generators:
    """The random generators that a call may draw from: a second run draws the same numbers, and the program goes on after the first's."""

    def __init__(self, values: Any, *, can_be_repeated: bool) -> None:
        found = {tensor.device for tensor in tensors_of(values)}
        self._devices = [device for device in found if device.type not in ("cpu", "meta") and _has_generator(device)]
        self._before = self._states() if can_be_repeated else None

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        after = self._states()
        if self._before is not None:
            self._restore(*self._before)
        try:
            yield
        finally:
            self._restore(*after)

    def _states(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with without_function_modes():
            return torch.get_rng_state(), [torch.get_device_module(device).get_rng_state(device) for device in self._devices]

    def _restore(self, host: torch.Tensor, others: list[torch.Tensor]) -> None:
        with without_function_modes():
            torch.set_rng_state(host)
            for device, state in zip(self._devices, others, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)


def _has_generator(device: torch.device) -> bool:
    try:
        return hasattr(torch.get_device_module(device), "get_rng_state")
    except RuntimeError:
        return False


@contextlib.contextmanager
def _apart(*, keeps_graph: bool, has_autocast: bool = True) -> Iterator[None]:
    """Run a second call where no mode sees it, and without autocast, which would undo a raised precision."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_function_modes())
        stack.enter_context(torch.enable_grad() if keeps_graph else torch.no_grad())
        if not has_autocast:
            for kind in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _versions(values: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(values) if not tensor.is_inference()]
