# SPDX-License-Identifier: Apache-2.0
"""Align matrix factors, which are unique only up to the signs of their rows or columns."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ulpscope.model import CallName, Slot

__all__ = ["has_free_signs", "with_signs_of"]

_ROWS = {"qr": (1,), "svd": (2,)}
"""Results whose rows, not columns, carry the sign."""


def has_free_signs(call: CallName) -> bool:
    return bool(call.free_signs)


def with_signs_of(call: CallName, recorded: Mapping[Slot, torch.Tensor], exact: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
    """Return the recorded factors with the signs of the exact ones."""
    name = call.short.removeprefix("linalg_")
    return {slot: _aligned(name, slot, value, exact[slot]) if slot in exact else value for slot, value in recorded.items()}


def _aligned(name: str, slot: Slot, value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    if value.dim() < 2 or value.shape != exact.shape or not value.is_floating_point():
        return value
    along = -1 if slot.path and slot.path[0] in _ROWS.get(name, ()) else -2
    products = (value.to(torch.float64) * exact.to(torch.float64)).sum(along, keepdim=True)
    return torch.where(products < 0, -value, value)
