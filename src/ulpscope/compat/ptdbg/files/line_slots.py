# SPDX-License-Identifier: Apache-2.0
"""List the tensors and numbers of a record under the names of the old tool, in its order.

Positional arguments come as `input.0`, containers inside them as `input.0.1`; keyword arguments, None, texts and dtypes have no line, but
keep their number. A single result has no number. If a call returns nothing, the tensors it wrote to are its outputs. In a backward record
the gradients of the call's floating inputs are numbered in the order of these inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from ulpscope.model import DTYPES, CallRecord, Slot, TensorRecord

__all__ = ["Value", "backward_values", "floating_inputs", "forward_values"]

Value: TypeAlias = TensorRecord | bool | int | float
Path: TypeAlias = tuple[int | str, ...]


def forward_values(record: CallRecord) -> Iterator[tuple[str, Value]]:
    """Yield `input.0` and its value, and so on, to the outputs."""
    slots = {slot.slot: slot for slot in record.slots}
    for index, argument in enumerate(record.arguments.args if record.arguments else ()):
        yield from _walk(f"input.{index}", argument, slots)
    returned = [slot for slot in record.slots if slot.slot.role == "output"]
    if len(returned) == 1 and returned[0].slot.path == (0,):
        yield "output", returned[0]
        return
    for slot in returned or [slot for slot in record.slots if slot.slot.role == "mutated"]:
        if all(isinstance(part, int) for part in slot.slot.path):
            yield ".".join(("output", *map(str, slot.slot.path))), slot


def _walk(name: str, value: Any, slots: dict[Slot, TensorRecord]) -> Iterator[tuple[str, Value]]:
    if isinstance(value, (bool, int, float)):
        yield name, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(f"{name}.{index}", item, slots)
    elif isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind in ("$tuple", "$size"):
            yield from _walk(name, content, slots)
        elif kind == "$int":
            yield name, int(content)
        elif kind == "$tensor" and Slot.parse(content) in slots:
            yield name, slots[Slot.parse(content)]


def floating_inputs(record: CallRecord) -> list[Path]:
    """List the paths of a call's inputs that a gradient can belong to."""
    inputs = (slot for slot in record.slots if slot.slot.role == "input")
    return [slot.slot.path for slot in inputs if slot.dtype in DTYPES and DTYPES[slot.dtype].is_floating]


def backward_values(record: CallRecord, inputs: list[Path]) -> Iterator[tuple[str, TensorRecord]]:
    """Yield gradients of the outputs, then of the inputs; `inputs` comes from `floating_inputs` of the forward record."""
    received = [slot for slot in record.slots if slot.slot.role == "input" and all(isinstance(part, int) for part in slot.slot.path)]
    for slot in sorted(received, key=lambda slot: _in_order(slot.slot.path)):
        yield str(slot.slot), slot
    passed_on = [slot for slot in record.slots if slot.slot.role == "output"]
    places = {path: place for place, path in enumerate(inputs)}
    for slot in sorted(passed_on, key=lambda slot: _in_order(slot.slot.path)):
        yield f"output.{places.setdefault(slot.slot.path, len(places))}", slot


def _in_order(path: Path) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key: numbers by size, before names."""
    return tuple((isinstance(part, str), part if isinstance(part, int) else 0, str(part)) for part in path)
