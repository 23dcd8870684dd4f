# SPDX-License-Identifier: Apache-2.0
"""Compute how large an overflowed result would have been: run the recorded call once more in float64.

The non-finite hunt records a backward call node by node, and numbers gradients as the node does, not by the inputs of the call. The finite
elements of a recorded gradient tell which of the exact gradients it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ulpscope.model import CallRecord, Slot, TensorRecord
from ulpscope.replay.calls.arguments import read_tensor
from ulpscope.replay.calls.evaluate import backward_program, forward_program
from ulpscope.replay.program import NotReplayable, Program, Reader

__all__ = ["largest_exact_gradient", "largest_exact_result"]

_LOOSE = 0.05


def largest_exact_result(record: CallRecord, slot: Slot, read: Reader) -> float | None:
    """Return the largest magnitude that a slot of a forward call has in float64; None where it has none."""
    exact = _run_wide(forward_program(record, read)).get(slot)
    return None if exact is None else _largest(exact)


def largest_exact_gradient(forward: CallRecord | None, backward: CallRecord, bad: TensorRecord, read: Reader) -> float | None:
    """Return the largest magnitude that a gradient has in float64, from the forward side of its call and the gradients that came in."""
    if forward is None or not any(slot.slot.is_input and slot.content is not None for slot in forward.slots):
        raise NotReplayable("what the call was given was gone when its gradient was computed")
    exact = _run_wide(backward_program(forward, _by_inputs(forward, backward), read))
    recorded = read_tensor(bad, read).double()
    fitting = [gradient for gradient in exact.values() if _fits(gradient, recorded)]
    if not fitting:
        raise NotReplayable("the gradient was made inside the call, before it reached an input")
    return max((_largest(gradient) or 0.0 for gradient in fitting), default=None)


def _by_inputs(forward: CallRecord, backward: CallRecord) -> CallRecord:
    """Keep only the entering gradients of a backward record, and ask for the gradient of every input."""
    came = [slot for slot in backward.slots if slot.slot.role == "input"]
    asked = [
        replace(slot, slot=Slot("output", slot.slot.path), content=slot.content or "asked for")
        for slot in forward.slots
        if slot.slot.role == "input" and slot.requires_grad
    ]
    return replace(backward, slots=(*came, *asked))


def _run_wide(program: Program) -> dict[Slot, torch.Tensor]:
    return program({slot: tensor.double() if tensor.is_floating_point() else tensor for slot, tensor in program.inputs.items()})


def _fits(exact: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Tell whether a recorded gradient may be this one, reshaped or transposed: they must agree where the recorded one is finite."""
    for candidate in (exact, exact.t() if exact.dim() == 2 else exact):
        if candidate.numel() == recorded.numel():
            values = candidate.reshape(recorded.shape)
            known = recorded.isfinite()
            if torch.linalg.vector_norm((values - recorded)[known]) <= _LOOSE * torch.linalg.vector_norm(values[known]):
                return True
    return False


def _largest(exact: torch.Tensor) -> float | None:
    if not exact.numel() or not exact.is_floating_point():
        return None
    largest = float(exact.abs().max().item())
    return largest if largest == largest else None
