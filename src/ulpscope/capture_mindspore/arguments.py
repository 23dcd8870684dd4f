# SPDX-License-Identifier: Apache-2.0
"""Tensors inside nested arguments, and everything else as plain values (the `$` notation of `model.records`)."""

from __future__ import annotations

import enum
import re
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype

from ulpscope.model import Arguments, Role, Slot

__all__ = ["Found", "encode_arguments", "tensors_in"]

Found: TypeAlias = tuple[Slot, Any]
"""A slot and its live tensor."""

_DTYPE = type(mstype.float32)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST_TEXT = 200
_LONGEST_CONTAINER = 4096
_DEEPEST = 32


def encode_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Found]]:
    """Split the arguments of a call into its tensors, by slot, and the rest."""
    found: list[Found] = []
    encoded = tuple(_encode(value, (index,), "input", found) for index, value in enumerate(args))
    named = {name: _encode(value, (name,), "input", found) for name, value in kwargs.items()}
    return Arguments(args=encoded, kwargs=named or None), found


def tensors_in(value: Any, role: Role) -> list[Found]:
    """The tensors of a result; a lone tensor is item 0."""
    found: list[Found] = []
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _encode(item, (index,), role, found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _encode(item, (key if isinstance(key, int) else str(key),), role, found)
    else:
        _encode(value, (0,), role, found)
    return found


def _encode(value: Any, path: tuple[int | str, ...], role: Role, found: list[Found]) -> Any:
    if isinstance(value, Tensor):
        slot = Slot(role, path)
        found.append((slot, value))
        return {"$tensor": str(slot)}
    if value is None or isinstance(value, (bool, float, int)):
        return value if not isinstance(value, int) or -(2**63) <= value < 2**64 else {"$int": str(value)}
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else value[:_LONGEST_TEXT] + "…"
    if len(path) > _DEEPEST:
        return {"$object": _type_name(value), "repr": "nested too deeply"}
    if isinstance(value, (tuple, list)):
        items = [_encode(item, (*path, index), role, found) for index, item in enumerate(value[:_LONGEST_CONTAINER])]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {str(key): _encode(item, (*path, key if isinstance(key, int) else str(key)), role, found) for key, item in value.items()}
    return _encode_object(value, path, role, found)


def _encode_object(value: Any, path: tuple[int | str, ...], role: Role, found: list[Found]) -> Any:
    if isinstance(value, _DTYPE):
        return {"$dtype": str(value).lower()}
    if isinstance(value, slice):
        parts = (("start", value.start), ("stop", value.stop), ("step", value.step))
        return {"$slice": [_encode(part, (*path, name), role, found) for name, part in parts]}
    if value is Ellipsis:
        return {"$ellipsis": True}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, enum.Enum):
        return {"$object": _type_name(value), "repr": value.name}
    if isinstance(value, np.generic) and value.dtype.kind in "iufb":
        return value.item()
    return {"$object": _type_name(value), "repr": _short_repr(value)}


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _short_repr(value: Any) -> str:
    """What tells two objects apart without an address that changes from run to run."""
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    has_own_repr = any("__repr__" in ancestor.__dict__ for ancestor in type(value).__mro__[:-1])
    return _ADDRESS.sub("", repr(value))[:_LONGEST_TEXT] if has_own_repr else ""
