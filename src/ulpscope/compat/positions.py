# SPDX-License-Identifier: Apache-2.0
"""Put arguments where the older tools expect them.

A function of torch.nn.functional passes its arguments on by name before a mode sees them, so `F.layer_norm(x, shape, weight, bias)` arrives
as `weight=`, `bias=` and `eps=`. The older tools saw the call as written. This module moves tensors back to their positions, with
everything before them, and drops arguments with their default value unless they are asked for.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

from ulpscope.model import Arguments, CallRecord, Slot, TensorRecord

__all__ = ["with_positions"]

_MISSING = object()


def with_positions(record: CallRecord, *, with_defaults: bool = False) -> CallRecord:
    """Return the record with its tensors by position, forward and backward.

    >>> with_positions(record).slots[1].slot  # doctest: +SKIP
    Slot(role='input', path=(2,))
    """
    parameters = _parameters(record.call.op)
    if not parameters:
        return record
    places = {name: place for place, name in enumerate(parameters)}
    slots = tuple(_placed(slot, places) for slot in record.slots)
    arguments = _arranged(record.arguments, parameters, with_defaults) if record.arguments is not None else None
    return replace(record, slots=slots, arguments=arguments)


@functools.lru_cache(maxsize=1024)
def _parameters(op: str) -> dict[str, Any]:
    """Return the parameters of a Python function of torch.nn.functional with their defaults; empty for any other function."""
    namespace, _, name = op.partition(".")
    if namespace != "functional":
        return {}
    import torch

    function = getattr(torch.nn.functional, name, None)
    if not inspect.isfunction(function):
        return {}
    found = inspect.signature(function).parameters.values()
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.KEYWORD_ONLY) for each in found):
        return {}
    return {each.name: _MISSING if each.default is each.empty else each.default for each in found}


def _placed(slot: TensorRecord, places: dict[str, int]) -> TensorRecord:
    path = slot.slot.path
    if not path or path[0] not in places:
        return slot
    return replace(slot, slot=Slot(slot.slot.role, (places[str(path[0])], *path[1:])))


def _arranged(arguments: Arguments, parameters: dict[str, Any], with_defaults: bool) -> Arguments:
    names, named = list(parameters), dict(arguments.kwargs or {})
    last = max((place for place, name in enumerate(names) if _holds_tensor(named.get(name))), default=-1)
    args = list(arguments.args)
    for place in range(len(args), last + 1):
        default = parameters[names[place]]
        args.append(_moved(named.pop(names[place], None if default is _MISSING else default), names[place], place))
    kept = {name: value for name, value in named.items() if with_defaults or name not in parameters or value != parameters[name]}
    return Arguments(args=tuple(args), kwargs=kept)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return "$tensor" in value or any(map(_holds_tensor, value.values()))
    return isinstance(value, list) and any(map(_holds_tensor, value))


def _moved(value: Any, name: str, place: int) -> Any:
    """Return the same value, its tensors named by their new position."""
    if isinstance(value, dict):
        if "$tensor" in value:
            slot = Slot.parse(value["$tensor"])
            return {"$tensor": str(Slot(slot.role, (place, *slot.path[1:])))} if slot.path[:1] == (name,) else value
        return {key: _moved(part, name, place) for key, part in value.items()}
    return [_moved(part, name, place) for part in value] if isinstance(value, list) else value
