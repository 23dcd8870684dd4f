# SPDX-License-Identifier: Apache-2.0
"""Wrap a function of tensors as the program that a yardstick measures, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ulpscope.model import Slot

Values = dict[Slot, torch.Tensor]


@dataclass(frozen=True)
class Forward:
    name: str
    function: Callable[..., Any]
    inputs: Values

    def __call__(self, inputs: Mapping[Slot, torch.Tensor]) -> Values:
        with torch.no_grad():
            return _outputs(self.function(*inputs.values()))


@dataclass(frozen=True)
class Backward:
    """The gradients of the first result; the last input is the gradient that enters."""

    name: str
    function: Callable[..., Any]
    inputs: Values
    num_differentiable: int | None = None

    def __call__(self, inputs: Mapping[Slot, torch.Tensor]) -> Values:
        *values, gradient = inputs.values()
        leaves = [one.detach().clone() for one in values]
        for leaf in leaves[: self.num_differentiable]:
            leaf.requires_grad_(leaf.is_floating_point())
        places = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
        with torch.enable_grad():
            result = self.function(*[leaf.view_as(leaf) for leaf in leaves])
            found = torch.autograd.grad(result, [leaves[place] for place in places], gradient.to(result.dtype), allow_unused=True)
        return {
            Slot("output", (place,)): torch.zeros_like(leaves[place]) if one is None else one
            for place, one in zip(places, found, strict=True)
        }


def forward(name: str, function: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> Forward:
    return Forward(name, function, {Slot("input", (place,)): one for place, one in enumerate(values)})


def backward(
    name: str, function: Callable[..., Any], values: tuple[torch.Tensor, ...], gradient: torch.Tensor, num_differentiable: int | None = None
) -> Backward:
    inputs = {Slot("input", (place,)): one for place, one in enumerate(values)}
    return Backward(name, function, inputs | {Slot("gradient", (0,)): gradient}, num_differentiable)


def _outputs(result: Any) -> Values:
    results = result if isinstance(result, tuple) else (result,)
    return {Slot("output", (place,)): one for place, one in enumerate(results)}
