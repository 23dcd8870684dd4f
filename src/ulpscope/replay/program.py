# SPDX-License-Identifier: Apache-2.0
"""Define Program, a call that can be run again: the one noun that travels inside replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ulpscope.errors import UlpscopeError
from ulpscope.model import Slot, TensorData

if TYPE_CHECKING:
    import torch

__all__ = ["NotReplayable", "Program", "Reader"]

Reader: TypeAlias = Callable[[str], TensorData]
"""The bytes of a tensor by the content key of its record."""


class NotReplayable(UlpscopeError):
    """Raised for a recorded call that cannot be run again; the message is the reason, in one clause."""


class Program(Protocol):
    """A function from named tensors to named tensors, forward or backward, with the arguments of one recorded call.

    `inputs` are the recorded values on the CPU in their own dtype and strides, by slot: `input.*` (and what else enters) of the call;
    a backward program has besides them the gradients of the call's outputs as `gradient.*`, each under the path of that output.
    Running it gives, forward, `output.*` and `mutated.*`; backward `output.*`, the gradient of each input under the path of that input.
    """

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> Mapping[Slot, torch.Tensor]: ...

    def __call__(self, inputs: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Run on these values, which it never writes to.

        Where floating inputs were widened (float64 for float32), the whole call runs in the wider precision: dtype arguments that ask for a
        floating dtype follow, casts excepted. The state of torch's generators is what it was when this returns.
        A call that fails raises NotReplayable.
        """
