# SPDX-License-Identifier: Apache-2.0
"""Break kernels: faults as functions of one aten call.

A fault is called as `fault(op, args, kwargs)` with plain CPU tensors and returns what the broken kernel would return.
It may write to what `op` writes to and to nothing else. In text, for scripts and the environment, an injection is

    OPERATION FAULT[=VALUE] [call=N] [phase=forward|backward]

and several are separated by semicolons: `aten.gelu.default scale=0.01 call=1; aten.mm.default nan phase=backward`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

import torch

from ulpscope._torch_private import tree_leaves, tree_map_only
from ulpscope.errors import InputError

__all__ = ["FAULTS", "Fault", "Injection", "Phase", "find_operation", "named_fault", "parse_injections"]

Fault: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Phase: TypeAlias = Literal["forward", "backward"]


@dataclass(eq=False, kw_only=True)
class Injection:
    """One fault at one operation; counts how often the operation ran in its phase and how often the fault struck."""

    op: Any
    fault: Fault
    call: int | None = None
    phase: Phase | None = None
    num_calls: int = 0
    num_hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def strikes(self, op: Any, phase: Phase) -> bool:
        """Count this call and tell whether it is the one to break."""
        if op is not self.op or self.phase not in (None, phase):
            return False
        with self._lock:
            index = self.num_calls
            self.num_calls += 1
            hit = self.call in (None, index)
            self.num_hits += hit
        return hit


def find_operation(name: str) -> Any:
    """Find the operation of a name such as `aten.gelu.default`; the overload may be left out where it is `default`."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        raise InputError(f"no operation is called {name!r} in this torch; give one as 'aten.gelu.default'") from None


def named_fault(name: str, value: float | None = None) -> Fault:
    """Make a fault of the table, with its parameter."""
    if name not in FAULTS:
        raise InputError(f"no fault is called {name!r}; there are {', '.join(FAULTS)}")
    make, default = FAULTS[name]
    return make(default if value is None else value)


def parse_injections(text: str) -> list[Injection]:
    """Parse the injections of a text (see the module's docstring)."""
    return [_parse_injection(part) for part in text.split(";") if part.strip()]


def _parse_injection(text: str) -> Injection:
    words = text.split()
    if len(words) < 2:
        raise InputError(
            f"{text.strip()!r} is not an injected fault; expected 'OPERATION FAULT', as in 'aten.gelu.default scale=0.01 call=1'"
        )
    op, fault, *options = words
    name, _, value = fault.partition("=")
    settings = dict(option.partition("=")[::2] for option in options)
    if unknown := settings.keys() - {"call", "phase"}:
        raise InputError(f"{text.strip()!r} has the option {min(unknown)!r}; an injected fault takes call=N and phase=forward or backward")
    phase = settings.get("phase")
    if phase not in (None, *get_args(Phase)):
        raise InputError(f"{text.strip()!r} has the phase {phase!r}; it is forward or backward")
    try:
        parameter = float(value) if value else None
        call = int(settings["call"]) if "call" in settings else None
    except ValueError:
        raise InputError(f"{text.strip()!r} has a value that is not a number") from None
    return Injection(op=find_operation(op), fault=named_fault(name, parameter), call=call, phase=cast("Phase | None", phase))


def _changing_results(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Compute honestly, then change every floating result, or what the operation wrote to if it returns nothing."""

    def fault(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op(*args, **kwargs)
        if result is None:
            for argument, value in zip(op._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tree_leaves(value):
                        tensor.copy_(changed(tensor))
            return None
        return tree_map_only(torch.Tensor, changed, result)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return change(tensor) if tensor.is_floating_point() and tensor.numel() else tensor

    return fault


def _scale(amount: float) -> Fault:
    return _changing_results(lambda tensor: (tensor.double() * (1 + amount)).to(tensor.dtype))


def _zero_row(row: float) -> Fault:
    def zeroed(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.clone(memory_format=torch.preserve_format)
        rows.select(-2 if rows.dim() > 1 else 0, int(row)).zero_() if rows.dim() else rows.zero_()
        return rows

    return _changing_results(zeroed)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flip_bit(bit: float) -> Fault:
    """Flip one bit (0 is the lowest of the fraction) of the element of largest magnitude."""

    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.contiguous().flatten().clone()
        words = flat.view(_WORDS[tensor.element_size()])
        worst = int(flat.float().abs().argmax())
        words[worst] ^= torch.tensor(1, dtype=words.dtype) << int(bit)
        return flat.reshape(tensor.shape)

    return _changing_results(flipped)


def _put(number: float) -> Callable[[float], Fault]:
    def make(position: float) -> Fault:
        def planted(tensor: torch.Tensor) -> torch.Tensor:
            values = tensor.contiguous().clone()
            values.view(-1)[int(position)] = number
            return values

        return _changing_results(planted)

    return make


def _tanh_gelu(_: float) -> Fault:
    """Compute gelu by its tanh approximation where the exact formula was asked for."""

    def fault(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op(*args, **{**kwargs, "approximate": "tanh"})

    return fault


def _swap_arguments(_: float) -> Fault:
    """Swap the first two tensors of the same shape."""

    def fault(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        order = list(args)
        tensors = [i for i, argument in enumerate(order) if isinstance(argument, torch.Tensor)]
        for i, j in ((i, j) for i in tensors for j in tensors if i < j):
            if order[i].shape == order[j].shape:
                order[i], order[j] = order[j], order[i]
                break
        return op(*order, **kwargs)

    return fault


FAULTS: dict[str, tuple[Callable[[float], Fault], float]] = {
    "scale": (_scale, 1e-3),
    "zero_row": (_zero_row, 0),
    "flip_bit": (_flip_bit, 20),
    "nan": (_put(float("nan")), 0),
    "inf": (_put(float("inf")), 0),
    "tanh_gelu": (_tanh_gelu, 0),
    "swap_arguments": (_swap_arguments, 0),
}
"""Each named fault, with its default parameter: the relative error, the row, the bit, or the position."""
