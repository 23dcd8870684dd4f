# SPDX-License-Identifier: Apache-2.0
"""Find tensors inside nested arguments, and turn everything else into plain values (the `$` notation of `model.records`)."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from ulpscope.model import Arguments, Role, Slot
from ulpscope.recording.safety import let_pass

__all__ = [
    "READY_INPUTS",
    "Encoded",
    "Found",
    "encode_arguments",
    "encode_value",
    "renamed",
    "slot_and_mark",
    "slot_text",
    "split_arguments",
    "tensors_in",
]

Found = tuple[Slot, torch.Tensor]
Encoded = tuple[tuple[Any, ...], dict[str, Any] | None]
"""Positional and keyword arguments as plain values."""

_PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN_VALUES = frozenset((type(None), bool, float))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)
_LONGEST_CONTAINER = 4096
_LONGEST_TEXT = 200
_DEEPEST = 32


def encode_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Found]]:
    """Split the arguments of a call into its tensors, by slot, and the rest."""
    (encoded, named), found = split_arguments(args, kwargs)
    return Arguments(args=encoded, kwargs=named), found


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Encoded, list[Found]]:
    """Do the same as `encode_arguments`, without the noun around it: for the hot path."""
    found: list[Found] = []
    encoded = []
    for index, value in enumerate(args):
        kind = type(value)
        if kind in _PLAIN_TENSORS and index < _NUM_READY:
            slot, mark = READY_INPUTS[index]
            found.append((slot, value))
            encoded.append(mark)
        elif kind in _PLAIN_VALUES or (kind is int and -(2**63) <= value < 2**63):
            encoded.append(value)
        else:
            encoded.append(encode_value(value, (index,), "input", found))
    named = {name: encode_value(value, (name,), "input", found) for name, value in kwargs.items()} if kwargs else None
    return (tuple(encoded), named), found


def tensors_in(value: Any, role: Role) -> list[Found]:
    """Return the tensors of a result; a lone tensor is item 0."""
    if type(value) in _PLAIN_TENSORS:
        return [(slot_and_mark(role, (0,))[0], value)]
    found: list[Found] = []
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(_items(value)):
            encode_value(item, (index,), role, found)
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            encode_value(item, (key if isinstance(key, int) else str(key),), role, found)
    else:
        encode_value(value, (0,), role, found)
    return found


def encode_value(value: Any, path: tuple[int | str, ...], role: Role, found: list[Found]) -> Any:
    if isinstance(value, torch.Tensor):
        slot, mark = slot_and_mark(role, path)
        found.append((slot, value))
        return mark
    if value is None or isinstance(value, (bool, float, str)):
        return value if not isinstance(value, str) or len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT] + "…"
    if isinstance(value, enum.Enum):
        return {"$object": _type_name(value), "repr": value.name}
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else {"$int": str(int(value))}
    if len(path) > _DEEPEST:
        return {"$object": _type_name(value), "repr": "nested too deeply"}
    if isinstance(value, torch.Size):
        return {"$size": [int(size) for size in value]}
    if isinstance(value, (tuple, list)):
        items = [encode_value(item, (*path, index), role, found) for index, item in enumerate(_items(value)[:_LONGEST_CONTAINER])]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {
            str(key): encode_value(item, (*path, key if isinstance(key, int) else str(key)), role, found) for key, item in dict.items(value)
        }
    return _encode_object(value, path, role, found)


def _items(value: tuple[Any, ...] | list[Any]) -> tuple[Any, ...] | list[Any]:
    """Return the items of a container, past its class: a class of the user's may count, load or draw when it is asked for its items."""
    if type(value) in (tuple, list):
        return value
    return tuple.__getitem__(value, slice(None)) if isinstance(value, tuple) else list.__getitem__(value, slice(None))


@functools.lru_cache(maxsize=4096)
def slot_and_mark(role: Role, path: tuple[int | str, ...]) -> tuple[Slot, dict[str, str]]:
    """Return a slot, and the mark that stands for its tensor among the arguments."""
    slot = Slot(role, path)
    return slot, {"$tensor": str(slot)}


@functools.lru_cache(maxsize=4096)
def renamed(role: Role, slot: Slot) -> Slot:
    """Return the slot of the same path in another role."""
    return Slot(role, slot.path)


@functools.lru_cache(maxsize=8192)
def slot_text(slot: Slot) -> str:
    return str(slot)


_NUM_READY = 16
READY_INPUTS = [slot_and_mark("input", (index,)) for index in range(_NUM_READY)]


def _encode_object(value: Any, path: tuple[int | str, ...], role: Role, found: list[Found]) -> Any:
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.memory_format):
        return {"$memory_format": str(value).removeprefix("torch.")}
    if isinstance(value, torch.layout):
        return {"$layout": str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {
            "$slice": [
                encode_value(part, (*path, name), role, found) for name, part in zip(("start", "stop", "step"), _parts(value), strict=True)
            ]
        }
    if value is Ellipsis:
        return {"$ellipsis": True}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode_value(getattr(value, field.name, None), (*path, field.name), role, found)
            for field in dataclasses.fields(value)
        }
    return {"$object": _type_name(value), "repr": _short_repr(value)}


def _parts(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _short_repr(value: Any) -> str:
    """Return a text that tells two objects apart, without an address that changes from run to run."""
    if isinstance(value, _NAMED):  # ask no attribute of any other object: a tracer would record the question
        return f"{value.__module__}.{value.__qualname__}"
    has_own_repr = any("__repr__" in ancestor.__dict__ for ancestor in type(value).__mro__[:-1])
    try:
        return _ADDRESS.sub("", repr(value))[:_LONGEST_TEXT] if has_own_repr else ""
    except Exception as error:
        let_pass(error)
        return "(cannot be printed)"
