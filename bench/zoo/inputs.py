# SPDX-License-Identifier: Apache-2.0
"""Draw the tensors of a row from a seed: the same numbers for every dtype and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Sampler = Callable[[Tensor], Tensor]

CALIBRATION: dict[str, Sampler] = {
    "normal": lambda z: z,
    "mean 100": lambda z: z + 100,
    "mean 10 std 0.01": lambda z: 0.01 * z + 10,
    "1e-6": lambda z: 1e-6 * z,
    "1e4": lambda z: 1e4 * z,
    "saturated": lambda z: 30 * z,
    "mean -5": lambda z: z - 5,
    "one in ten": lambda z: torch.where(z.abs() > 1.64, z, 0.0),
    "heavy tails": lambda z: z / z.flip(-1).abs().clamp(min=1e-3),
}
HELD: dict[str, Sampler] = {
    "mean 1000 std 3": lambda z: 3 * z + 1000,
    "mean -1 std 0.1": lambda z: 0.1 * z - 1,
    "std 12": lambda z: 12 * z,
    "positive part": lambda z: z.clamp(min=0),
    "log-normal": lambda z: (2 * z).exp(),
    "two peaks": lambda z: 0.1 * z + 3 * z.flip(-1).sign(),
    "few values": lambda z: (2 * z).round() / 2,
    "rows of all sizes": lambda z: z * 10 ** torch.linspace(-3, 2, z.shape[0]).view(-1, *[1] * (z.dim() - 1)),
    "columns of all sizes": lambda z: z * 10 ** torch.linspace(-4, 1, z.shape[-1]),
}


@dataclass
class Source:
    """Draws the tensors of one row. Only `data` follows the distribution."""

    sampler: Sampler
    dtype: torch.dtype
    generator: torch.Generator

    def data(self, *shape: int) -> Tensor:
        return self.sampler(torch.randn(shape, generator=self.generator)).to(self.dtype)

    def weight(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def share(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.dtype)

    def away_from_zero(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator)
        return (drawn + drawn.sign() * 0.1).to(self.dtype)

    def fixed(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def index(self, end: int, count: int) -> Tensor:
        return torch.randint(end, (count,), generator=self.generator)
