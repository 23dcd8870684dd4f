# SPDX-License-Identifier: Apache-2.0
"""Check that a call fits into memory before it is run.

A record may lie: `torch.zeros` of 10**12 elements is a short line of text. A call may make 16 times the number of elements that were kept
of it, or 64 million. Where the sizes of its arguments leave a doubt, the call runs on the meta device, which has shapes but no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ulpscope.model import Arguments, CallRecord, Slot, TensorRecord
from ulpscope.replay.calls.arguments import slots_named
from ulpscope.replay.program import NotReplayable

__all__ = ["check_made", "check_recorded_sizes", "check_result_sizes", "largest_result"]

_ALWAYS_ALLOWED = 2**26
_TIMES_WHAT_WAS_KEPT = 16
_LONGEST_COMBINATION = 64

# A meta run takes milliseconds, and the layers of a model repeat the same calls.
_MADE: dict[str, int] = {}
_MOST_SIGNATURES = 4096

# A meta run of these loads a library for symbols, which takes as long as hundreds of calls.
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})

# The values of these calls' integer tensors are sizes.
_SIZED_BY_VALUES: dict[str, Callable[[torch.Tensor], int]] = {
    "repeat_interleave": lambda counts: int(counts.double().sum()),
    "one_hot": lambda classes: classes.numel() * (int(classes.max()) + 1),
    "bincount": lambda classes: int(classes.max()) + 1,
}


def largest_result(records: Iterable[CallRecord]) -> int:
    """Return how many elements one call may make."""
    kept = sum(math.prod(slot.shape) for record in records for slot in record.slots if slot.content is not None)
    return max(_ALWAYS_ALLOWED, _TIMES_WHAT_WAS_KEPT * kept)


def check_recorded_sizes(record: CallRecord, limit: int) -> None:
    made = sum(math.prod(slot.shape) for slot in record.slots if slot.slot.is_output)
    if made > limit:
        raise NotReplayable(f"its results have {made:,} elements, more than are made again here")


def check_result_sizes(
    op: str,
    arguments: Arguments,
    slots: Mapping[Slot, TensorRecord],
    inputs: Mapping[Slot, torch.Tensor],
    limit: int,
    run: Callable[[Mapping[Slot, torch.Tensor]], Iterable[torch.Tensor]],
) -> None:
    """Raise unless the results are known to be small; `run` runs the call on meta tensors."""
    sizes = [abs(value) for value in _integers(arguments, with_floats=not slots) if abs(value) > 1]
    _check_values(op, inputs, bool(sizes), limit)
    if op.rpartition(".")[2] == "combinations":
        check_made(_most_combined(arguments, inputs), limit)
        return
    integers = math.prod(sizes)
    named = [slots[slot].shape for slot in slots_named(arguments)]
    if (integers * math.prod(max(1, math.prod(shape)) for shape in named)) ** 2 <= _ALWAYS_ALLOWED:
        return
    if op.rpartition(".")[2] in _CONVOLUTIONS and _most_convolved(named, max(sizes, default=1)) <= _ALWAYS_ALLOWED:
        return
    signature = f"{op}{arguments}{[(str(slot), each.dtype, each.shape) for slot, each in slots.items()]}"
    made = _MADE.get(signature)
    if made is None:
        try:
            made = sum(tensor.numel() for tensor in run({slot: _on_meta(record) for slot, record in slots.items()}))
        except Exception:
            made = integers
        if len(_MADE) >= _MOST_SIGNATURES:
            _MADE.clear()
        _MADE[signature] = made
    check_made(made, limit)


def check_made(made: int, limit: int) -> None:
    if made > limit:
        raise NotReplayable(f"it would make {made:,} elements, far more than were recorded")


def _check_values(op: str, inputs: Mapping[Slot, torch.Tensor], has_integers: bool, limit: int) -> None:
    name = next((name for name in _SIZED_BY_VALUES if name in op.split(".")), None)
    if name is None or not inputs or (name == "repeat_interleave" and has_integers and len(inputs) == 1):
        return
    values = list(inputs.values())[-1 if name == "repeat_interleave" else 0]
    if not values.is_floating_point() and values.numel() and _SIZED_BY_VALUES[name](values) > limit:
        raise NotReplayable("the values of its integers ask for far more elements than were recorded")


def _most_combined(arguments: Arguments, inputs: Mapping[Slot, torch.Tensor]) -> int:
    """Bound how many elements `torch.combinations` makes: it first makes a grid of all tuples."""
    length = (arguments.kwargs or {}).get("r", arguments.args[1] if len(arguments.args) > 1 else 2)
    count = max((value.numel() for value in inputs.values()), default=0)
    is_plain = isinstance(length, int) and 0 <= length <= _LONGEST_COMBINATION
    return count**length * max(1, length) if is_plain else _ALWAYS_ALLOWED**2


def _most_convolved(shapes: list[tuple[int, ...]], padding: int) -> int:
    """Bound how many elements a convolution makes, with no larger padding than this."""
    given, weight = (*shapes, (), ())[:2]
    many = len(weight) - 2
    if many < 1 or len(given) <= many:
        return math.prod(map(math.prod, shapes)) ** 2
    return math.prod(given[: -many - 1]) * weight[0] * math.prod(size + 2 * padding for size in given[-many:])


def _on_meta(record: TensorRecord) -> torch.Tensor:
    return torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")


def _integers(arguments: Arguments, *, with_floats: bool) -> Iterable[int]:
    waiting: list[Any] = [*arguments.args, *(arguments.kwargs or {}).values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif with_floats and isinstance(value, float) and math.isfinite(value):
            yield math.ceil(abs(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value
